"""Start and stop of one rank: with any launcher, or with none.

Horovod finds its place from what the launcher left in the environment. Two cases need help: no launcher
at all (a bare MPI start fails under the MPI wheel, so Gloo starts alone), and settings meant for one
launcher that are exported under another, which makes every rank a job of its own, silently.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.system import cores, interfaces

# Set for every rank by: horovodrun --gloo; Open MPI's mpirun (horovodrun --mpi too); MPICH and Intel MPI; srun.
_SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
CYCLE = "HOROVOD_CYCLE_TIME"
# Open MPI's own choice for two ranks takes as much new memory as it sums, each time; segments stay in the cache.
_RING_IN_SEGMENTS = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "5",
    "OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize": "262144",
}


def launched_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Number of ranks that the launcher says it started; None when nothing launched this process.

    >>> launched_size({"OMPI_COMM_WORLD_SIZE": "4"})
    4
    >>> launched_size({}) is None
    True
    """
    for name in _SIZE_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """True in an elastic job, where ranks come and go; the launcher's number of them may be old already."""
    return environ.get("HOROVOD_ELASTIC") == "1"


def init(*args: Any, **kwargs: Any) -> None:
    """Starts Horovod; a second call does nothing. Arguments are those of horovod.tensorflow.init.

    Raises RankError when the launcher started several ranks and this one finds itself alone.
    """
    _choose_interface()
    _choose_pace()
    elastic = is_elastic()
    expected = launched_size()
    if expected is None and not elastic:
        os.environ.setdefault("HOROVOD_CONTROLLER", "gloo")
        os.environ.setdefault("HOROVOD_CPU_OPERATIONS", os.environ["HOROVOD_CONTROLLER"])
    before = cores.threads()
    hvd.init(*args, **kwargs)
    if _is_by_mpi() and not tf.config.list_physical_devices("GPU"):
        _let_others_go_first(cores.threads() - before)
    if expected is not None and expected > 1 and hvd.size() == 1 and not elastic:
        settings = ", ".join(
            f"{name}={os.environ[name]}"
            for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
            if name in os.environ
        )
        hvd.shutdown()
        raise RankError(
            f"the launcher started {expected} ranks but this one finds itself alone"
            f"{f' with {settings}' if settings else ''}; unset those variables, or start with horovodrun"
        )


def _let_others_go_first(threads: set[int]) -> None:
    """Horovod's threads wait inside MPI without sleep, on cores that compute; they need them when nothing else does.

    5 below the others in niceness is a quarter of the core where both want it.
    """
    for thread in threads:
        with suppress(ProcessLookupError):  # It has ended meanwhile.
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 5))


def hold_mpi() -> None:
    """Before init, so that another one can follow: Horovod ends an MPI that it began, and it begins only once."""
    if _is_by_mpi():
        _choose_pace()
        from mpi4py import MPI  # noqa: F401  (begins it)


def _is_by_mpi() -> bool:
    by_mpi = any(name in os.environ for name in _SIZE_VARIABLES if name != "HOROVOD_SIZE")
    return by_mpi and os.environ.get("HOROVOD_CONTROLLER") != "gloo"


def _is_on_one_host() -> bool:
    """True where the launcher, Open MPI's or Horovod's, has put all ranks on this host."""
    launcher = "OMPI_COMM_WORLD" if "OMPI_COMM_WORLD_SIZE" in os.environ else "HOROVOD"
    return os.environ.get(f"{launcher}_LOCAL_SIZE", "") == os.environ.get(f"{launcher}_SIZE")


def _choose_pace() -> None:
    """How MPI waits and sums, when Horovod looks for gradients (ms) and what it joins; what the user has set stays.

    Horovod's threads meet once a cycle, idle or not, and all but the last of them wait inside MPI, which takes a whole
    core of each. So the wait is to give way to what computes; and as they wait all the time, a shorter cycle costs no
    more. Between hosts it would be a message on the network each time, so there Horovod's 1 ms stays.
    """
    # Messages are the buckets: what a cycle joins besides is copied. On all ranks alike, or they would wait for ever.
    os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
    if not _is_by_mpi():
        return
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if not _is_on_one_host():
        return
    os.environ.setdefault(CYCLE, "0.1")
    if "OMPI_MCA_coll_tuned_use_dynamic_rules" not in os.environ:
        os.environ.update(_RING_IN_SEGMENTS)


def _choose_interface() -> None:
    """Gloo and NCCL talk over the interface that leads to the launcher, whatever it is called on this host.

    horovodrun names one interface for all hosts; names differ (eth0 here, ens5 there).
    """
    launcher, named = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_IFACE")
    if not launcher or not named:
        return
    address = interfaces.address_towards(launcher)
    # On the launcher's own host the way is none at all, and the name is that host's.
    if address != launcher and (found := interfaces.interface_of(address)) and found != named:
        os.environ["HOROVOD_GLOO_IFACE"] = found
        os.environ["NCCL_SOCKET_IFNAME"] = found
