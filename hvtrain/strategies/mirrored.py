"""TensorFlow's MirroredStrategy and MultiWorkerMirroredStrategy, whose collectives reduce the gradients.

The first is a single process, with a replica on each GPU of this host; the second has a process for each rank.
"""

import functools
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from hvtrain.config.validate import check_choice, check_whole
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError, RankError
from hvtrain.keras.devices import exchange
from hvtrain.keras.process import CYCLE_TIME
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.base import Timeline, refuse_several_processes
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.strategies.loop import split_batch
from hvtrain.strategies.replica_step import (
    ReplicaStrategy,
    initializing_devices,
    mean_over_replicas,
    plain_variables,
    step_of,
)
from hvtrain.system import host_facts
from hvtrain.system.resources import physical_gpus
from hvtrain.system.text import counted
from hvtrain.watchdog.starting import LOOPBACK, agree_on_address


class MirroredStrategy(ReplicaStrategy):
    """One process loads the joint batch of each step; each replica computes on an equal part of it.

    Args:
        num_replicas: number of replicas, each on its own GPU or, if there are no GPUs, on its own
            logical CPU device; None: one on each GPU, or a single one on the CPU.

    Raises:
        ConfigError: num_replicas is not a whole number of at least 1.
    """

    name = "mirrored"
    unit = "replicas"

    def __init__(self, num_replicas: int | None = None) -> None:
        super().__init__()
        if num_replicas is not None:
            check_whole("strategy.num_replicas", num_replicas, 1)
        self._requested_replicas = num_replicas

    def start(self) -> Topology:
        # Each of several processes would train a separate model, on all GPUs of its host.
        refuse_several_processes(self.name, "multi_worker_mirrored")
        self.replicas = make_mirrored_strategy(self._requested_replicas)
        self.num_replicas = self.replicas.num_replicas_in_sync
        host = self.topology.host
        if tf.config.list_logical_devices("GPU"):
            self.devices = [f"{host} GPU {index}" for index in range(self.num_replicas)]
        else:
            self.devices = [f"{host} CPU"] * self.num_replicas
        self.marks = StepMarks()
        return self.topology

    def scope(self) -> Any:
        self._builds_model = True
        return super().scope()

    def create_variable(self, next_creator: Callable[..., Any], **options: Any) -> Any:
        # Updates of moving statistics are averaged over the replicas. These two options identify
        # them: they are not trained, and Keras requests no aggregation for them. A plain variable
        # may have the same options, but it has no copies, so its aggregation has no effect.
        aggregation = options.get("aggregation")
        is_statistic = not options.get("trainable") and aggregation == tf.VariableAggregation.NONE
        if self._builds_model and is_statistic:
            options["aggregation"] = tf.VariableAggregation.MEAN
        return plain_variables(next_creator, **options)

    def distribute(self, optimizer: Optimizer, check_finite: bool) -> Optimizer:
        self._builds_model = False  # The optimizer's slots are equal on all replicas anyway.
        return super().distribute(optimizer, check_finite)

    def mean(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the mean over the replicas, a float32 scalar. All replicas must call it.

        While the step is traced, each replica's thread pauses at this all-reduce while others run.
        The replicas share the layers, and with them the lists of losses that layers have added. By
        the time this replica resumes, others have changed the lists, so it restores its own before
        Keras sums them.
        """
        own_losses = [(layer, list(layer._losses)) for layer in self._model._flatten_layers()]
        mean = mean_over_replicas(value)
        for layer, losses in own_losses:
            layer._losses[:] = losses
        return mean

    def prepare(self, model: keras.Model) -> None:
        super().prepare(model)
        self._model = model

    def check_plan(self, plan: StepPlan) -> None:
        if not plan.is_full or plan.global_batch % self.num_replicas:
            raise ConfigError(
                f"strategy={self.name} divides the batch of each step equally among "
                f"{counted(self.num_replicas, 'replica')}, but this run has steps of {plan.global_batch} examples or "
                f"fewer; choose data.uneven=trim and a batch size that is a multiple of {self.num_replicas}"
            )

    def train_step(self, model: keras.Model) -> Callable[[Any], Any]:
        train_step = step_of(model)

        @tf.autograph.experimental.do_not_convert
        def step(batch):
            def part_of(context):
                return split_batch(batch, self.num_replicas)[context.replica_id_in_sync_group]

            # A distributed dataset would give each replica its own batch; here they split one.
            parts = self.replicas.experimental_distribute_values_from_function(part_of)
            logs = self.replicas.run(train_step, (parts,))
            # All replicas update the same metrics, so the last one's logs cover all replicas.
            return tf.nest.map_structure(
                lambda output: self.replicas.experimental_local_results(output)[-1], logs
            )

        return step

    def description(self) -> str:
        return f"Mirrored, {counted(self.num_replicas, 'replica')} in one process"


@functools.cache
def make_mirrored_strategy(num_replicas: int | None) -> tf.distribute.MirroredStrategy:
    """Returns TensorFlow's strategy with this many replicas, on GPUs or, without any, on the CPU.

    Cached, since a process may train several times but can configure its devices only once.

    Args:
        num_replicas: number of replicas; None: one on each GPU, or a single one on the CPU.

    Raises:
        ConfigError: there are fewer GPUs than replicas.
        RankError: TensorFlow has initialized its devices already.
    """
    gpus = physical_gpus()
    num_devices = num_replicas or max(1, len(gpus))
    if gpus and num_devices > len(gpus):
        raise ConfigError(
            f"strategy.num_replicas={num_replicas} exceeds the {len(gpus)} visible GPU(s); "
            "lower it, make more visible, or hide all of them (CUDA_VISIBLE_DEVICES=-1) "
            "to train on the CPU"
        )
    with initializing_devices(MirroredStrategy.name):
        if gpus:
            tf.config.set_visible_devices(gpus[:num_devices], "GPU")
            for gpu in gpus[:num_devices]:
                tf.config.experimental.set_memory_growth(gpu, True)
        else:
            # Each replica needs its own device, so the CPU is divided into logical devices.
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
            )
    devices = tf.config.list_logical_devices("GPU" if gpus else "CPU")
    return tf.distribute.MirroredStrategy([device.name for device in devices])


MULTI_WORKER = "multi_worker_mirrored"
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

    So any of Horovod's launchers can start it, and checks, watchdog and checkpoints are those of
    strategy=horovod.

    Args:
        communication: "ring", "nccl", or "auto", which leaves the choice to TensorFlow.
        share_gpus: let several ranks of a host use one GPU (for experiments).
        pin_cores: without GPUs, pin each rank of a host to its own share of the cores.
    """

    name = MULTI_WORKER

    def __init__(
        self, communication: str = "auto", share_gpus: bool = False, pin_cores: bool = True
    ) -> None:
        super().__init__(share_gpus=share_gpus, pin_cores=pin_cores)
        check_choice("strategy.communication", communication, COMMUNICATION)
        self.communication = communication
        self.timeline = Timeline()  # Horovod's would not show the gradients.

    def start(self) -> Topology:
        # In ms. Gradients do not pass through Horovod, so its threads need not poll for messages every 0.1 ms.
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
    """Joins the ranks into a TensorFlow cluster, and returns TensorFlow's strategy for it (every rank).

    Cached, because a process can do this only once, before TensorFlow has initialized a device.

    Raises:
        ConfigError: the environment describes a cluster already.
        RankError: the ranks cannot reach each other, or TensorFlow has already initialized its devices.
    """
    refuse_own_cluster(MULTI_WORKER)
    if size > 1:
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": cluster_addresses(rank, MULTI_WORKER)},
                "task": {"type": "worker", "index": rank},
            }
        )
    options = tf.distribute.experimental.CommunicationOptions(implementation=communication)
    try:
        with initializing_devices(MULTI_WORKER):
            return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    finally:
        # Otherwise a child process would mistake it for a cluster that the user has set up.
        os.environ.pop("TF_CONFIG", None)


def refuse_own_cluster(strategy: str) -> None:
    """Raises ConfigError if the environment describes a cluster already."""
    if "TF_CONFIG" in os.environ:
        raise ConfigError(
            f"TF_CONFIG is set, but strategy={strategy} builds its cluster from the launcher's ranks; unset TF_CONFIG"
        )


def cluster_addresses(rank: int, strategy: str) -> list[str]:
    """Returns each rank's address and a free port, by rank, such as 10.0.0.1:41234 (every rank).

    The ranks exchange them through Horovod, so any launcher will do. Call it before TensorFlow
    initializes a device.

    Raises:
        RankError: the ranks cannot reach rank 0.
    """
    chief_address, listener = agree_on_address(rank, exchange)
    if listener:
        listener.close()  # Only the address was needed, not the port.
    if chief_address is None:
        raise RankError(
            f"strategy={strategy} needs an address of rank 0 that all ranks can reach, but none was found; check the "
            "network between the hosts and their firewalls"
        )
    chief_host, _ = chief_address

    # The address by which this host reaches rank 0 is on the network that all ranks share.
    own_host = LOOPBACK if chief_host == LOOPBACK else host_facts.address_towards(chief_host)
    with socket.create_server((own_host, 0)) as server:
        port = server.getsockname()[1]
        return exchange(f"{own_host}:{port}")
