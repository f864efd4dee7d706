"""How busy a GPU is, from NVIDIA's management library, which is part of every driver."""

import ctypes
from functools import cache
from typing import Any


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent


def busy_percent(uuid: str | None) -> int | None:
    """Share of the last moments (up to a second) in which that GPU computed; None where the driver does not say."""
    if not uuid:
        return None
    library, device = _open(uuid)
    utilization = _Utilization()
    if library is None or library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(utilization)):
        return None
    return int(utilization.gpu)


@cache
def _open(uuid: str) -> tuple[Any, Any]:
    """The library and its handle of the GPU; None and None if there are none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        device = ctypes.c_void_p()
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device))
    except (OSError, AttributeError):
        return None, None
    return (None, None) if failed else (library, device)
