"""Makes optimizers update the rows of sharded tables, and clip by the norms of whole tables."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from keras.src.optimizers.base_optimizer import global_norm

from hvtrain.keras.gradients import map_values
from hvtrain.keras.optimizers import RowwiseAdagrad, row_slots
from hvtrain.keras.sharded_optimizer import ELEMENTWISE
from hvtrain.keras.table_rows import rows_of
from hvtrain.step.joint_loss import subclass_under_its_name


def prepare_tables(optimizer: Any, variables: Sequence[Any]) -> None:
    """Prepares a built optimizer for the sharded tables among its variables, if there are any.

    Raises:
        ValueError: the optimizer does not update each row independently, shards its slots, averages
            weights, or has a process set.
    """
    tables = [variable for variable in variables if rows_of(variable)]
    if not tables:
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    hook = optimizer._hvtrain
    problem = ""
    if not isinstance(inner, (*ELEMENTWISE, RowwiseAdagrad)):
        problem = (
            f"{type(inner).__name__} needs whole weights; "
            "choose SGD, Adam, hvd.optimizers.LazyAdam or RowwiseAdagrad"
        )
    if hook.reducer.gathers_weights:
        problem = "shard=True would shard it again; leave shard out"
    if hook.averages_weights:
        problem = "LocalSGD and DiLoCo average weights, but each rank has different rows; use DistributedOptimizer"
    if hook.reducer.process_set.process_set_id:
        problem = "the table spans all ranks, but the optimizer only some; leave process_set out"
    if problem:
        raise ValueError(f"table {rows_of(tables[0]).table} is sharded over the ranks: {problem}")  # type: ignore[union-attr]

    for table in tables:
        for slot in row_slots(inner, table):
            slot.rank_part = table.rank_part


class VariableRecorder:
    """Mixin before an optimizer's class: keeps the variables whose gradients it is about to clip."""

    _hvtrain_stepped: Sequence[Any] = ()

    # Recorded here, since overriding _backend_apply_gradients would count as overriding Keras's step: see
    # overridden_steps.
    def _overwrite_variables_directly_with_gradients(self, grads, vars):
        stepped = super()._overwrite_variables_directly_with_gradients(grads, vars)  # type: ignore[misc]
        # Bypasses Keras's __setattr__, as make_distributed does.
        object.__setattr__(self, "_hvtrain_stepped", list(stepped[1]))
        return stepped


class TableClipping(VariableRecorder):
    """Mixin before the class of an optimizer that clips by norm: a table's norm includes all ranks' rows."""

    clipnorm: float | None
    global_clipnorm: float | None

    def _clip_gradients(self, grads):
        clip = super()._clip_gradients  # type: ignore[misc]
        tables = [i for i, variable in enumerate(self._hvtrain_stepped) if rows_of(variable)]
        if not tables:
            return clip(grads)

        own = [tf.reduce_sum(tf.square(getattr(grads[i], "values", grads[i]))) for i in tables]
        squares = hvd.allreduce(
            tf.stack(own), op=hvd.Sum, name="hvtrain_table_norms", ignore_name_scope=True
        )
        rest = [i for i in range(len(grads)) if i not in tables]
        others = [grads[i] for i in rest]
        if self.global_clipnorm:
            norm = tf.sqrt(
                tf.reduce_sum(squares) + tf.square(global_norm(others) if others else 0.0)
            )
            # As in Keras: (norm - norm) is 0, or NaN if the norm is not finite.
            scale = self.global_clipnorm / tf.maximum(norm, self.global_clipnorm) + (norm - norm)
            return [map_values(partial(tf.multiply, scale), gradient) for gradient in grads]

        clipped = list(grads)
        scales = self.clipnorm / tf.maximum(tf.sqrt(squares), self.clipnorm)
        for i, scale in zip(tables, tf.unstack(scales)):
            clipped[i] = map_values(partial(tf.multiply, scale), grads[i])
        for i, gradient in zip(rest, clip(others)):
            clipped[i] = gradient
        return clipped


def clip_tables(optimizer: Any) -> None:
    """Makes an optimizer that clips by norm, in place, use the norms of whole sharded tables."""
    clips = optimizer.clipnorm or optimizer.global_clipnorm
    if clips and not isinstance(optimizer, TableClipping):
        optimizer.__class__ = subclass_under_its_name(type(optimizer), TableClipping)
