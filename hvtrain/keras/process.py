"""Starts one rank under any launcher or none, and recognizes errors that mean a lost rank.

Horovod reads its rank and size from the environment variables that the launcher sets. Two cases
need help. Without a launcher, MPI from the PyPI wheel cannot start a single process, so Gloo is
used. And settings for one launcher that are exported under another silently make every rank a job
of its own.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvtrain.core.topology import Topology
from hvtrain.errors import RankError
from hvtrain.system import console, host_facts, resources

CYCLE_TIME = "HOROVOD_CYCLE_TIME"

# Open MPI's default algorithm for two ranks allocates a buffer as large as the message on every
# call. A segmented ring (algorithm 5) works in pieces of 256 KiB, which stay in the cache.
_SEGMENTED_RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "5",
    "OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize": "262144",
}

# Matches messages of Horovod, Gloo and NCCL, and the type of the operation that failed. The word
# Horovod is not enough, since a traceback from a user's data function may contain it in a path.
_LOST = re.compile(
    r"Horovod has been shut down|gloo/[\w/]+\.cc:\d+\]|(nccl\w+ failed|NCCL async error):"
    r"|Horovod(Grouped)?(Allreduce|Allgather|Broadcast|Alltoall|Reducescatter)"
)


def is_elastic() -> bool:
    """Returns True in an elastic job, where the launcher's number of ranks may be out of date."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def init(*args: Any, **kwargs: Any) -> None:
    """Starts Horovod; a second call does nothing. Arguments are those of horovod.tensorflow.init.

    Raises:
        RankError: if the launcher started several ranks and this rank finds no other, unless the
            argument comm chooses the ranks.
    """
    _choose_interface()
    _set_defaults()
    # Set in the first call only: later, a library may have chained its own hook to this one.
    if not hasattr(_explain_lost_ranks, "previous"):
        _explain_lost_ranks.previous = sys.excepthook  # type: ignore[attr-defined]
        sys.excepthook = _explain_lost_ranks
    expected_size = console.launched_size()
    if expected_size is None and not is_elastic():
        os.environ.setdefault("HOROVOD_CONTROLLER", "gloo")
        os.environ.setdefault("HOROVOD_CPU_OPERATIONS", os.environ["HOROVOD_CONTROLLER"])

    threads_before = resources.thread_ids()
    hvd.init(*args, **kwargs)
    if _uses_mpi() and not resources.physical_gpus():
        # Horovod's threads busy-wait inside MPI. With their niceness raised by 5, Linux gives them
        # a quarter of a core that they share with a compute thread.
        for thread in resources.thread_ids() - threads_before:
            with contextlib.suppress(ProcessLookupError):  # The thread has ended.
                niceness = os.getpriority(os.PRIO_PROCESS, thread)
                os.setpriority(os.PRIO_PROCESS, thread, min(19, niceness + 5))

    # With comm, the script itself chooses the ranks, and may choose this one alone.
    has_comm = (args[0] if args else kwargs.get("comm")) is not None
    can_be_alone = has_comm or is_elastic()
    if expected_size is not None and expected_size > 1 and hvd.size() == 1 and not can_be_alone:
        names = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
        settings = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        reason = ""
        advice = "start the ranks with horovodrun"
        if settings:
            reason = f" with {settings}"
            advice = f"unset these variables, or {advice}"
        hvd.shutdown()
        raise RankError(
            f"the launcher started {expected_size} ranks but this one finds itself alone{reason}; {advice}"
        )


def keep_mpi_initialized() -> None:
    """Initializes MPI before Horovod does, so that Horovod can be shut down and started again.

    If Horovod initialized MPI it would also finalize it, and MPI can be initialized only once. Call
    this function before init.
    """
    if _uses_mpi():
        _set_defaults()
        from mpi4py import MPI  # noqa: F401  (its import initializes MPI)


def _uses_mpi() -> bool:
    by_mpi = any(name in os.environ for name in console.SIZE_VARIABLES if name != "HOROVOD_SIZE")
    return by_mpi and os.environ.get("HOROVOD_CONTROLLER") != "gloo"


def _set_defaults() -> None:
    """Sets defaults for how MPI waits and sums, and for Horovod's cycle time (ms), fusion and stall limit.

    Variables that the user has set are kept.

    The ranks' Horovod threads synchronize once per cycle, and all but the last to arrive busy-wait
    inside MPI, each on a whole core. So they are told to yield to compute threads; and since they
    poll all the time anyway, a shorter cycle costs nothing. Between hosts every cycle is a network
    message, so there Horovod's default of 1 ms stays.
    """
    # Gradients are bucketed already, and fusing the buckets again would only copy them. The setting
    # must be the same on all ranks, or they hang.
    os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
    # By default Horovod reports a stalled rank after a minute, and then waits forever.
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "1800")
    if not _uses_mpi():
        return

    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    # The launcher (Open MPI's or Horovod's) tells whether all ranks are on this host.
    launcher = "OMPI_COMM_WORLD" if "OMPI_COMM_WORLD_SIZE" in os.environ else "HOROVOD"
    if os.environ.get(f"{launcher}_LOCAL_SIZE", "") == os.environ.get(f"{launcher}_SIZE"):
        os.environ.setdefault(CYCLE_TIME, "0.1")
        if "OMPI_MCA_coll_tuned_use_dynamic_rules" not in os.environ:
            os.environ.update(_SEGMENTED_RING)


def _choose_interface() -> None:
    """Points Gloo and NCCL at the network interface that routes to the launcher.

    horovodrun names one interface for all hosts, but names differ between hosts (eth0, ens5).
    """
    launcher = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    named = os.environ.get("HOROVOD_GLOO_IFACE")
    if not launcher or not named:
        return
    address = host_facts.address_towards(launcher)
    if address == launcher:
        return  # On the launcher's own host the route is loopback, and the given name is right.
    interface = host_facts.interface_of(address)
    if interface and interface != named:
        os.environ["HOROVOD_GLOO_IFACE"] = interface
        if os.environ.get("NCCL_SOCKET_IFNAME", named) == named:
            # Only a value that horovodrun set: any other is the user's own choice.
            os.environ["NCCL_SOCKET_IFNAME"] = interface


@contextlib.contextmanager
def raise_for_elastic() -> Iterator[None]:
    """Turns TensorFlow's error about a lost rank into Horovod's, which its elastic loop catches.

    It converts only UnknownError. For errors that a retry would repeat, such as shapes that differ
    between ranks, Horovod's kernels raise other types.
    """
    try:
        yield
    except tf.errors.UnknownError as error:
        if _LOST.search(error.message):
            raise HorovodInternalError(error.message) from error
        raise


def is_lost_rank_error(error: BaseException) -> bool:
    """Returns True if the error says that communication between ranks broke."""
    # Horovod raises these for errors that a retry would repeat, such as shapes that differ between ranks.
    if isinstance(error, tf.errors.InvalidArgumentError | tf.errors.FailedPreconditionError):
        return False
    return bool(_LOST.search(str(error)))


def _explain_lost_ranks(error_type: type[BaseException], error: BaseException, trace: Any) -> None:
    """Prints the traceback, then explains why a rank that was waiting for another has failed."""
    _explain_lost_ranks.previous(error_type, error, trace)  # type: ignore[attr-defined]
    if is_lost_rank_error(error):
        print(
            f"hvtrain: rank {console.launched_rank()} waited for a rank that is gone or never came. If another rank "
            "failed, its error is the cause. If it ended without an error, it had fewer batches than this rank: call "
            "fit with dataset.take(n), or with x[: n * batch_size], where n = hvtrain.keras.steps_per_epoch(number of "
            "batches) is the smallest number of batches on any rank",
            file=sys.stderr,
        )


def check_adasum(process_set: Any, device_dense: str) -> None:
    """Raises ValueError unless Horovod's Adasum (Maleki et al. 2020) can reduce on these ranks."""
    if process_set.process_set_id not in (None, 0):
        raise ValueError("Adasum works over all ranks only; leave process_set out")
    topology = Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    has_gpu = bool(hvd.nccl_built() and tf.config.get_visible_devices("GPU"))
    on_gpus = has_gpu and "cpu" not in device_dense.lower()
    check_adasum_topology(topology, on_gpus, hvd.is_homogeneous())
    if topology.size > 1 and not hvd.mpi_enabled():
        raise ValueError(
            "Adasum needs MPI, but this job runs on Gloo; start the ranks with horovodrun --mpi or mpirun"
        )


def check_adasum_topology(topology: Topology, on_gpus: bool, hosts_are_equal: bool) -> None:
    """Raises ValueError where Adasum would fail in MPI, or silently combine the wrong ranks.

    Rank r exchanges with ranks r ^ 1, r ^ 2, r ^ 4 ... (horovod/common/ops/adasum/adasum.h). On GPUs
    NCCL first averages within each host, and the exchange begins with r ^ local_size, which must be the
    same local rank on another host.

    Args:
        topology: this rank's topology.
        on_gpus: True if NCCL averages within each host.
        hosts_are_equal: True if all hosts have the same number of ranks. With 2, 4, 8, ... ranks
            the number of hosts is then a power of two as well.
    """
    size = topology.size
    is_in_order = topology.rank % topology.local_size == topology.local_rank
    if size & (size - 1) or (on_gpus and not (hosts_are_equal and is_in_order)):
        raise ValueError(
            "Adasum needs 2, 4, 8, ... ranks, and on GPUs the same number on each host, numbered host by host (by "
            f"horovodrun, or mpirun --map-by slot); this is rank {topology.rank} of {size}, and local rank "
            f"{topology.local_rank} of {topology.local_size} on {topology.host}; start the ranks accordingly, or use "
            "op=Average"
        )
