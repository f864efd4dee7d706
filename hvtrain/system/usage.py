"""Memory of this process, and what its host or container has left."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
# Names of the limit, of what is used, and of the part of it that is cached files, by version of control groups.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def resident_bytes() -> int:
    """Memory that this process occupies now."""
    return int(psutil.Process().memory_info().rss)


def forget_peak() -> None:
    """Makes peak_bytes begin anew. Where the kernel does not allow it, the earlier peak stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process has occupied since it began, or since forget_peak."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def free_bytes(cgroups: Path = CGROUPS) -> int:
    """Memory that processes may still take here: of the host, and of the container or job that this one is in.

    Beyond it the kernel ends a process. Files that the kernel has cached count as free.
    """
    return max(0, min([int(psutil.virtual_memory().available), *_free_in_groups(cgroups)]))


def _free_in_groups(cgroups: Path) -> Iterator[int]:
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in groups:
        if controllers == "":
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        own = root / path.strip("/")  # Inside a container its own group may be the root.
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(root))):
            with suppress(OSError, ValueError):  # No such group here, or no limit: "max".
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                numbers = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield limit - used + int(numbers.get(names[2], 0))
