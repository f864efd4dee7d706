"""Cores, memory and GPUs that this process may use on its host."""

import ctypes
import logging
import os
import re
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
# This process's share of the logical CPUs, once `pin_to_cores` has set it.
_pinned_cpus: set[int] | None = None

_CGROUPS = Path("/sys/fs/cgroup")
# Names of the files with the memory limit and the memory in use, and the prefix of names in memory.stat
# that include child groups, by cgroup version.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("memory.max", "memory.current", "")


def pin_to_cores(local_rank: int, local_size: int) -> set[int] | None:
    """Pins this process, with all its present and future threads, to its share of the host's logical CPUs.

    Returns:
        The share. None if the CPUs cannot be divided evenly: then the process may run on all of them. Also None
        if the launcher, Slurm or taskset has already chosen CPUs for it; that choice stays.
    """
    global _pinned_cpus
    try:
        all_cpus = os.sched_getaffinity(1)
    except PermissionError:
        return None
    # If CPUs were chosen for this process, it has fewer than process 1.
    if os.sched_getaffinity(0) not in (all_cpus, _pinned_cpus):
        return None
    _pinned_cpus = share_of_cores(sorted_by_core(all_cpus), local_rank, local_size)
    for thread in thread_ids():
        with suppress(ProcessLookupError):  # The thread has ended in the meantime.
            os.sched_setaffinity(thread, _pinned_cpus or all_cpus)
    return _pinned_cpus


def cores_of_each(local_size: int) -> int:
    """Returns the number of logical CPUs for each of a host's ranks, at least one."""
    if _pinned_cpus:
        return len(_pinned_cpus)
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def thread_ids() -> set[int]:
    """Returns the Linux thread IDs of this process."""
    return {thread.id for thread in psutil.Process().threads()}


def share_of_cores(cpus: Sequence[int], local_rank: int, local_size: int) -> set[int] | None:
    """Returns one rank's share, consecutive CPUs in the given order; None if they cannot be divided evenly."""
    # Unequal shares would make some ranks slower, and all ranks wait for the slowest.
    count, remainder = divmod(len(cpus), local_size)
    if remainder or not count:
        return None
    return set(cpus[local_rank * count : (local_rank + 1) * count])


def sorted_by_core(cpus: Iterable[int]) -> list[int]:
    """Sorts logical CPUs by socket and core, since those of one core often have numbers far apart."""

    def id_of(cpu, name):
        path = _CPUS / f"cpu{cpu}" / "topology" / name
        return int(path.read_text()) if path.exists() else 0

    return sorted(
        cpus, key=lambda cpu: (id_of(cpu, "physical_package_id"), id_of(cpu, "core_id"), cpu)
    )


def resident_bytes() -> int:
    """Returns the bytes of memory that this process occupies now."""
    return psutil.Process().memory_info().rss


def reset_peak() -> None:
    """Resets peak_bytes. If the kernel does not allow that, the earlier peak stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Returns the most bytes of memory that this process has occupied since it started, or since reset_peak()."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def free_bytes() -> int:
    """Returns the bytes of memory still available to this process: on the host, and in its container or job.

    If more is used, the kernel kills a process. Files that the kernel has cached count as free.
    """
    return max(0, min([psutil.virtual_memory().available, *_free_in_groups()]))


def _free_in_groups() -> Iterator[int]:
    # cgroup version 2 has a single line without controllers, version 1 one line per hierarchy.
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in groups:
        if controllers == "":
            root, names = _CGROUPS, _V2
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", _V1
        else:
            continue
        limit_file, usage_file, prefix = names
        cached = (f"{prefix}active_file", f"{prefix}inactive_file")
        group = root / path.strip("/")  # Inside a container this group may be the root.
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            with suppress(OSError, ValueError):  # The group is missing, or has no limit ("max").
                limit = int((folder / limit_file).read_text())
                used = int((folder / usage_file).read_text())
                stat = (folder / "memory.stat").read_text()
                sizes = dict(line.split() for line in stat.splitlines())
                yield limit - used + sum(int(sizes.get(name, 0)) for name in cached)


def physical_gpus() -> list[Any]:
    """Lists the GPUs that TensorFlow can use, as tf.config.PhysicalDevice.

    If there are GPUs and TensorFlow can use none, it would silently train on CPUs, at a hundredth of the
    speed. So this is an error, or a warning if TensorFlow is built for CPUs only.

    Raises:
        RankError: TensorFlow is built for GPUs, the driver shows some, and TensorFlow uses none.
    """
    import tensorflow as tf

    num_visible = _num_visible_gpus()
    if num_visible and tf.test.is_built_with_cuda():
        _load_cusolver(Path(tf.__file__).parents[1])

    gpus = tf.config.list_physical_devices("GPU")
    if num_visible and not gpus:
        _explain_unused(num_visible, tf.__version__, tf.test.is_built_with_cuda())
    return gpus


def _load_cusolver(packages: Path) -> None:
    """Loads cuSOLVER, so that TensorFlow finds it by name.

    TensorFlow 2.21 opens CUDA's libraries from libtensorflow_framework.so, whose run path has the
    packages of tensorflow[and-cuda] except nvidia-cusolver-cu12 (only libtensorflow_cc.so's has it).
    Without it, TensorFlow ignores all GPUs.
    """
    for library in packages.glob("nvidia/cusolver/lib/libcusolver.so.*"):
        # If it cannot be loaded, TensorFlow reports that itself.
        with suppress(OSError):
            ctypes.CDLL(str(library))


@cache
def _explain_unused(num_visible: int, version: str, has_cuda: bool) -> None:
    """Raises RankError for GPUs that TensorFlow does not use, or warns once if it is built for CPUs only."""
    host = socket.gethostname()
    if not has_cuda:
        log.warning(
            f"{host} has {num_visible} GPU(s), which are not used: TensorFlow {version} here is built for CPUs only; "
            "HVTRAIN_VARIANT=gpu ./scripts/run makes the environment for GPUs"
        )
        return
    raise RankError(
        f"{host} has {num_visible} GPU(s), and TensorFlow {version} can use none of them: it cannot load one of CUDA's "
        "libraries (TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_MAX_VLOG_LEVEL=1 names it); reinstall tensorflow[and-cuda], or "
        "set CUDA_VISIBLE_DEVICES=-1 to train on CPUs"
    )


def _cuda_driver():
    """Returns the CUDA driver's library, initialized; None if it is missing or cannot be initialized.

    Each of its functions returns 0 on success.
    """
    with suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        if not cuda.cuInit(0):
            return cuda
    return None


def _num_visible_gpus() -> int:
    """Returns the number of GPUs that the driver shows this process; 0 without a driver, or if the call fails."""
    cuda = _cuda_driver()
    count = ctypes.c_int()
    if cuda is None or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def gpu_uuids(count: int) -> tuple[str, ...]:
    """Returns UUIDs of the first `count` GPUs that CUDA shows this process.

    Empty if the driver does not report them. The driver's own API creates no GPU context, and unlike
    nvidia-smi it numbers the GPUs as CUDA_VISIBLE_DEVICES does.
    """
    cuda = _cuda_driver() if count else None
    if cuda is None:
        return ()

    # The driver writes its results into these two.
    device = ctypes.c_int()
    buffer = (ctypes.c_ubyte * 16)()
    uuids = []
    for index in range(count):
        if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetUuid_v2(buffer, device):
            return ()
        uuids.append(f"GPU-{uuid.UUID(bytes=bytes(buffer))}")
    return tuple(uuids)


PEAK_TFLOPS = {
    "H100 PCIe": (378, 756),
    "H100 NVL": (418, 835),
    "H200 NVL": (418, 835),
    "H100": (495, 989),
    "H200": (495, 989),
    "A100": (156, 312),
    "V100": (15.7, 125),
    "L40S": (183, 362),
    "L40": (90.5, 181),
    "L4": (60, 121),
    "T4": (8.1, 65),
}
"""Dense peak TFLOPS by words in the GPU's name: in float32 (TF32 where available) and in half precision.

More specific names come first.
"""


def peak_flops(precision: str) -> float | None:
    """Returns the peak FLOPS of this process's GPU according to NVIDIA's data sheets; None if unknown.

    Args:
        precision: Keras's dtype policy.
    """
    import tensorflow as tf

    for gpu in tf.config.get_visible_devices("GPU")[:1]:
        device = tf.config.experimental.get_device_details(gpu).get("device_name", "")
        for name, peaks in PEAK_TFLOPS.items():
            # A MIG slice has an unknown part of its GPU's peak.
            if re.search(rf"\b{name}\b(?!.* MIG\b)", device):
                return 1e12 * peaks[precision.startswith("mixed_")]
    return None


def busy_percent(uuid: str | None) -> int | None:
    """Returns the GPU's utilization over the last moments (up to a second); None if the driver does not report it."""
    if not uuid:
        return None
    import pynvml  # Imported here, since it takes 0.05 s, which ranks on CPUs need not spend.

    with suppress(pynvml.NVMLError):  # No driver, no such GPU, or one that does not measure it.
        return pynvml.nvmlDeviceGetUtilizationRates(_gpu_handle(uuid)).gpu
    return None


@cache
def _gpu_handle(uuid: str):
    """Returns NVML's handle of a GPU, which is valid as long as this process lives."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid)
