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
    """Keeps this process, with all its present and future threads, on its share of the host's logical CPUs.

    Returns:
        The share; None if the CPUs cannot be divided evenly, and the process may run on all, or if
        the launcher, Slurm or taskset has chosen CPUs already, which is left as it is.
    """
    global _mine
    try:
        everything = os.sched_getaffinity(1)
    except PermissionError:
        return None
    # Whoever chose CPUs for this process left it fewer than the host's first process has.
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
    count, remainder = divmod(len(cpus), local_size)
    if remainder or not count:
        return None
    return set(cpus[local_rank * count : (local_rank + 1) * count])


def by_core(cpus: Iterable[int], folder: Path = _CPUS) -> list[int]:
    """Sorts logical CPUs by socket and by core: those of one core often have numbers far apart."""

    def number(cpu: int, name: str) -> int:
        path = folder / f"cpu{cpu}" / "topology" / name
        return int(path.read_text()) if path.exists() else 0

    return sorted(cpus, key=lambda cpu: (number(cpu, "physical_package_id"), number(cpu, "core_id"), cpu))
