"""Assigns one GPU to each local rank, before TensorFlow initializes a device.

Every process that a launcher starts sees all GPUs of its host, and TensorFlow cannot change the
visible devices once one of them has been used. `pin_gpu` gathers what all ranks see, lets the pure
function `choose_gpus` decide, and applies the decision.
"""

import os
import socket
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.system import resources
from hvtrain.system.resources import gpu_uuids, physical_gpus

T = TypeVar("T")


@dataclass(frozen=True)
class View:
    """One rank's view of its host: its local rank, and the GPUs that are visible to it."""

    host: str
    local_rank: int
    # Names of the visible GPUs, in TensorFlow's order; see visible_names.
    gpus: tuple[str, ...]
    # UUIDs of these GPUs, in the same order; empty without an NVIDIA driver. Names do not identify
    # GPUs if each rank is shown only its own (by cgroups, as with srun --gpus-per-task), since each
    # then counts from 0.
    ids: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that identify the GPUs within the host: UUIDs if known, otherwise names."""
        return self.ids or self.gpus


def choose_gpus(views: list[View], share: bool = False) -> list[int | None]:
    """Returns the GPU of each rank, as an index among the GPUs that it sees; None if it sees none.

    Ranks of a host that see the same GPUs (CUDA_VISIBLE_DEVICES is unset, or set for the host) take
    them by local rank. Ranks that see different GPUs (it is set for each rank) each take the first
    one that they see.

    Args:
        views: all ranks' views, by rank.
        share: True if ranks may share a GPU; the GPUs are then assigned to the ranks in turn.

    Raises:
        RankError: if only some ranks see a GPU, since ranks on CPUs cannot reduce with ranks on
            GPUs; or, unless share is true, if a host has too few GPUs or two of its ranks would get
            the same one.

    >>> choose_gpus([View("s1", 0, ("0", "1")), View("s1", 1, ("0", "1"))])
    [0, 1]
    """
    _check_all_or_none(views)
    chosen: list[int | None] = []
    for view in views:
        on_host = [other.keys for other in views if other.host == view.host]
        if not view.gpus:
            chosen.append(None)
        elif any(keys != view.keys for keys in on_host):
            # The ranks of this host see different GPUs.
            chosen.append(0)
        # From here on, all ranks of the host see the same GPUs.
        elif view.local_rank < len(view.gpus) or share:
            chosen.append(view.local_rank % len(view.gpus))
        else:
            # With by_local_rank (see pin_gpu) a rank knows only its own view.
            num_ranks = max(len(on_host), view.local_rank + 1)
            raise RankError(
                f"host {view.host} has {len(view.gpus)} visible GPU(s) for {num_ranks} ranks; "
                "start fewer ranks there, make more GPUs visible, or set strategy.share_gpus=true"
            )
    shared = _shared_gpus(views, chosen)
    if shared and not share:
        host, names = shared[0]
        raise RankError(
            f"{len(names)} ranks on host {host} would use GPU {names[-1]}; give each rank its own in "
            "CUDA_VISIBLE_DEVICES or start fewer ranks there (strategy.share_gpus=true shares it)"
        )
    return chosen


def _check_all_or_none(views: list[View]) -> None:
    """Raises RankError if only some ranks see a GPU."""
    with_gpus = ", ".join(dict.fromkeys(view.host for view in views if view.gpus))
    without = ", ".join(dict.fromkeys(view.host for view in views if not view.gpus))
    if with_gpus and without:
        raise RankError(
            f"ranks on {without} see no GPU, but those on {with_gpus} do; check {without} with nvidia-smi, "
            f"leave {without} out, or hide the GPUs of all hosts (CUDA_VISIBLE_DEVICES=-1) to train on CPUs"
        )


def _shared_gpus(views: list[View], chosen: list[int | None]) -> list[tuple[str, list[str]]]:
    """Returns, for each GPU that several ranks use, its host and its name on each of them."""
    # By key, because two ranks may know the same GPU under different numbers.
    names: dict[tuple[str, str], list[str]] = {}
    for view, index in zip(views, chosen):
        if index is not None:
            names.setdefault((view.host, view.keys[index]), []).append(view.gpus[index])
    return [(host, on_ranks) for (host, _), on_ranks in names.items() if len(on_ranks) > 1]


def _device_name(view: View, index: int | None, views: list[View]) -> str:
    """Returns a rank's host and device, such as "s1 GPU 0" or "s1 CPU".

    The UUID replaces the GPU's name if another GPU of the host has the same name.
    """
    if index is None:
        return f"{view.host} CPU"
    name = view.gpus[index]
    keys_of_name = {
        key
        for other in views
        if other.host == view.host
        for gpu, key in zip(other.gpus, other.keys)
        if gpu == name
    }
    if len(keys_of_name) > 1:
        name = view.keys[index]
    return f"{view.host} GPU {name}"


def pin_gpu(
    host: str | None = None,
    share: bool = False,
    pin_cores: bool = True,
    by_local_rank: bool = False,
) -> list[str]:
    """Makes this rank see one GPU, with memory growth; returns all ranks' devices (every rank).

    On a host without GPUs it makes TensorFlow keep the memory of freed tensors for reuse, and pins
    the rank to its share of the cores. Call it after init, and before TensorFlow initializes a
    device.

    Args:
        host: name of this host; None: socket.gethostname().
        share: True if ranks may share a GPU.
        pin_cores: on a host without GPUs, pin this rank to its share of the cores
            (system/resources.py).
        by_local_rank: choose without asking other ranks, and return only this rank's device. The
            call is then not collective, so that a rank can join an elastic job while the others are
            training. Every rank must see all GPUs of its host.

    Returns:
        Devices by rank, such as "s1 GPU 0" or "s1 CPU".

    Raises:
        RankError: as for choose_gpus; if TensorFlow has initialized its devices already; or if this
            host has GPUs that TensorFlow cannot use.
    """
    gpus = physical_gpus()
    if not gpus:
        # Done before exchange(), which allocates memory and starts a thread for each core that this
        # process may use.
        _keep_freed_memory()
        if pin_cores:
            resources.pin_to_cores(hvd.local_rank(), hvd.local_size())
    names = visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), len(gpus))
    own = View(host or socket.gethostname(), hvd.local_rank(), names, gpu_uuids(len(names)))
    views = [own] if by_local_rank else exchange(own, "hvtrain.devices")
    chosen = choose_gpus(views, share)
    # Ranks with equal views get the same GPU, or an error.
    index = chosen[views.index(own)]
    if index is not None:
        use_only(gpus[index])
    if _shared_gpus(views, chosen):
        # By default NCCL refuses two ranks of a communicator on one GPU.
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    return [_device_name(view, gpu, views) for view, gpu in zip(views, chosen)]


def _keep_freed_memory() -> None:
    """Makes TensorFlow use its GPU allocator (BFC, best fit with coalescing) for host memory too.

    The default CPU allocator returns the memory of each large gradient to the system. The next step
    then has to fault in new pages, which takes longer than the reduction for gradients of 100 MB.
    """
    host_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
    os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(host_mib))


def use_only(gpu: tf.config.PhysicalDevice) -> None:
    """Hides all other GPUs from this process, and turns on memory growth for this GPU.

    Raises:
        RankError: if TensorFlow has initialized its devices already.
    """
    try:
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise RankError(
            f"cannot pin a GPU: TensorFlow has initialized all of them already ({error}); "
            "call pin_gpu right after init, before anything makes a tensor or a model"
        ) from error


def exchange(value: T, name: str = "hvtrain.early_exchange") -> list[T]:
    """Returns all ranks' values, by rank, before TensorFlow initializes a device (every rank).

    An eager collective would initialize TensorFlow's context with all GPUs and without a cluster,
    which cannot be undone. A session without GPUs does not touch the context, so devices and a
    cluster can still be chosen afterwards. Call it after init.
    """
    if hvd.size() == 1:
        return [value]
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        return hvd.allgather_object(value, session=session, name=name)


@cache
def uuid_in_use() -> str | None:
    """Returns the UUID of the (first) GPU that this process uses; None if it is unknown."""
    visible = tf.config.get_visible_devices("GPU")
    if not visible:
        return None
    index = tf.config.list_physical_devices("GPU").index(visible[0])
    uuids = gpu_uuids(index + 1)
    return uuids[index] if uuids else None


def visible_names(variable: str | None, count: int) -> tuple[str, ...]:
    """Returns the names, as in CUDA_VISIBLE_DEVICES, of the GPUs that TensorFlow lists.

    Args:
        variable: the value of CUDA_VISIBLE_DEVICES; None if it is not set.
        count: number of GPUs that TensorFlow lists.

    >>> visible_names("3,1", 2), visible_names(None, 2)
    (('3', '1'), ('0', '1'))
    """
    numbers = tuple(str(index) for index in range(count))
    if not variable:
        return numbers
    names = tuple(name.strip() for name in variable.split(","))
    # CUDA stops at the first invalid entry, so fewer GPUs may be visible than are named.
    return names[:count] if len(names) >= count else numbers
