"""Handles the processes on one host of a launch: asks ranks to stop, and kills those that are left.

Imports only the standard library and host_facts: launch/remote_hosts.py sends this module and
host_facts to other hosts.

All processes of a launch have the environment variable MARK. An Open MPI job also has a number, by
which its files are found.
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
GRACE_SECONDS = 3.0
_RANK_MARKS = (b"HOROVOD_RANK=", b"OMPI_COMM_WORLD_RANK=")


def describe_host(address: str) -> dict[str, Any]:
    """Describes this host for remote_hosts.py.

    Returns the interface towards the address (None without a route), oom_kills(), the versions of
    packages, and the limit on open files.
    """
    interface = None
    with suppress(OSError):
        interface = host_facts.interface_of(host_facts.address_towards(address))
    return {
        "interface": interface,
        "oom_kills": oom_kills(),
        "versions": host_facts.versions(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def signal_ranks(mark: str | None, signal_number: int = signal.SIGUSR1) -> int:
    """Sends a signal to the launch's ranks on this host, or with mark=None to those of all launches.

    Returns the number of these ranks.
    """
    parents = {process: parent for process, parent in _processes() if _is_rank(process, mark)}
    # Children of a rank inherit its variables, but get no signal.
    ranks = [process for process, parent in parents.items() if parent not in parents]
    for process in ranks:
        with suppress(ProcessLookupError):
            os.kill(process, signal_number)
    return len(ranks)


def drain() -> None:
    """Asks all ranks on this host to save and stop, and waits until they have. A pod's preStop hook calls this."""
    signal_ranks(None)
    while signal_ranks(None, 0):  # Signal 0 only checks whether the process exists.
        time.sleep(0.5)


def count_ranks(mark: str) -> int:
    """Counts the launch's ranks on this host, whatever their program is."""
    return sum(_has_marks(process, mark) for process, _ in _processes())


def clean_up(mark: str, job: int | None = None) -> int:
    """Kills the remaining processes of the launch on this host and frees its shared memory.

    Returns this host's oom_kills().

    Args:
        mark: the launch's folder.
        job: the number of mpirun's own job, if mpirun is running.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while left := _remaining(mark):
        # Python's resource trackers free semaphores and shared memory once all other processes are
        # gone, so they are killed only if they are still running after the deadline.
        is_late = time.monotonic() > deadline
        for process in left:
            if is_late or b"multiprocessing.resource_tracker" not in _read(process, "cmdline"):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline + 1:
            break  # The rest are stuck in the kernel, for example on a dead disk or GPU.
        time.sleep(0.02)

    if job is not None:
        # A killed mpirun leaves its ranks' shared memory and its own folder behind. The number of
        # the ranks' job is one more than that of mpirun's own job.
        for path in Path("/dev/shm").glob(f"*.{job + 1:x}.*"):
            with suppress(OSError):
                path.unlink()
        for folder in Path(tempfile.gettempdir()).glob("ompi.*/*"):
            with suppress(OSError):
                contact = folder / "contact.txt"
                if folder.name == f"jf.{job >> 16}" or contact.read_text().startswith(f"{job}."):
                    shutil.rmtree(folder)
    return oom_kills()


def _remaining(mark: str) -> list[int]:
    """Returns the IDs of the launch's processes on this host, except this one."""
    variable = f"{MARK}={mark}".encode()
    return [
        process
        for process, _ in _processes()
        if process != os.getpid() and variable in _variables(process)
    ]


def oom_kills() -> int:
    """Counts processes that this host's kernel has killed for lack of memory since boot.

    Returns 0 if the kernel does not report the count.
    """
    with suppress(OSError, ValueError, KeyError):
        counts = dict(map(str.split, Path("/proc/vmstat").read_text("ascii").splitlines()))
        return int(counts["oom_kill"])
    return 0


def _processes() -> Iterator[tuple[int, int]]:
    """Yields the process ID of each process on this host, and that of its parent."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # The name in parentheses may contain anything; numbers follow. The process may have ended.
        with suppress(OSError, IndexError):
            fields = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
            yield int(stat.parent.name), int(fields[1])


def _variables(process: int) -> list[bytes]:
    return _read(process, "environ").split(b"\0")


def _read(process: int, name: str) -> bytes:
    with suppress(OSError):  # The process has ended, or belongs to another user.
        return Path(f"/proc/{process}/{name}").read_bytes()
    return b""


def _is_rank(process: int, mark: str | None) -> bool:
    """True for a Python process with both marks, which shells between launcher and rank may have too."""
    with suppress(OSError):
        program = Path(f"/proc/{process}/exe").resolve().name
        return program.startswith("python") and _has_marks(process, mark)
    return False


def _has_marks(process: int, mark: str | None) -> bool:
    """True for a process with the mark of the launch (if one is given) and that of a rank."""
    variables = _variables(process)
    is_of_launch = mark is None or f"{MARK}={mark}".encode() in variables
    return is_of_launch and any(name.startswith(_RANK_MARKS) for name in variables)
