"""Runs on each rank: pin_gpu as it is, on GPUs that are only said to be there. No GPU is needed.

What TensorFlow lists comes from CUDA_VISIBLE_DEVICES, or is FAKE_GPUS=count GPUs whatever that says; a fake device is
pinned only while a real one still could be. Prints one line a rank, with the physical name of the rank's device:
`rank 0 host s1 local 0 device GPU 0`. `touch` as the first word makes a tensor first; `share` lets ranks share a GPU.
"""

from __future__ import annotations

import os
import socket
import sys

import fast_keras  # noqa: F401
import tensorflow as tf
from tensorflow.python.eager import context

import hvtrain.keras as hvd
from hvtrain.errors import RankError

if "FAKE_GPUS" in os.environ:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
NAMED = [
    name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()
]
COUNT = int(os.environ.get("FAKE_GPUS", len(NAMED)))
GPUS = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(COUNT)]
visible = list(GPUS)
growing = []


def refuse_when_started(message: str) -> None:
    """As TensorFlow itself does: what it shows to a program is fixed once it has started its devices."""
    if context.context()._context_handle is not None:
        raise RuntimeError(message)


def set_visible_devices(device: tf.config.PhysicalDevice, kind: str) -> None:
    assert kind == "GPU"
    refuse_when_started("Visible devices cannot be modified after being initialized")
    visible[:] = [device]


def set_memory_growth(device: tf.config.PhysicalDevice, enable: bool) -> None:
    refuse_when_started("Physical devices cannot be modified after being initialized")
    growing.append((device, enable))


tf.config.list_physical_devices = lambda kind=None: list(GPUS)
tf.config.set_visible_devices = set_visible_devices
tf.config.experimental.set_memory_growth = set_memory_growth

hvd.init()
if "touch" in sys.argv:
    tf.constant(1.0)
host = socket.gethostname()
try:
    devices = hvd.pin_gpu(host, share="share" in sys.argv)
except RankError as error:
    sys.exit(f"rank {hvd.rank()} {error}")
mine = devices[hvd.rank()].removeprefix(f"{host} ")
if GPUS:
    assert len(visible) == 1 and growing == [(visible[0], True)], (visible, growing)
    names = NAMED or [str(index) for index in range(COUNT)]
    assert mine == f"GPU {names[GPUS.index(visible[0])]}", (mine, visible)
# One write, so that the lines of several ranks do not mix.
sys.stdout.write(f"rank {hvd.rank()} host {host} local {hvd.local_rank()} device {mine}\n")
sys.stdout.flush()
# And real collectives go on working after the pinning.
total = float(hvd.allreduce(tf.constant(float(hvd.rank())), op=hvd.Sum))
assert total == hvd.size() * (hvd.size() - 1) / 2
hvd.shutdown()
