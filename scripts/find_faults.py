"""Breaks one line of the product at a time, and checks that a test notices: do the tests hold what they promise?

    ./scripts/run python scripts/find_faults.py                        # all faults
    ./scripts/run python scripts/find_faults.py no-fsync no-checksum   # these two
    ./scripts/run python scripts/find_faults.py --list

Each fault of faults.py is put into a copy of the tree, and the tests that must notice it run there. It counts as found
if one of them fails by itself. An error in a fixture does not count, because it would name another promise. The tests
pass without the faults, which is checked first: a test that cannot pass proves nothing.

Prints a table for tests/README.md, and exits with 1 if a fault was not found. Most of the time goes into the faults
that only real ranks show.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from faults import DEFAULT, FAULTS, NIGHTLY, Fault

TREE = Path(__file__).resolve().parents[1]
# What pytest takes for each of them. A fault is not found in a run that leaves its test out.
MARKERS = {DEFAULT: "not nightly and not release", NIGHTLY: "nightly and not release"}
# A fault may make ranks wait for each other. The tests' own limit of time is 300 s each.
LONGEST_SECONDS = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Puts faults of one line each into a copy of the product, and checks that the tests find them.",
        epilog="Exits with 1 if a fault was not found, with 2 if its tests fail without it.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to try; default: all")
    parser.add_argument(
        "--list", action="store_true", help="list the faults and the tests that must find them"
    )
    parser.add_argument(
        "--no-check", action="store_true", help="do not run the tests without the faults first"
    )
    arguments = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"{', '.join(unknown)}: no such fault; --list names them all")
    faults = [known[name] for name in arguments.names] or FAULTS
    if arguments.list:
        for fault in faults:
            print(f"{fault.name:20} {fault.tier:8} hvtrain/{fault.file}: {fault.harm}")
            print("".join(f"    {test}\n" for test in fault.tests), end="")
        return
    with tempfile.TemporaryDirectory(prefix="hvtrain-faults-") as folder:
        copy = copy_of_the_tree(Path(folder) / "tree")
        check_that_it_fits(faults, copy)
        if not arguments.no_check:
            check_without_faults(faults, copy)
        results = [try_out(fault, copy) for fault in faults]
    print(table(results))
    sys.exit(0 if all(result.test for result in results) else 1)


@dataclass(frozen=True)
class Result:
    """test: the first one that failed; "" if none did."""

    fault: Fault
    test: str
    seconds: float


def copy_of_the_tree(copy: Path) -> Path:
    """Copies the files that git does not ignore, as they are now."""
    line = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(line, cwd=TREE, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (TREE / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TREE / name, copy / name, follow_symlinks=False)
    return copy


def environment(copy: Path) -> dict[str, str]:
    """The environment in which the copy is imported, and not the checkout that is installed."""
    paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def check_that_it_fits(faults: list[Fault], copy: Path) -> None:
    """Ends the program if a fault does not fit its file, or if the copy is not what tests import."""
    for fault in faults:
        times = (copy / "hvtrain" / fault.file).read_text().count(fault.old)
        if times != 1:
            sys.exit(
                f"{fault.name}: hvtrain/{fault.file} has {times} times, and needs once: {fault.old.strip()}"
            )
    code = "import hvtrain; print(hvtrain.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy.parent,
        env=environment(copy),
        capture_output=True,
        text=True,
        check=True,
    )
    if not Path(found.stdout.strip()).is_relative_to(copy):
        sys.exit(f"{found.stdout.strip()} is imported instead of the copy in {copy}")


def check_without_faults(faults: list[Fault], copy: Path) -> None:
    """Ends the program if one of the tests fails, or is left out, without any fault."""
    for tier, marker in MARKERS.items():
        tests = list(
            dict.fromkeys(test for fault in faults if fault.tier == tier for test in fault.tests)
        )
        if not tests:
            continue
        began = time.monotonic()
        code, output = run_tests(tests, marker, copy)
        if code != 0:
            print(output)
            print(f"these tests of the {tier} run do not pass without a fault", file=sys.stderr)
            sys.exit(2)
        print(f"without a fault: {tier} tests pass in {time.monotonic() - began:.0f} s", flush=True)


def try_out(fault: Fault, copy: Path) -> Result:
    """Puts the fault into the copy, runs its tests there, and takes it out again."""
    path = copy / "hvtrain" / fault.file
    original, times = path.read_text(), path.stat()
    path.write_text(original.replace(fault.old, fault.new))
    began = time.monotonic()
    try:
        code, output = run_tests(fault.tests, MARKERS[fault.tier], copy)
    finally:
        path.write_text(original)
        # Python compiles a file again when its time differs from that of the compiled one.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    seconds = time.monotonic() - began
    failed = re.search(r"^FAILED (.+?)(?: - |$)", output, re.MULTILINE)
    test = failed[1] if failed and code == 1 else ""
    print(
        f"{fault.name}: {f'found by {test}' if test else 'NOT FOUND'} in {seconds:.0f} s",
        flush=True,
    )
    if not test:
        print(output[-3000:], flush=True)
    return Result(fault, test, seconds)


def run_tests(tests: tuple[str, ...] | list[str], marker: str, copy: Path) -> tuple[int, str]:
    """Pytest's exit code and output; the code is -1 if the tests did not end."""
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        marker,
        *tests,
    ]
    process = subprocess.Popen(
        line,
        cwd=copy,
        env=environment(copy),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_SECONDS)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return -1, f"{process.communicate()[0]}\nthe tests did not end in {LONGEST_SECONDS:.0f} s"


def table(results: list[Result]) -> str:
    """The results in Markdown."""
    rows = ["| fault | in | found by | seconds | run |", "|---|---|---|---:|---|"]
    for result in results:
        fault = result.fault
        test = f"`{result.test}`" if result.test else "**not found**"
        rows.append(
            f"| {fault.harm} | `{fault.file}` | {test} | {result.seconds:.0f} | {fault.tier} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
