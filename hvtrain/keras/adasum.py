"""Where Horovod's Adasum (Maleki et al. 2020) works. The reduction of gradients asks before the first step."""

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.core.topology import Topology


def check_adasum(process_set: Any, device_dense: str) -> None:
    """Raises ValueError unless Adasum can reduce on these ranks (every rank)."""
    if process_set.process_set_id not in (None, 0):
        raise ValueError("Adasum works over all ranks only; leave process_set out")
    place = Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    on_gpus = bool(hvd.nccl_built() and tf.config.get_visible_devices("GPU")) and "cpu" not in device_dense.lower()
    check_places(place, on_gpus, hvd.is_homogeneous())
    if place.size > 1 and not hvd.mpi_enabled():
        raise ValueError("Adasum needs MPI and this job runs on Gloo; start the ranks with horovodrun --mpi or mpirun")


def check_places(place: Topology, on_gpus: bool, hosts_are_equal: bool) -> None:
    """Raises ValueError where Horovod would end in an error of MPI, or combine the wrong ranks without a word.

    Rank r exchanges with r ^ 1, r ^ 2, r ^ 4 ... (horovod/common/ops/adasum/adasum.h). On GPUs NCCL takes the mean
    inside a host and the exchange begins with r ^ local_size, which has to be the same local rank of another host.
    hosts_are_equal says whether all hosts have as many ranks; with 2, 4, 8, ... ranks the number of hosts is one of
    these too.
    """
    if place.size & (place.size - 1):
        raise ValueError(f"Adasum needs 2, 4, 8, ... ranks and there are {place.size}; use op=Average, or other ranks")
    if not on_gpus:
        return
    if not hosts_are_equal:
        needed, found = "equally many ranks on each of 1, 2, 4, ... hosts", f"{place.local_size} of {place.size}"
        raise ValueError(f"Adasum on GPUs needs {needed} and {found} are on {place.host}; use op=Average, or other -H")
    if place.rank % place.local_size != place.local_rank:
        found = f"rank {place.rank} is local rank {place.local_rank} of {place.local_size} on {place.host}"
        advice = "start them with horovodrun or mpirun --map-by slot"
        raise ValueError(f"Adasum on GPUs needs ranks numbered host by host and {found}; {advice}")
