"""TensorFlow's MultiWorkerMirroredStrategy, whose collectives reduce the ranks' gradients."""

import functools
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvtrain.config.validate import check_choice
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError, RankError
from hvtrain.keras.devices import exchange
from hvtrain.keras.process import CYCLE_TIME
from hvtrain.strategies.base import Timeline
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.strategies.replica_step import ReplicaStrategy, initializing_devices, step_of
from hvtrain.system import host_facts
from hvtrain.system.text import counted
from hvtrain.watchdog.starting import LOOPBACK, agree

NAME = "multi_worker_mirrored"
# TensorFlow's names for its implementations of collectives, in lower case.
COMMUNICATION = ("auto", "ring", "nccl")

# The errors that TensorFlow raises in a process when another process of its cluster is gone.
LOST_PROCESS_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class MultiWorkerMirroredStrategy(ReplicaStrategy, HorovodStrategy):
    """Lets TensorFlow reduce the gradients, over a cluster of the ranks; Horovod does everything else.

    So any of Horovod's launchers can start it, and checks, watchdog and checkpoints are the same.

    Args:
        communication: "ring", "nccl", or "auto", which leaves the choice to TensorFlow.
        share_gpus: let several ranks of a host use one GPU (for experiments).
        pin_cores: without GPUs, pin each rank of a host to its own share of the cores.
    """

    name = NAME

    def __init__(
        self, communication: str = "auto", share_gpus: bool = False, pin_cores: bool = True
    ) -> None:
        super().__init__(share_gpus=share_gpus, pin_cores=pin_cores)
        check_choice("strategy.communication", communication, COMMUNICATION)
        self.communication = communication
        self.timeline = Timeline()  # Horovod's would not show the gradients.

    def start(self) -> Topology:
        # In ms. Gradients do not pass through Horovod, so its threads need not
        # look for messages every 0.1 ms.
        os.environ.setdefault(CYCLE_TIME, "20")
        return super().start()

    def before_devices(self) -> None:
        self.replicas = join_cluster(self.topology.rank, self.topology.size, self.communication)

    def train_step(self, model: keras.Model) -> Callable[[Any], Any]:
        step = step_of(model)
        return lambda batch: self.replicas.run(step, (batch,))

    def is_lost_rank(self, error: BaseException) -> bool:
        return isinstance(error, LOST_PROCESS_ERRORS) or super().is_lost_rank(error)

    def description(self) -> str:
        workers = counted(self.topology.size, "worker")
        return f"MultiWorkerMirrored ({self.communication}), {workers}; {super().description()}"


@functools.cache
def join_cluster(rank: int, size: int, communication: str) -> tf.distribute.Strategy:
    """Makes the ranks a TensorFlow cluster, and returns TensorFlow's strategy over it (every rank).

    Cached, because a process can do this only once, before TensorFlow has initialized a device.

    Raises:
        ConfigError: the environment describes a cluster already.
        RankError: the ranks do not reach each other, or TensorFlow has initialized its devices.
    """
    refuse_own_cluster(NAME)
    if size > 1:
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": cluster_addresses(rank, NAME)},
                "task": {"type": "worker", "index": rank},
            }
        )
    options = tf.distribute.experimental.CommunicationOptions(implementation=communication)
    try:
        with initializing_devices(NAME):
            return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    finally:
        # Otherwise a child process would mistake TF_CONFIG for a cluster that the user has set up.
        os.environ.pop("TF_CONFIG", None)


def refuse_own_cluster(strategy: str) -> None:
    """Raises ConfigError if the environment describes a cluster already."""
    if "TF_CONFIG" in os.environ:
        raise ConfigError(
            f"TF_CONFIG is set, but strategy={strategy} builds its cluster from the launcher's ranks; unset it"
        )


def cluster_addresses(rank: int, strategy: str) -> list[str]:
    """Returns each rank's address and a free port, by rank, such as 10.0.0.1:41234 (every rank).

    The ranks exchange them through Horovod, so any launcher will do. Call it before TensorFlow
    initializes a device.

    Raises:
        RankError: the ranks do not reach rank 0.
    """
    chief_address, listener = agree(rank, exchange)
    if listener:
        listener.close()  # Only the address was needed, not the port.
    if chief_address is None:
        raise RankError(f"strategy={strategy}: no address of rank 0 can be reached from all ranks")
    chief_host, _ = chief_address

    # The address by which this host reaches rank 0 is on the network that all ranks share.
    own_host = LOOPBACK if chief_host == LOOPBACK else host_facts.address_towards(chief_host)
    with socket.create_server((own_host, 0)) as server:
        port = server.getsockname()[1]
        return exchange(f"{own_host}:{port}")
