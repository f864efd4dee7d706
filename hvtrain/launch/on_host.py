"""A launch on one host: asks its ranks to stop, and ends what is left of it.

Standard library only: launch/remote_hosts.py runs this text on other hosts.

All processes of a launch have its mark, a variable; those of an Open MPI job are also known by the
job's number.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvtrain.system import host_facts

MARK = "HVTRAIN_LAUNCH"
SECONDS_TO_GO = 3.0
_RANK_MARKS = (b"HOROVOD_RANK=", b"OMPI_COMM_WORLD_RANK=")


def look(address: str) -> dict[str, Any]:
    """Describes this host: interface towards the address (None without a route), oom_kills, versions, file limit."""
    interface = None
    with suppress(OSError):
        interface = host_facts.interface_of(host_facts.address_towards(address))
    return {
        "interface": interface,
        "oom_kills": oom_kills(),
        "versions": host_facts.versions(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def ask(mark: str | None, number: int = signal.SIGUSR1) -> dict[str, int]:
    """Sends a signal to the launch's ranks on this host, and counts them; None: to those of all launches."""
    parents = {process: parent for process, parent in _processes() if _is_rank(process, mark)}
    # A process that a rank started has its variables too, and is not asked.
    ranks = [process for process, parent in parents.items() if parent not in parents]
    for process in ranks:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    return {"count": len(ranks)}


def drain() -> None:
    """Has all ranks on this host save and stop, and waits for their end: the last act of a pod that is drained."""
    ask(None)
    while ask(None, 0)["count"]:  # Signal 0 only asks whether the process is there.
        time.sleep(0.5)


def begun(mark: str) -> dict[str, int]:
    """Counts the launch's ranks on this host, whatever their program is."""
    return {"count": sum(_has_marks(process, mark) for process, _ in _processes())}


def clear(mark: str, job: int | None = None) -> dict[str, int]:
    """Kills all that is left of the launch on this host and frees its shared memory; returns oom_kills().

    Args:
        mark: the launch's folder.
        job: the number of mpirun's own job, if it runs.
    """
    deadline = time.monotonic() + SECONDS_TO_GO
    left = _left(mark)
    while left:
        # Python's trackers of semaphores and shared memory clean up once all others are gone, so
        # they go last.
        is_late = time.monotonic() > deadline
        for process in left:
            if is_late or b"multiprocessing.resource_tracker" not in _read(process, "cmdline"):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline + 1:
            break  # The kernel holds it: a dead disk or GPU.
        time.sleep(0.02)
        left = _left(mark)

    if job is not None:
        _remove_files(job)
    return {"oom_kills": oom_kills()}


def _left(mark: str) -> list[int]:
    """The launch's processes on this host, but not this one."""
    variable = f"{MARK}={mark}".encode()
    processes = [process for process, _ in _processes() if process != os.getpid()]
    return [process for process in processes if variable in _variables(process)]


def oom_kills() -> int:
    """Counts processes that this host's kernel has killed for lack of memory since boot; 0 if it does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _remove_files(job: int) -> None:
    """Removes what a killed Open MPI leaves: its ranks' shared memory, and its own folder."""
    for path in Path("/dev/shm").glob(f"*.{job + 1:x}.*"):  # The ranks are the job after the launcher's own.
        with suppress(OSError):
            path.unlink()
    for folder in Path(tempfile.gettempdir()).glob("ompi.*/*"):
        with suppress(OSError):
            if folder.name == f"jf.{job >> 16}" or (folder / "contact.txt").read_text().startswith(f"{job}."):
                shutil.rmtree(folder)


def _processes() -> Iterator[tuple[int, int]]:
    """Each process of this host, and its parent."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # The name in parentheses may hold anything; numbers follow. The process may have ended.
        with suppress(OSError, IndexError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            yield int(stat.parent.name), int(fields[1])


def _variables(process: int) -> list[bytes]:
    return _read(process, "environ").split(b"\0")


def _read(process: int, name: str) -> bytes:
    with suppress(OSError):  # It has ended, or is another user's.
        return Path(f"/proc/{process}/{name}").read_bytes()
    return b""


def _is_rank(process: int, mark: str | None) -> bool:
    """A Python process with both marks: shells between the launcher and the rank may carry them too."""
    with suppress(OSError):
        program = Path(f"/proc/{process}/exe").resolve().name
        return program.startswith("python") and _has_marks(process, mark)
    return False


def _has_marks(process: int, mark: str | None) -> bool:
    """True for a process with the launch's mark, if any is given, and a rank's."""
    variables = _variables(process)
    is_of_launch = mark is None or f"{MARK}={mark}".encode() in variables
    return is_of_launch and any(name.startswith(_RANK_MARKS) for name in variables)
