"""A host's cores, shared out to its ranks: each stays on its own, so that no two meet on one while another is idle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
# What `pin` gave this process; None: nothing yet.
_mine: set[int] | None = None


def pin(local_rank: int, local_size: int) -> set[int] | None:
    """Keeps this process, with all threads that it has and will have, on its share; returns its logical CPUs.

    None, and it may run on all, where they cannot be shared out evenly. None, and nothing is done, where the launcher,
    Slurm or taskset has chosen some: where it may not run on all that the first process of its host or container may.
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
    """How many logical CPUs each of a host's ranks has, at least one."""
    return len(_mine) if _mine else max(1, len(os.sched_getaffinity(0)) // local_size)


def threads() -> set[int]:
    """Numbers of this process's threads, as Linux has them."""
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def share(cpus: Sequence[int], local_rank: int, local_size: int) -> set[int] | None:
    """Those of one rank: as many as every other's, neighbours in the order given; None where that leaves a rest.

    >>> share([0, 4, 1, 5, 2, 6, 3, 7], 1, 2), share([0, 1], 0, 3)
    ({2, 3, 6, 7}, None)
    """
    many, rest = divmod(len(cpus), local_size)
    return None if rest or not many else set(cpus[local_rank * many : (local_rank + 1) * many])


def by_core(cpus: Iterable[int], folder: Path = _CPUS) -> list[int]:
    """Logical CPUs, those of one socket together, and of one core of it: they often have far numbers."""

    def place(cpu: int) -> tuple[int, int, int]:
        names = [folder / f"cpu{cpu}" / "topology" / name for name in ("physical_package_id", "core_id")]
        package, core = (int(name.read_text()) if name.exists() else 0 for name in names)
        return package, core, cpu

    return sorted(cpus, key=place)
