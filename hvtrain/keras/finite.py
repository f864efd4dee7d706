"""A gradient that is not finite stops all ranks in the same step, before it reaches the weights.

NaN and infinity survive the sum over the ranks, so every rank sees them in what it received and no message is
needed to agree. Only then do the ranks ask each other whose own gradient it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

MARK = "hvtrain: the gradient is not finite"


class FiniteCheck:
    """Lets gradients through when they are finite; else remembers the ranks at fault and fails the step.

    The step fails with tf.errors.InvalidArgumentError, whose text holds MARK, on every rank.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            # Of any length: in an elastic job the number of ranks changes.
            nobody = tf.zeros([hvd.size()], tf.int32)
            self._at_fault = tf.Variable(nobody, trainable=False, name="at_fault", shape=[None])

    @property
    def ranks(self) -> list[int]:
        """Ranks whose own gradient was not finite when the step failed."""
        return [rank for rank, fault in enumerate(self._at_fault.numpy()) if fault]

    def __call__(self, own: Sequence[Any], reduced: Sequence[Any], excused: Any = False) -> list[Any]:
        """`reduced` again, once it is known to be finite. own: this rank's gradients before the reduction.

        excused: a condition, the same on all ranks, under which non-finite gradients are let through.
        """
        fine = tf.logical_or(are_finite(reduced), excused)

        def report() -> tf.Operation:
            fault = tf.cast(tf.logical_not(are_finite(own)), tf.int32)
            faults = hvd.allgather(fault[None], name="hvtrain_at_fault", ignore_name_scope=True)
            with tf.control_dependencies([self._at_fault.assign(faults)]):
                return tf.debugging.Assert(False, [MARK, "by rank:", faults])

        def through() -> tf.Operation:
            return tf.no_op()

        with tf.control_dependencies([tf.cond(fine, through, report)]):
            return [_identity(gradient) for gradient in reduced]


def are_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """True when all values are finite. A sum of each tensor is one pass over it, and what is not finite stays so."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    # Half precision would overflow in the sum alone.
    values = [tf.cast(value, tf.float32) if value.dtype.size < 4 else value for value in values]
    sums = [tf.cast(tf.reduce_sum(value), tf.float32) for value in values]
    return tf.math.is_finite(tf.add_n(sums)) if sums else tf.constant(True)


def _identity(gradient: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)
