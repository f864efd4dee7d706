"""The train step of a replica under tf.distribute, with the same results as a rank's under Horovod.

Keras's optimizers sum gradients over the replicas of tf.distribute, but only after each replica has
clipped its own gradients and checked them for an overflow. Here gradients are summed when the
optimizer's step begins, and Keras's own sum is turned off. Keras divides losses by the number of
replicas, so the sum of their gradients is the mean gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer
from tensorflow.python.ops.resource_variable_ops import default_variable_creator_v2

from hvtrain.errors import ConfigError, RankError
from hvtrain.keras.gradients import is_overwritten, merge_rows
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.optimizer import DistributedOptimizer
from hvtrain.keras.reduction import Reducer
from hvtrain.keras.same_gradients import compare_structure
from hvtrain.step.joint_loss import (
    joint_loss,
    overridden_steps,
    refuse_joint_batch,
    subclass_under_its_name,
)
from hvtrain.strategies.base import Strategy

# Names of variables that are neither weights nor slots: see plain_variables.
_PLAIN_NAMES = (
    "seed_generator_state",
    "learning_rate_factor",
    "num_reductions",
    "at_fault",
    "gradient_norm",
)


@dataclass(eq=False)
class ReplicaReducer(Reducer):
    """Sums gradients over the replicas, in one all-reduce of tf.distribute. Every replica calls it.

    Args:
        strategy: the started strategy. If there are several processes, each has one replica, and they check
            that they reduce the same gradients.

    Raises:
        ConfigError: when called with gradients that overwrite their variables, as with float8.
    """

    strategy: Any = None

    @property
    def is_alone(self) -> bool:
        return self.strategy.num_computing == 1

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any] | None = None
    ) -> list[Any]:
        self.num_calls += 1
        reduced = list(gradients)
        if self.is_alone:
            return reduced
        variables = list(variables or ())
        if any(map(is_overwritten, variables)):
            raise ConfigError(
                f"strategy={self.strategy.name} sums gradients, but float8 layers need maxima; choose strategy=horovod"
            )
        topology = self.strategy.topology
        if topology.size > 1:
            settings = f"op=Sum, stop_flag={self.flag is not None}"
            compare_structure(self.name, settings, reduced, variables, self.process_set)

        replica = tf.distribute.get_replica_context()
        # Only the first replica of this process counts reductions and sets marks.
        is_own = tf.get_static_value(replica.replica_id_in_sync_group) == topology.rank
        present = [index for index, gradient in enumerate(reduced) if gradient is not None]
        sent = [reduced[index] for index in present]
        ready = self.marks.ready(sent) if self.marks and is_own else None

        # The flag comes first, in the type of the first gradient, so that it needs no message of its
        # own.
        flags = [self.flag.own(sent[0].dtype)] if self.flag else []
        sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, [*flags, *sent])
        done = [self.flag.update(sums.pop(0))] if self.flag else []
        if self.sums_duplicates:
            sums = [merge_rows(total) for total in sums]

        if is_own:
            done += tf.nest.flatten(sums, expand_composites=True)
            # Incremented only once the results have arrived, so that it counts reductions that ran.
            with tf.control_dependencies(done):
                self.count.assign_add(1)
            if self.marks:
                sums[-1:] = self.marks.reduced(done, ready, sums[-1:])
        for index, total in zip(present, sums):
            reduced[index] = total
        return reduced


def mean_over_replicas(value: tf.Tensor) -> tf.Tensor:
    """Returns a scalar's mean over all replicas, in float32; outside replicas, the scalar."""
    value = tf.cast(value, tf.float32)
    if not tf.distribute.has_strategy():
        return value
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, value)


def replica_loss(
    loss: keras.losses.Loss, num_replicas: int, mean: Callable[[tf.Tensor], tf.Tensor]
) -> keras.losses.Loss:
    """Copies a loss so that its gradients, summed over all replicas, are those of the joint batch.

    Keras divides a loss by the number of replicas if it takes the mean, but not with reduction="sum", nor
    if the loss's class returns a single number. The copy divides these too.

    Args:
        loss: any keras.losses.Loss.
        num_replicas: number of replicas in all processes together.
        mean: a function that returns the mean of a float32 scalar over all replicas.
    """
    base = type(loss)

    def call(self, y_true, y_pred):
        # A single number becomes a batch of one, so that Keras takes its mean and divides it.
        losses = tf.convert_to_tensor(base.call(self, y_true, y_pred))
        return losses[None] if losses.shape.rank == 0 else losses

    def __call__(self, y_true, y_pred, sample_weight=None):  # noqa: N807
        value = base.__call__(self, y_true, y_pred, sample_weight)
        if self.reduction == "sum" and tf.distribute.has_strategy():
            return value / num_replicas
        return value

    divided: Any = object.__new__(subclass_under_its_name(base, __call__=__call__, call=call))
    vars(divided).update(vars(loss))
    return joint_loss(divided, mean, lambda: num_replicas)


def plain_variables(next_creator: Callable[..., Any], **options: Any) -> Any:
    """Creates plain variables where replicas need no copies of their own.

    It is a creator for tf.variable_creator_scope. All replicas of this process change the same
    plain variable in turn. These variables are plain:
    - the state of metrics: tf.distribute would sum its copies when they are read, which over
      several processes is a collective, and hangs if only one of them reads;
    - the seeds of dropout, whose copies would drop the same units on all replicas;
    - counters and flags, which are neither weights nor slots.
    """
    name = str(options.get("name"))
    if options.get("synchronization") == tf.VariableSynchronization.ON_READ or name in _PLAIN_NAMES:
        return default_variable_creator_v2(None, **options)
    return next_creator(**options)


class ReplicaStrategy(Strategy):
    """Mixin that trains one or several replicas of tf.distribute in this process.

    Subclasses define `start`, which sets `replicas`.
    """

    # TensorFlow's strategy.
    replicas: tf.distribute.Strategy
    # The collectives of tf.distribute keep the shapes of the first step.
    takes_varying_shapes = False
    # Restarting Horovod would change nothing, since it reduces no gradients here.
    can_restart = False
    create_variable = staticmethod(plain_variables)
    mean = staticmethod(mean_over_replicas)

    @contextmanager
    def scope(self) -> Iterator[None]:
        with self.replicas.scope(), tf.variable_creator_scope(self.create_variable):
            yield

    def distribute(self, optimizer: Optimizer, check_finite: bool) -> Optimizer:
        """Makes the optimizer, in place, step on the replicas' summed gradients.

        It may be a LossScaleOptimizer, or combine several optimizers. Raises ConfigError if it accumulates
        gradients.
        """
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        # Keras accumulates in a branch of the graph, where tf.distribute cannot update weights.
        self.exclude({"train.accumulate": inner.gradient_accumulation_steps})
        distributed = DistributedOptimizer(optimizer, check_finite=check_finite)
        hook: Any = hook_of(distributed)
        hook.reducer = ReplicaReducer(strategy=self, marks=self.marks)

        # Keras would sum the summed gradients again, in the optimizer itself or in those that a
        # MultiOptimizer combines.
        for part in (inner, *getattr(inner, "optimizers", ())):
            part._all_reduce_sum_gradients = list
        return distributed

    def distribute_loss(self, loss: keras.losses.Loss) -> keras.losses.Loss:
        refuse_joint_batch(loss, self.name)
        return replica_loss(loss, self.num_computing, self.mean)

    def prepare(self, model: keras.Model) -> None:
        """Checks the model's step, and lets Keras evaluate and predict in this process alone.

        Raises ConfigError if the model overrides train_step or compute_loss, or if XLA should compile it.
        """
        overridden = overridden_steps(type(model))
        if overridden:
            raise ConfigError(
                f"strategy={self.name} needs Keras's own train_step and compute_loss, which divide "
                f"the loss by the number of replicas, but {type(model).__name__} has its own "
                f"{' and '.join(overridden)}; choose strategy=horovod"
            )
        self.exclude({"train.jit_compile": model.jit_compile})
        # Keras took the strategy from the scope, and would run evaluate and predict in all replicas.
        model._distribute_strategy = None


def step_of(model: keras.Model) -> Callable[[Any], Any]:
    """Returns the model's train step as a function that tf.distribute can run in each replica."""

    @tf.autograph.experimental.do_not_convert
    def step(batch):
        # Keras creates the state of most metrics with the first batch.
        with tf.variable_creator_scope(plain_variables):
            return model.train_step(batch)

    return step


@contextmanager
def initializing_devices(strategy: str) -> Iterator[None]:
    """Turns TensorFlow's error for devices that are already initialized into a RankError."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"strategy={strategy} must start before TensorFlow has initialized its devices "
            f"({error}); import no module that creates a tensor or a model"
        ) from error
