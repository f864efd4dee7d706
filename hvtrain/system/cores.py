"""Shares a host's cores among its ranks: each stays on its own, so that no two compete while another core is idle."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_CPUS = Path("/sys/devices/system/cpu")
# This process's share, once `pin` has set it.
_mine: set[int] | None = None


def pin(local_rank: int, local_size: int) -> set[int] | None:
    """Keeps this process, with all its present and future threads, on its share; returns its logical CPUs.

    None if the CPUs cannot be shared evenly; the process then may run on all. None also if the launcher, Slurm or
    taskset has chosen CPUs, which is left alone: the process then may not use all that its host's first process may.
    """
    global _mine
    try:
        everything = os.sched_getaffinity(1)
    except PermissionError:
        return None
    if os.sched_getaffinity(0) not in (everything, _mine):
        return None
    _mine = share(by_core(everything), local_rank, local_size)
    for thread in threads():
        with suppress(ProcessLookupError):  # It has ended meanwhile.
            os.sched_setaffinity(thread, _mine or everything)
    return _mine


def each(local_size: int) -> int:
    """The number of logical CPUs for each of a host's ranks, at least one."""
    return len(_mine) if _mine else max(1, len(os.sched_getaffinity(0)) // local_size)


def threads() -> set[int]:
    """Linux's numbers of this process's threads."""
    return {thread.id for thread in psutil.Process().threads()}


def share(cpus: Sequence[int], local_rank: int, local_size: int) -> set[int] | None:
    """One rank's share: neighbours in the given order; None if the CPUs cannot be shared evenly."""
    many, rest = divmod(len(cpus), local_size)
    return None if rest or not many else set(cpus[local_rank * many : (local_rank + 1) * many])


def by_core(cpus: Iterable[int], folder: Path = _CPUS) -> list[int]:
    """Logical CPUs, ordered by socket and by core: those of one core often have numbers far apart."""

    def place(cpu: int) -> tuple[int, int, int]:
        names = [folder / f"cpu{cpu}" / "topology" / name for name in ("physical_package_id", "core_id")]
        package, core = (int(name.read_text()) if name.exists() else 0 for name in names)
        return package, core, cpu

    return sorted(cpus, key=place)
