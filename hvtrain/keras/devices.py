"""One GPU for each local rank, chosen before TensorFlow touches a device.

Every process that a launcher starts sees all GPUs of its host until told otherwise, and TensorFlow
refuses to change what it sees once a device was used. `choose_gpus` is the rule, a pure function;
`pin_gpu` asks all ranks and applies it.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import dataclass

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.system import cores


@dataclass(frozen=True)
class View:
    """What one rank sees: its host, its local rank, and the names of the GPUs visible to it, in order."""

    host: str
    local_rank: int
    gpus: tuple[str, ...]


def choose_gpus(views: list[View], share: bool = False) -> list[int | None]:
    """For each rank the index, among the GPUs that it sees, of the one it is to use; None when it sees none.

    views holds all ranks' views, by rank. Ranks of a host that see the same GPUs (CUDA_VISIBLE_DEVICES
    unset, or set for the host) take them by local rank; ranks that see different ones (set for each rank)
    take the first of their own. Raises RankError when two ranks of a host would get the same GPU, or
    there is none left, unless share is true: then they share, round robin.

    >>> choose_gpus([View("s1", 0, ("0", "1")), View("s1", 1, ("0", "1"))])
    [0, 1]
    >>> choose_gpus([View("s1", 0, ("2",)), View("s1", 1, ("3",))])
    [0, 0]
    """
    hosts: dict[str, list[View]] = {}
    for view in views:
        hosts.setdefault(view.host, []).append(view)
    chosen = [_index(view, hosts[view.host], share) for view in views]
    if not share:
        for (host, gpu), ranks in _shared(views, chosen).items():
            raise RankError(
                f"{ranks} ranks on host {host} would use GPU {gpu}; give each rank its own in "
                "CUDA_VISIBLE_DEVICES or start fewer ranks there (strategy.share_gpus=true shares it)"
            )
    return chosen


def _shared(views: list[View], chosen: list[int | None]) -> dict[tuple[str, str], int]:
    """Host and name of each GPU that several ranks use, and how many."""
    users = Counter((view.host, view.gpus[index]) for view, index in zip(views, chosen) if index is not None)
    return {gpu: ranks for gpu, ranks in users.items() if ranks > 1}


def _index(view: View, on_host: list[View], share: bool) -> int | None:
    if not view.gpus:
        return None
    if any(other.gpus != view.gpus for other in on_host):
        return 0
    if view.local_rank < len(view.gpus):
        return view.local_rank
    if share:
        return view.local_rank % len(view.gpus)
    raise RankError(
        f"host {view.host} has {len(view.gpus)} visible GPU(s) for {len(on_host)} ranks; "
        "start fewer ranks there, make more GPUs visible, or set strategy.share_gpus=true"
    )


def pin_gpu(host: str | None = None, share: bool = False, pin_cores: bool = True) -> list[str]:
    """Makes this rank see one GPU, with memory growth, and returns all ranks' devices by rank (every rank).

    On a host without GPUs a rank keeps the memory that tensors free for the next ones, and with pin_cores it stays on
    its share of the cores (system/cores.py). Call it after init and before TensorFlow touches a device. A device reads
    "s1 GPU 0" or "s1 CPU".
    Raises RankError when ranks would share a GPU and share is false, or TensorFlow has touched one already.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        # Now: to gather allocates, and starts TensorFlow's threads, one for each core that it sees.
        _keep_freed_memory()
        if pin_cores:
            cores.pin(hvd.local_rank(), hvd.local_size())
    names = visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), len(gpus))
    views: list[View] = _gather(View(host or socket.gethostname(), hvd.local_rank(), names))
    chosen = choose_gpus(views, share)
    index = chosen[hvd.rank()]
    if index is not None:
        _use_only(gpus[index])
    if _shared(views, chosen):
        # NCCL refuses two ranks of a communicator on one GPU unless it is told that this is meant.
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    return [
        f"{view.host} CPU" if mine is None else f"{view.host} GPU {view.gpus[mine]}"
        for view, mine in zip(views, chosen)
    ]


def _keep_freed_memory() -> None:
    """TensorFlow's pool for GPUs ("best fit with coalescing") serves the CPU too, as large as this host's memory.

    Its other allocator has each large gradient's memory given back to the system and taken anew in the next step, and
    the pages of 100 MB cost more than to reduce them.
    """
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
    mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(mib))


def visible_names(variable: str | None, count: int) -> tuple[str, ...]:
    """Physical names of the `count` GPUs that TensorFlow lists, from CUDA_VISIBLE_DEVICES where it is set.

    >>> visible_names("2,3", 2), visible_names(None, 2)
    (('2', '3'), ('0', '1'))
    """
    named = tuple(name.strip() for name in variable.split(",")) if variable else ()
    return named[:count] if len(named) >= count else tuple(str(index) for index in range(count))


def _use_only(gpu: tf.config.PhysicalDevice) -> None:
    try:
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise RankError(
            f"a GPU was to be pinned and TensorFlow has started all of them already ({error}); "
            "call pin_gpu right after init, before anything makes a tensor or a model"
        ) from error


def _gather(view: View) -> list[View]:
    if hvd.size() == 1:
        return [view]
    # An eager collective would start TensorFlow on all GPUs, and then none can be pinned any more. A session of
    # its own, which is to know of no GPU, starts nothing that outlives it.
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        return hvd.allgather_object(view, session=session, name="hvtrain.devices")
