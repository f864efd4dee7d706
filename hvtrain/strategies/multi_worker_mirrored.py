"""TensorFlow's MultiWorkerMirroredStrategy: each rank is a worker, and TensorFlow's collectives reduce gradients."""

import functools
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError, RankError
from hvtrain.keras.devices import exchange
from hvtrain.keras.process import CYCLE_TIME
from hvtrain.strategies.base import Timeline
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.strategies.replica_step import (
    ReplicaReducer,
    plain,
    prepare_model,
    reduce_first,
    replica_loss,
    step_of,
)
from hvtrain.system import interfaces
from hvtrain.watchdog.starting import LOOPBACK, agree

NAME = "multi_worker_mirrored"
_KINDS = tf.distribute.experimental.CommunicationImplementation
COMMUNICATION = {"auto": _KINDS.AUTO, "ring": _KINDS.RING, "nccl": _KINDS.NCCL}
# Errors of TensorFlow's collectives on a rank whose peer is gone.
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)


class MultiWorkerMirroredStrategy(HorovodStrategy):
    """TensorFlow reduces the gradients, over a cluster of the ranks; Horovod does everything else.

    So any launcher of Horovod can start it, and its checks, watchdog and checkpoints are the same.

    Args:
        communication: "ring", "nccl", or "auto", which leaves the choice to TensorFlow.
        share_gpus, pin_cores: as in HorovodStrategy.
    """

    def __init__(self, communication: str = "auto", share_gpus: bool = False, pin_cores: bool = True) -> None:
        super().__init__(share_gpus=share_gpus, pin_cores=pin_cores)
        if communication not in COMMUNICATION:
            raise ConfigError(f"strategy.communication={communication} is not one of {', '.join(COMMUNICATION)}")
        self.communication = communication
        self.timeline = Timeline()  # Horovod's would not show the gradients.

    def start(self) -> Topology:
        # Gradients do not pass through Horovod, so its threads need not look for messages every 0.1 ms.
        os.environ.setdefault(CYCLE_TIME, "20")
        return super().start()

    def before_devices(self) -> None:
        self.replicas = join_cluster(self.topology.rank, self.topology.size, self.communication)

    @contextmanager
    def scope(self) -> Iterator[None]:
        with self.replicas.scope(), tf.variable_creator_scope(plain):
            yield

    def distribute(
        self, optimizer: keras.optimizers.Optimizer, check_finite: bool = False, divide_losses: bool = False
    ) -> keras.optimizers.Optimizer:
        place = self.topology
        reducer = ReplicaReducer(
            strategy=NAME, num_replicas=place.size, own_replica=place.rank, compares=True, marks=self.marks
        )
        return reduce_first(optimizer, reducer, check_finite)

    def distribute_loss(self, loss: keras.losses.Loss) -> keras.losses.Loss:
        return replica_loss(loss, self.topology.size)

    def prepare(self, model: keras.Model) -> None:
        prepare_model(model, NAME)

    def train_step(self, model: keras.Model) -> Callable[[Any], Any]:
        step = step_of(model)
        return lambda batch: self.replicas.run(step, (batch,))

    def expect_restart(self) -> None:
        raise ConfigError(
            f"comm.tune=true tunes Horovod's reductions, which strategy={NAME} does not use; leave it out"
        )

    def is_lost_rank(self, error: BaseException) -> bool:
        return isinstance(error, _LOST) or super().is_lost_rank(error)

    def description(self) -> str:
        size = self.topology.size
        return f"MultiWorkerMirrored ({self.communication}), {size} worker{'s' * (size > 1)}; {super().description()}"


@functools.cache
def join_cluster(rank: int, size: int, communication: str) -> tf.distribute.Strategy:
    """Makes the ranks a TensorFlow cluster, and returns TensorFlow's strategy over it (every rank).

    A process can do this once, before TensorFlow has initialized a device. Raises ConfigError and RankError.
    """
    refuse_own_cluster(NAME)
    if size > 1:
        workers = cluster_addresses(rank, NAME)
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        )
    options = tf.distribute.experimental.CommunicationOptions(implementation=COMMUNICATION[communication])
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as error:
        raise RankError(
            f"strategy={NAME} must start before TensorFlow has initialized its devices ({error}); "
            "import no module that creates a tensor or a model"
        ) from error
    finally:
        os.environ.pop("TF_CONFIG", None)


def refuse_own_cluster(strategy: str) -> None:
    """Raises ConfigError if the environment describes a cluster already."""
    if "TF_CONFIG" in os.environ:
        raise ConfigError(
            f"TF_CONFIG is set, and strategy={strategy} builds its cluster from the launcher's ranks; unset it"
        )


def cluster_addresses(rank: int, strategy: str) -> list[str]:
    """Each rank's address and a free port, by rank: 10.0.0.1:41234 (every rank).

    Call it before TensorFlow has initialized a device. Raises RankError if the ranks do not reach rank 0.
    """
    found, listener = agree(rank, exchange, lambda value: exchange(value)[0])
    if listener:
        listener.close()
    if found is None:
        raise RankError(f"strategy={strategy}: no address of rank 0 can be reached from all ranks")
    own = LOOPBACK if found[0] == LOOPBACK else interfaces.address_towards(found[0])
    with socket.create_server((own, 0)) as free:
        return exchange(f"{own}:{free.getsockname()[1]}")
