"""Finds and kills single ranks of a run that a test started: all its processes carry a mark in their environment."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

MARK = "HVTRAIN_TEST_RUN"
_RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")


def processes(mark: str) -> dict[int, dict[str, str]]:
    """All live processes of the run, on any host of this machine, with their environment."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        if variables.get(MARK) == mark and state != "Z":
            pids[int(folder.name)] = variables
    return pids


def rank_processes(mark: str) -> dict[int, int]:
    """Rank -> process id, of those that have started Python."""
    pids: dict[int, int] = {}
    # A process that a rank has just forked looks like it; the rank has the lower number.
    for process, variables in sorted(processes(mark).items()):
        rank = next((variables[name] for name in _RANKS if name in variables), None)
        try:
            is_python = Path(f"/proc/{process}/exe").resolve().name.startswith("python")
            line = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if rank is not None and is_python and b"hvtrain" in line:
            pids.setdefault(int(rank), process)
    return pids


def send(process: int, number: signal.Signals) -> bool:
    """Sends the signal; False where the process has gone by itself."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(mark: str, timeout: float) -> dict[int, str]:
    """What is left of the run after that many seconds: process id -> command line."""
    deadline = time.monotonic() + timeout
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = {}
    for process in left:
        try:
            lines[process] = (
                Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            )
        except OSError:
            continue
    return lines


def left_files(temporary: Path) -> set[str]:
    """What lies in shared memory and no live process uses, and Open MPI's session folders: what ranks left there.

    `temporary` is the job's own TMPDIR, where Open MPI makes its session folders: in a common one nobody can tell whose
    they are. Semaphores of Python's multiprocessing are the launchers', also those of other jobs on this machine.
    """
    left = [path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")]
    left += temporary.glob("ompi.*/*")
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            used |= {
                line.split()[-1] for line in maps.read_text().splitlines() if "/dev/shm/" in line
            }
        except OSError:
            continue
    # What another job has removed meanwhile is not left.
    return {str(path) for path in left if path.exists()} - used


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
