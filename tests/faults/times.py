"""How long it takes from a fault to its end: until the launcher has exited and no process of the run is left.

    python -m tests.faults.times --rounds 3

Two ranks train on this machine, under horovodrun on Gloo and on MPI. Where the fault is made from outside, the clock
begins with it; where a rank makes it, with the first line that speaks of it. Figures are medians and the longest.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.distributed.launch import ROOT, environment
from tests.faults.ranks import MARK, rank_processes, say, send, wait_until_gone

OWN = ROOT / "tests/faults/own"
ACTS = "+callbacks.acts={_target_: stuck.Acts, rank: 1, step: 60, what: %s}"
STOPPED_SECONDS = 8
Strike = Callable[[subprocess.Popen[str], dict[int, int]], None]


def kill_rank(rank: int, number: signal.Signals) -> Strike:
    return lambda process, ranks: send(ranks[rank], number) and None


def kill_launcher(number: signal.Signals) -> Strike:
    return lambda process, ranks: send(process.pid, number) and None


# Name -> more words, what strikes from outside (None: a rank does, and says so), exit code, seconds taken off.
CASES: dict[str, tuple[list[str], Strike | None, int | None, float]] = {
    "kill -9 of rank 0": ([], kill_rank(0, signal.SIGKILL), 75, 0),
    "kill -9 of rank 1": ([], kill_rank(1, signal.SIGKILL), 75, 0),
    "kill -9 of the launcher": ([], kill_launcher(signal.SIGKILL), None, 0),
    "SIGTERM to the launcher": ([], kill_launcher(signal.SIGTERM), 75, 0),
    "SIGTERM to rank 1": ([], kill_rank(1, signal.SIGTERM), 75, 0),
    "SIGSTOP of rank 1, after abort_seconds": (
        [f"watchdog.abort_seconds={STOPPED_SECONDS}"], kill_rank(1, signal.SIGSTOP), 75, STOPPED_SECONDS,
    ),
    "exception on rank 1": ([ACTS % "raise"], None, 1, 0),
    "no memory on rank 1": ([ACTS % "memory"], None, 1, 0),
}  # fmt: skip


def seconds(launcher: str, case: str, folder: Path, mark: str) -> float:
    """Of one run; SystemExit with what it said when it ended otherwise than it should."""
    words, strike, code, less = CASES[case]
    line = ["horovodrun", f"--{launcher}", "-np", "2", "python", "-m", "hvtrain", "--config-dir", str(OWN / "conf")]
    process = subprocess.Popen(
        [*line, "train.epochs=400", f"run.dir={folder / 'run'}", *words],
        cwd=folder,
        env=environment(**{MARK: mark, "PYTHONPATH": f"{ROOT}:{OWN}"}),
        stdin=subprocess.DEVNULL,
        stdout=(folder / "output.txt").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if strike:
        while not (folder / "run" / "checkpoints" / "step-00000044").exists() and process.poll() is None:
            time.sleep(0.02)
        ranks = rank_processes(mark)
        if len(ranks) < 2:
            raise SystemExit(f"{case} on {launcher}: over before its time\n{(folder / 'output.txt').read_text()}")
        began = time.monotonic()
        strike(process, ranks)
    else:
        while "Error" not in (folder / "output.txt").read_text() and process.poll() is None:
            time.sleep(0.02)
        began = time.monotonic()
    found = process.wait(120)
    left = wait_until_gone(mark, 60)
    took = time.monotonic() - began - less
    if left or (code is not None and found != code):
        raise SystemExit(f"{case} on {launcher}: code {found}, left {left}\n{(folder / 'output.txt').read_text()}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    say(f"{'case':<40} {'Gloo s':>14} {'MPI s':>14}   (median, longest of {options.rounds})")
    with tempfile.TemporaryDirectory(prefix="hvtrain-times-") as name:
        for case in CASES:
            shown = []
            for launcher in ("gloo", "mpi"):
                found = []
                for number in range(options.rounds):
                    folder = Path(name) / f"{case} {launcher} {number}".replace(" ", "-").replace(",", "")
                    folder.mkdir()
                    found.append(seconds(launcher, case, folder, f"times-{os.getpid()}-{folder.name}"))
                shown.append(f"{statistics.median(found):.1f}, {max(found):.1f}")
            say(f"{case:<40} {shown[0]:>14} {shown[1]:>14}")


if __name__ == "__main__":
    main()
