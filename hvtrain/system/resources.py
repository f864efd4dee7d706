"""Cores, memory and GPUs: what this process may use of its host."""

import ctypes
import logging
import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from hvtrain.errors import RankError

log = logging.getLogger(__name__)

_CPUS = Path("/sys/devices/system/cpu")
# This process's share, once `pin_to_cores` has set it.
_mine: set[int] | None = None

CGROUPS = Path("/sys/fs/cgroup")
# Names of the limit, of what is used, and of the part of it that is cached files, by version of control groups.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def pin_to_cores(local_rank: int, local_size: int) -> set[int] | None:
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
    _mine = share_of_cores(sorted_by_core(everything), local_rank, local_size)
    for thread in thread_ids():
        with suppress(ProcessLookupError):  # It has ended meanwhile.
            os.sched_setaffinity(thread, _mine or everything)
    return _mine


def cores_of_each(local_size: int) -> int:
    """The number of logical CPUs for each of a host's ranks, at least one."""
    if _mine:
        return len(_mine)
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def thread_ids() -> set[int]:
    """Linux's numbers of this process's threads."""
    return {thread.id for thread in psutil.Process().threads()}


def share_of_cores(cpus: Sequence[int], local_rank: int, local_size: int) -> set[int] | None:
    """One rank's share: neighbours in the given order; None if the CPUs cannot be shared evenly."""
    # Unequal shares would make some ranks slower, and all wait for the slowest.
    count, remainder = divmod(len(cpus), local_size)
    if remainder or not count:
        return None
    return set(cpus[local_rank * count : (local_rank + 1) * count])


def sorted_by_core(cpus: Iterable[int], folder: Path = _CPUS) -> list[int]:
    """Sorts logical CPUs by socket and by core: those of one core often have numbers far apart."""

    def number(cpu: int, name: str) -> int:
        path = folder / f"cpu{cpu}" / "topology" / name
        return int(path.read_text()) if path.exists() else 0

    return sorted(cpus, key=lambda cpu: (number(cpu, "physical_package_id"), number(cpu, "core_id"), cpu))


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
    # Version 2 has one line without controllers, version 1 a line for each.
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


def physical_gpus() -> list[Any]:
    """Lists the GPUs that TensorFlow can use, as tf.config.PhysicalDevice.

    TensorFlow trains on CPUs without an error where it cannot load one of CUDA's libraries, at a
    hundredth of the speed. So GPUs that the driver shows and TensorFlow leaves out are refused.

    Raises:
        RankError: TensorFlow is built for GPUs, the driver shows some, and TensorFlow uses none.
    """
    import tensorflow as tf

    num_shown = _num_shown()
    if num_shown and tf.test.is_built_with_cuda():
        _load_cusolver(Path(tf.__file__).parents[1])

    gpus: list[Any] = tf.config.list_physical_devices("GPU")
    if num_shown and not gpus:
        _explain_unused(num_shown, tf.__version__, tf.test.is_built_with_cuda())
    return gpus


def _load_cusolver(packages: Path) -> None:
    """Loads cuSOLVER, so that TensorFlow finds it by its name.

    TensorFlow 2.21 opens CUDA's libraries from libtensorflow_framework.so, whose run path names the
    packages of tensorflow[and-cuda] but nvidia-cusolver-cu12 (only libtensorflow_cc.so's has it).
    Without it, TensorFlow leaves out all GPUs.
    """
    for library in packages.glob("nvidia/cusolver/lib/libcusolver.so.*"):
        # If it cannot be loaded, TensorFlow says so itself.
        with suppress(OSError):
            ctypes.CDLL(str(library))


@cache
def _explain_unused(num_shown: int, version: str, has_cuda: bool) -> None:
    """Raises RankError, or warns once if TensorFlow is built for CPUs only."""
    host = socket.gethostname()
    if not has_cuda:
        log.warning(
            "%s has %d GPU(s), which are not used: TensorFlow %s here is built for CPUs only; "
            "HVTRAIN_VARIANT=gpu ./scripts/run makes the environment for GPUs",
            host,
            num_shown,
            version,
        )
        return
    raise RankError(
        f"{host} has {num_shown} GPU(s), and TensorFlow {version} can use none of them: it cannot load one of CUDA's "
        "libraries (TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_MAX_VLOG_LEVEL=1 names it); install tensorflow[and-cuda] anew, or "
        "set CUDA_VISIBLE_DEVICES=-1 to train on CPUs"
    )


def _driver() -> Any:
    """The driver's library, ready for calls; None without a driver, or if it does not start.

    Each of its functions returns 0 if it succeeded.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        error = cuda.cuInit(0)
    except (OSError, AttributeError):
        return None
    if error:
        return None
    return cuda


def _num_shown() -> int:
    """GPUs that the driver shows this process; 0 without a driver, or if it does not say."""
    get_count = getattr(_driver(), "cuDeviceGetCount", None)
    count = ctypes.c_int()
    if get_count is None or get_count(ctypes.byref(count)):
        return 0
    return count.value


def gpu_uuids(count: int) -> tuple[str, ...]:
    """Returns UUIDs of the first `count` GPUs that CUDA shows this process.

    None if the driver does not say. The driver's own interface starts no GPU, and unlike nvidia-smi
    it numbers the GPUs as CUDA_VISIBLE_DEVICES does.
    """
    cuda = _driver() if count else None
    # An old driver lacks the function.
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None)
    if cuda is None or get_uuid is None:
        return ()

    # The driver writes into both.
    device = ctypes.c_int()
    buffer = (ctypes.c_ubyte * 16)()
    uuids = []
    for index in range(count):
        if cuda.cuDeviceGet(ctypes.byref(device), index) or get_uuid(buffer, device):
            return ()
        uuids.append(f"GPU-{uuid.UUID(bytes=bytes(buffer))}")
    return tuple(uuids)


def busy_percent(uuid: str | None) -> int | None:
    """Share of the last moments (up to a second) in which that GPU computed; None where the driver does not say."""
    if not uuid:
        return None
    import pynvml  # 0.05 s, which ranks on CPUs need not spend.

    with suppress(pynvml.NVMLError):  # No driver, no such GPU, or one that does not measure it.
        return int(pynvml.nvmlDeviceGetUtilizationRates(_gpu_handle(uuid)).gpu)
    return None


@cache
def _gpu_handle(uuid: str) -> Any:
    """The driver's handle of a GPU, for as long as this process lives."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid)
