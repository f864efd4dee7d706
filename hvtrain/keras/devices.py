"""One GPU for each local rank, chosen before TensorFlow initializes a device.

Every process that a launcher starts sees all GPUs of its host, and TensorFlow cannot change its visible devices once
one was used. `choose_gpus` is the rule, a pure function; `pin_gpu` gathers all ranks' views and applies it.
"""

import ctypes
import os
import socket
import uuid
from collections import Counter
from dataclasses import dataclass
from functools import cache

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.keras.early_exchange import exchange
from hvtrain.system import cores


@dataclass(frozen=True)
class View:
    """One rank's view of its host: local rank, and names of the visible GPUs in order.

    ids are the GPUs' UUIDs, in the same order. Names are not enough where each rank is shown only GPUs of its own
    (cgroups, as by srun --gpus-per-task): there each numbers its own from 0. Empty where there is no NVIDIA driver.
    """

    host: str
    local_rank: int
    gpus: tuple[str, ...]
    ids: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """What tells the GPUs of a host apart."""
        return self.ids or self.gpus


def choose_gpus(views: list[View], share: bool = False) -> list[int | None]:
    """The GPU of each rank, as an index among the GPUs that it sees; None if it sees none.

    views holds all ranks' views, by rank. Ranks of a host that see the same GPUs (CUDA_VISIBLE_DEVICES unset, or set
    for the host) take them by local rank. Ranks that see different ones (set for each rank) take their first. Raises
    RankError if two ranks of a host would get the same GPU or none is left, unless share is true: then they share,
    round robin. Raises it too if only some ranks see a GPU, for ranks on CPUs cannot reduce with ranks on GPUs.
    """
    if len({bool(view.gpus) for view in views}) == 2:
        bare, others = (
            ", ".join(dict.fromkeys(v.host for v in views if bool(v.gpus) is seen)) for seen in (False, True)
        )
        raise RankError(
            f"ranks on {bare} see no GPU, and those on {others} do; see what nvidia-smi says on {bare}, leave it out, "
            "or hide the GPUs of all hosts (CUDA_VISIBLE_DEVICES=-1) to train on CPUs"
        )
    chosen: list[int | None] = []
    for view in views:
        on_host = [other.keys for other in views if other.host == view.host]
        if not view.gpus:
            chosen.append(None)
        elif any(keys != view.keys for keys in on_host):
            chosen.append(0)
        elif view.local_rank < len(view.gpus) or share:
            chosen.append(view.local_rank % len(view.gpus))
        else:
            num_ranks = max(len(on_host), view.local_rank + 1)
            raise RankError(
                f"host {view.host} has {len(view.gpus)} visible GPU(s) for {num_ranks} ranks; "
                "start fewer ranks there, make more GPUs visible, or set strategy.share_gpus=true"
            )
    (host, gpu), num_ranks = _most_used(views, chosen)
    if num_ranks > 1 and not share:
        raise RankError(
            f"{num_ranks} ranks on host {host} would use GPU {gpu}; give each rank its own in "
            "CUDA_VISIBLE_DEVICES or start fewer ranks there (strategy.share_gpus=true shares it)"
        )
    return chosen


def _most_used(views: list[View], chosen: list[int | None]) -> tuple[tuple[str, str], int]:
    """The GPU that most ranks use, by host and name, and how many do."""
    pairs = [(view, index) for view, index in zip(views, chosen) if index is not None]
    names = {(view.host, view.keys[index]): view.gpus[index] for view, index in pairs}
    users = Counter((view.host, view.keys[index]) for view, index in pairs).most_common(1)
    return ((users[0][0][0], names[users[0][0]]), users[0][1]) if users else (("", ""), 0)


def _device(view: View, index: int | None, views: list[View]) -> str:
    """A rank's device, by the GPU's name, or by its UUID where another GPU of the host has that name."""
    if index is None:
        return f"{view.host} CPU"
    same = {
        key
        for other in views
        if other.host == view.host
        for name, key in zip(other.gpus, other.keys)
        if name == view.gpus[index]
    }
    return f"{view.host} GPU {view.gpus[index] if len(same) == 1 else view.keys[index]}"


def pin_gpu(
    host: str | None = None, share: bool = False, pin_cores: bool = True, by_local_rank: bool = False
) -> list[str]:
    """Makes this rank see one GPU, with memory growth, and returns all ranks' devices by rank (every rank).

    With by_local_rank it asks no other rank, so it is not collective, and returns this rank's device alone. A rank that
    joins an elastic job needs that: the others are training. Every rank must see all GPUs of its host then.

    On a host without GPUs the rank keeps memory of freed tensors for new ones, and with pin_cores it stays on its share
    of the cores (system/cores.py). Call it after init and before TensorFlow initializes a device. A device reads
    "s1 GPU 0" or "s1 CPU".
    Raises RankError if ranks would share a GPU and share is false, or if TensorFlow has initialized one already.
    """
    if not (gpus := tf.config.list_physical_devices("GPU")):
        # Before exchange, which allocates, and starts one TensorFlow thread for each core that this process may use.
        # TensorFlow's GPU allocator (best fit with coalescing), with all of this host's memory: the CPU's returns each
        # large gradient's memory to the system and takes new pages in the next step, which for 100 MB costs more than
        # the reduction.
        os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
        mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(mib))
        if pin_cores:
            cores.pin(hvd.local_rank(), hvd.local_size())
    names = visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), len(gpus))
    own = View(host or socket.gethostname(), hvd.local_rank(), names, _uuids(len(names)))
    views = [own] if by_local_rank else exchange(own, "hvtrain.devices")
    chosen = choose_gpus(views, share)
    index = chosen[0 if by_local_rank else hvd.rank()]
    if index is not None:
        use_only(gpus[index])
    if _most_used(views, chosen)[1] > 1:
        # By default NCCL refuses two ranks of a communicator on one GPU.
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    return [_device(view, gpu, views) for view, gpu in zip(views, chosen)]


def use_only(gpu: tf.config.PhysicalDevice) -> None:
    """Hides the other GPUs from this process, which takes memory of this one only as it needs it.

    Raises RankError if TensorFlow has initialized its devices already.
    """
    try:
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise RankError(
            f"cannot pin a GPU: TensorFlow has initialized all of them already ({error}); "
            "call pin_gpu right after init, before anything makes a tensor or a model"
        ) from error


def _uuids(count: int) -> tuple[str, ...]:
    """UUIDs of the first `count` GPUs that CUDA shows this process, in its order; none if the driver does not say.

    By the driver's own interface: it starts no GPU, and unlike nvidia-smi it counts as CUDA_VISIBLE_DEVICES has it.
    """
    found = []
    if count:
        try:
            cuda = ctypes.CDLL("libcuda.so.1")
            ask = cuda.cuDeviceGetUuid_v2
        except (OSError, AttributeError):
            return ()
        device, text = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        failed = cuda.cuInit(0)
        for index in range(count):
            failed = failed or cuda.cuDeviceGet(ctypes.byref(device), index) or ask(text, device)
            found.append(f"GPU-{uuid.UUID(bytes=bytes(text))}")
        if failed:
            return ()
    return tuple(found)


@cache
def uuid_in_use() -> str | None:
    """The UUID of the GPU that this process uses, or of its first one; None where there is none, or none is told."""
    if not (visible := tf.config.get_visible_devices("GPU")):
        return None
    index = tf.config.list_physical_devices("GPU").index(visible[0])
    found = _uuids(index + 1)
    return found[index] if found else None


def visible_names(variable: str | None, count: int) -> tuple[str, ...]:
    """Physical names of the `count` GPUs that TensorFlow lists, from CUDA_VISIBLE_DEVICES if it is set."""
    named = tuple(name.strip() for name in variable.split(",")) if variable else ()
    return named[:count] if len(named) >= count else tuple(str(index) for index in range(count))
