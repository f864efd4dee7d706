"""A launch on one host: asks its ranks to stop, ends what is left of it. Its text runs on hosts by ssh, so it needs
nothing but the standard library.

python on_host.py ask|clear MARK [JOB]    prints ANSWER and what came of it, as JSON

A launch is known by its mark, a variable that all its processes have; an Open MPI job by its number besides.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "HVTRAIN_LAUNCH"
ANSWER = "hvtrain-host:"
SECONDS_TO_GO = 3.0
_RANK_MARKS = (b"HOROVOD_RANK=", b"OMPI_COMM_WORLD_RANK=")


def ask(mark: str) -> int:
    """Sends SIGUSR1 to the launch's ranks on this host; how many there were."""
    ranks = {process: parent for process, parent in _processes() if _is_rank(process, mark)}
    # What a rank started itself has its variables too, and is not asked.
    first = [process for process, parent in ranks.items() if parent not in ranks]
    for process in first:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    return len(first)


def clear(mark: str, job: int | None = None) -> int:
    """Ends by force all that is left of the launch on this host, and removes what it left in memory; how many.

    Python's trackers of semaphores and shared memory clean up once all others are gone, so they go last.
    """
    ended: set[int] = set()
    deadline = time.monotonic() + SECONDS_TO_GO
    while left := _of_launch(mark):
        late = time.monotonic() > deadline
        for process in left:
            if late or not _is_tracker(process):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        ended.update(left)
        if time.monotonic() > deadline + 1:
            break  # The kernel holds it: a dead disk or GPU.
        time.sleep(0.02)
    if job is not None:
        _remove_files(job)
    return len(ended)


def oom_kills() -> int | None:
    """How many processes this host's kernel has killed for lack of memory since it started; None: it does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _remove_files(job: int) -> None:
    """What Open MPI leaves when it is killed: its ranks' shared memory, and its own folder."""
    for path in Path("/dev/shm").glob(f"*.{job + 1:x}.*"):  # The ranks are the job after the launcher's own.
        with suppress(OSError):
            path.unlink()
    for folder in Path(tempfile.gettempdir()).glob("ompi.*/*"):
        with suppress(OSError):
            contact = folder / "contact.txt"
            if folder.name == f"jf.{job >> 16}" or contact.read_text().startswith(f"{job}."):
                shutil.rmtree(folder)


def _of_launch(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    return [process for process, _ in _processes() if process != os.getpid() and wanted in _variables(process)]


def _processes() -> Iterator[tuple[int, int]]:
    """Each process of this host, and its parent."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # The name in parentheses may hold anything; what follows it is numbers. Or it has just ended.
        with suppress(OSError, IndexError):
            words = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            yield int(stat.parent.name), int(words[1])


def _variables(process: int) -> list[bytes]:
    try:
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # It has ended, or is another user's.


def _is_rank(process: int, mark: str) -> bool:
    """A Python process with both marks: shells between the launcher and the rank may carry them too."""
    variables = _variables(process)
    try:
        program = Path(f"/proc/{process}/exe").resolve().name
    except OSError:
        return False
    of_launch = f"{MARK}={mark}".encode() in variables
    return of_launch and program.startswith("python") and any(name.startswith(_RANK_MARKS) for name in variables)


def _is_tracker(process: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    _what, _mark, *_job = sys.argv[1:]
    _count = ask(_mark) if _what == "ask" else clear(_mark, int(_job[0]) if _job else None)
    print(ANSWER, json.dumps({"count": _count, "oom_kills": oom_kills()}))
