"""Where this rank's time goes, and what it takes of its GPU, in words."""

import tensorflow as tf

from hvtrain.keras.devices import uuid_in_use
from hvtrain.step.step_timing import StepTimes
from hvtrain.system import nvml

GIB = 1 << 30


def shares(times: StepTimes, num_ranks: int) -> str:
    """Where the time of these steps went on this rank, in percent; empty if there was none.

    >>> shares(StepTimes(steps=10, data=0.1, compute=0.7, communication=0.2), num_ranks=2)
    'data 10%, compute 70%, communication 20%'
    """
    if times.whole <= 0:
        return ""
    parts = {"data": times.data, "compute": times.compute}
    if num_ranks > 1:
        parts["communication"] = times.communication
    return ", ".join(f"{name} {seconds / times.whole:.0%}" for name, seconds in parts.items())


def gpu() -> str:
    """Used and peak memory of this process's GPU, and how busy that GPU is, in words; empty without a GPU."""
    if not tf.config.list_logical_devices("GPU"):
        return ""
    used = tf.config.experimental.get_memory_info("GPU:0")
    busy = nvml.busy_percent(uuid_in_use())
    memory = f"GPU memory {used['current'] / GIB:.1f} GiB, peak {used['peak'] / GIB:.1f} GiB"
    return memory if busy is None else f"{memory}; GPU busy {busy}%"
