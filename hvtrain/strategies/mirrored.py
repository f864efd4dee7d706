"""TensorFlow's MirroredStrategy: one process, with a replica on each GPU of this host."""

import functools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError, RankError
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.base import Strategy, refuse_several
from hvtrain.strategies.replica_step import (
    ReplicaReducer,
    mean_over_replicas,
    plain,
    prepare_model,
    reduce_first,
    replica_loss,
    step_of,
)

NAME = "mirrored"
_Aggregation = tf.VariableAggregation


class MirroredStrategy(Strategy):
    """One process takes the plan's joint batch, and each replica computes on an equal part of it.

    Args:
        num_replicas: how many, each on a GPU of its own; None: one per GPU. Without GPUs: on the CPU; None: one.
    """

    def __init__(self, num_replicas: int | None = None) -> None:
        super().__init__()
        if num_replicas is not None and (type(num_replicas) is not int or num_replicas < 1):
            raise ConfigError(f"strategy.num_replicas={num_replicas} is not a whole number of 1 or more, nor null")
        self._wanted = num_replicas

    def start(self) -> Topology:
        refuse_several(NAME, "multi_worker_mirrored")
        self.replicas = mirrored_over(self._wanted)
        self.num_replicas = self.replicas.num_replicas_in_sync
        kind = "GPU {}" if tf.config.list_logical_devices("GPU") else "CPU"
        self.devices = [f"{socket.gethostname()} {kind.format(at)}" for at in range(self.num_replicas)]
        self.marks = StepMarks()
        return self.topology

    @contextmanager
    def scope(self) -> Iterator[None]:
        self._builds_model = True
        with self.replicas.scope(), tf.variable_creator_scope(self._averaged), tf.variable_creator_scope(plain):
            yield

    def _averaged(self, next_creator: Callable[..., Any], **options: Any) -> Any:
        """Creates the model's moving statistics so that each step sets them to their mean over the replicas."""
        if self._builds_model and not options.get("trainable") and options.get("aggregation") == _Aggregation.NONE:
            options["aggregation"] = _Aggregation.MEAN
        return next_creator(**options)

    def distribute(
        self, optimizer: keras.optimizers.Optimizer, check_finite: bool = False, divide_losses: bool = False
    ) -> keras.optimizers.Optimizer:
        self._builds_model = False  # The optimizer's slots are equal on all replicas anyway.
        reducer = ReplicaReducer(strategy=NAME, num_replicas=self.num_replicas, marks=self.marks)
        return reduce_first(optimizer, reducer, check_finite)

    def distribute_loss(self, loss: keras.losses.Loss) -> keras.losses.Loss:
        return replica_loss(loss, self.num_replicas, self._mean)

    def _mean(self, number: tf.Tensor) -> tf.Tensor:
        """The mean over the replicas. While the step is traced, their threads take turns here.

        The threads share the layers, which keep the losses that they add. So each replica puts its own losses back
        before Keras adds them up.
        """
        kept = [(layer, list(layer._losses)) for layer in self._model._flatten_layers()]
        mean = mean_over_replicas(number)
        for layer, losses in kept:
            layer._losses[:] = losses
        return mean

    def prepare(self, model: keras.Model) -> None:
        prepare_model(model, NAME)
        self._model = model

    def train_step(self, model: keras.Model) -> Callable[[Any], Any]:
        train_step = step_of(model)

        def part(batch: Any, replica: int) -> Any:
            return tf.nest.map_structure(lambda one: tf.split(one, self.num_replicas)[replica], batch)

        @tf.autograph.experimental.do_not_convert
        def step(batch: Any) -> Any:
            parts = self.replicas.experimental_distribute_values_from_function(
                lambda context: part(batch, context.replica_id_in_sync_group)
            )
            logs = self.replicas.run(train_step, (parts,))
            # All replicas add to the same metrics, and the last one sees them all.
            return tf.nest.map_structure(lambda one: self.replicas.experimental_local_results(one)[-1], logs)

        return step

    def fit(self, model: keras.Model, batches_from: Any, plan: StepPlan, *args: Any) -> None:
        number = self.num_replicas
        if not plan.is_full or plan.global_batch % number:
            raise ConfigError(
                f"strategy={NAME} splits the batch of each step into {number} equal parts, and steps of this run have "
                f"{plan.global_batch} examples or fewer; choose data.uneven=trim and a batch size that {number} divides"
            )
        super().fit(model, batches_from, plan, *args)

    def expect_restart(self) -> None:
        raise ConfigError(
            f"comm.tune=true tunes Horovod's reductions, which strategy={NAME} does not use; leave it out"
        )

    def description(self) -> str:
        return f"Mirrored, {self.num_replicas} replica{'s' * (self.num_replicas > 1)} in one process"


@functools.cache
def mirrored_over(number: int | None) -> tf.distribute.MirroredStrategy:
    """TensorFlow's strategy with this many replicas, on GPUs or else on the CPU; None: on all GPUs, or one on the CPU.

    Raises ConfigError if there are fewer GPUs, and RankError if TensorFlow has initialized its devices already.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and (number or 0) > len(gpus):
        raise ConfigError(
            f"strategy.num_replicas={number} exceeds the {len(gpus)} visible GPU(s); lower it, make more visible, or "
            "hide all of them (CUDA_VISIBLE_DEVICES=-1) to train on the CPU"
        )
    number = number or max(1, len(gpus))
    try:
        if gpus:
            tf.config.set_visible_devices(gpus[:number], "GPU")
            for gpu in gpus[:number]:
                tf.config.experimental.set_memory_growth(gpu, True)
        else:
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
    except RuntimeError as error:
        raise RankError(
            f"strategy={NAME} must start before TensorFlow has initialized its devices ({error})"
        ) from error
    devices = tf.config.list_logical_devices("GPU" if gpus else "CPU")
    return tf.distribute.MirroredStrategy([device.name for device in devices])
