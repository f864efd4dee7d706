"""The GPUs that this process may use, by the driver and by TensorFlow, and how busy one is."""

import ctypes
import logging
import socket
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hvtrain.errors import RankError

log = logging.getLogger(__name__)


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
    return None if error else cuda


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
