"""Starts real ranks for tests: horovodrun on Gloo or MPI, mpirun, or no launcher."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parent / "workers"
BIN = Path(sys.executable).parent
WARM = Path(__file__).parent / "warm"
# Ssh and modules of hvtrain with shorter limits of time.
HASTY = Path(__file__).parent / "launched" / "hasty"

LAUNCHERS = {
    "gloo": ["horovodrun", "--gloo"],
    "mpi": ["horovodrun", "--mpi"],
    "mpirun": ["mpirun", "--oversubscribe"],
}


def environment(**extra: str) -> dict[str, str]:
    """The tests' environment without what a surrounding launcher left, with one thread a rank."""
    left = ("HOROVOD_", "OMPI_COMM", "OMPI_MCA_orte", "OMPI_MCA_ess", "PMI", "PMIX_", "PYTHONDONTWRITEBYTECODE",
            "TF_CPP_MIN_LOG_LEVEL")  # fmt: skip
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {
        **kept,
        **root,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONFAULTHANDLER": "1",
        # On a busy machine one rank may be ready half a minute before another.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
        **extra,
    }


def warm(variables: dict[str, str]) -> dict[str, str]:
    """The same variables, with which `python` is a fork of a process that has imported TensorFlow: see warm/server.py.

    HVTRAIN_TEST_COLD=1 makes all processes of the tests fresh ones.
    """
    if os.environ.get("HVTRAIN_TEST_COLD"):
        return variables
    namespaces = [
        str(Path(f"/proc/self/ns/{kind}").readlink())
        for kind in ("mnt", "net", "pid", "user", "uts")
    ]
    return {
        **variables,
        "PATH": f"{WARM / 'bin'}:{variables['PATH']}",
        "HVTRAIN_TEST_WARM": warm_server(),
        "HVTRAIN_TEST_PYTHON": str(BIN / "python"),
        "HVTRAIN_TEST_NAMESPACES": " ".join(namespaces),
    }


@functools.cache
def warm_server() -> str:
    """Starts this process's server, which ends with it; the path of its socket."""
    folder = tempfile.mkdtemp(prefix="hvtrain-warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = f"{folder}/socket"
    server = subprocess.Popen(
        [BIN / "python", WARM / "server.py", path],
        stdin=subprocess.PIPE,
        cwd=folder,
        env=environment(),
    )
    atexit.register(server.stdin.close)
    deadline = time.monotonic() + 280
    while not os.path.exists(path):  # noqa: PTH110
        assert server.poll() is None and time.monotonic() < deadline, (
            "the warm server did not start"
        )
        time.sleep(0.05)
    return path


def start(
    launcher: str | None, num_ranks: int, *command: str, cwd: Path, cold: bool = False, **extra: str
) -> subprocess.Popen[str]:
    """Starts the command on num_ranks ranks, in a process group of its own.

    With `cold` each `python` is a fresh process: for tests of what a start or a single process does.
    """
    prefix = [*LAUNCHERS[launcher], "-np", str(num_ranks)] if launcher else []
    variables = environment(**extra)
    return subprocess.Popen(
        [*prefix, *command],
        cwd=cwd,
        env=variables if cold or "PATH" in extra else warm(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell that starts the tests in the background has them ignore Ctrl-C, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish(process: subprocess.Popen[str], timeout: float = 560) -> str:
    """All that the ranks printed; kills the whole group when they do not end, and shows where they were."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        leftovers = left_over(process)
        kill(process)
        try:
            printed = process.communicate(timeout=30)[0]
        except subprocess.TimeoutExpired as held:  # Somebody else holds its output open.
            printed = (held.output or b"").decode(errors="replace")
        lines = [f"ranks did not end in {timeout} s:", *leftovers, "printed:", printed]
        raise AssertionError("\n".join(lines)) from None


def left_over(process: subprocess.Popen[str]) -> list[str]:
    """A line for each process that it has started; those of Python print the stacks of their threads and end."""
    lines, ended = [], []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(f"{child.pid} {child.status()}: {child.name()}")
            lines[-1] += f" {' '.join(child.cmdline())[:200]}"
            if child.name().startswith("python"):
                child.send_signal(signal.SIGABRT)  # See PYTHONFAULTHANDLER.
                ended.append(child)
    psutil.wait_procs(ended, timeout=10)
    return lines


def kill(process: subprocess.Popen[str]) -> None:
    """Kills the process and all that it has started, which Open MPI and horovodrun put into other process groups."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    os.killpg(process.pid, signal.SIGKILL)


def run(
    launcher: str | None,
    num_ranks: int,
    *command: str,
    cwd: Path,
    timeout: float = 560,
    cold: bool = False,
    **extra: str,
) -> tuple[int, str]:
    """Exit code and everything printed."""
    process = start(launcher, num_ranks, *command, cwd=cwd, cold=cold, **extra)
    output = finish(process, timeout)
    return process.returncode, output


def run_worker(launcher: str, num_ranks: int, name: str, folder: Path) -> list[Any]:
    """What each rank has to say in the JSON that rank 0 of a script in WORKERS writes to its argument."""
    file = folder / "results.json"
    code, output = run(launcher, num_ranks, "python", str(WORKERS / name), str(file), cwd=folder)
    assert code == 0, output
    results = json.loads(file.read_text())
    assert len(results) == num_ranks
    return results


def train(
    launcher: str | None, num_ranks: int, *settings: str, cwd: Path, **extra: Any
) -> tuple[int, str]:
    """`python -m hvtrain` with these settings, and those of USUAL that they leave open."""
    settings = with_usual(settings)
    return run(launcher, num_ranks, "python", "-m", "hvtrain", *settings, cwd=cwd, **extra)


USUAL = {
    "run.report": "false",  # It takes a second of each run.
    "data.uneven": "trim",  # All steps have full batches, whatever the size of the data.
}


def with_usual(settings: Sequence[str]) -> tuple[str, ...]:
    """The settings, and those of USUAL that they leave open."""
    names = {setting.partition("=")[0] for setting in settings}
    return (*settings, *(f"{name}={value}" for name, value in USUAL.items() if name not in names))


def many_runs(
    launcher: str,
    num_ranks: int,
    runs: dict[str, list[str]],
    folder: Path,
    through: Sequence[str] = (),
    timeout: float = 560,
    worker: str = "runs.py",
    **extra: str,
) -> tuple[Any, str]:
    """Runs of the runner in one start of the ranks, see workers/runs.py: what each rank saw, and all output."""
    (folder / "runs.json").write_text(
        json.dumps({name: with_usual(settings) for name, settings in runs.items()})
    )
    command = [
        *through,
        "python",
        str(WORKERS / worker),
        str(folder / "runs.json"),
        str(folder / "found.json"),
    ]
    code, output = run(launcher, num_ranks, *command, cwd=folder, timeout=timeout, **extra)
    assert code == 0, output
    return json.loads((folder / "found.json").read_text()), output


BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hvtrain", "horovod"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
sys.meta_path.insert(0, Blocked())
"""


def without_hvtrain(script: str, cwd: Path) -> str:
    """What the script prints in a process that can import neither hvtrain nor Horovod; it may warn of nothing."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", BLOCK + script],
        cwd=cwd,
        env=environment(
            TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0", CUDA_VISIBLE_DEVICES=""
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not re.search("warn|skipping", done.stderr, re.IGNORECASE), done.stderr
    return done.stdout
