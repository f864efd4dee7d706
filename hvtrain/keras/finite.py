"""Stops all ranks in the same step when a gradient is not finite, before it reaches the weights.

NaN and infinity survive the sum over the ranks, so every rank sees them in the result and no message is needed to
agree. Only then do the ranks exchange whose own gradient it was.
"""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

NOT_FINITE = "hvtrain: the gradient is not finite"


class FiniteCheck:
    """Passes finite gradients on; otherwise remembers the ranks at fault and fails the step.

    The step fails on every rank with tf.errors.InvalidArgumentError, whose message holds NOT_FINITE.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            # Shape [None]: the number of ranks changes in an elastic job.
            nobody = tf.zeros([hvd.size()], tf.int32)
            self._at_fault = tf.Variable(nobody, trainable=False, name="at_fault", shape=[None])

    @property
    def ranks(self) -> list[int]:
        """Ranks whose own gradient was not finite when the step failed."""
        return [rank for rank, fault in enumerate(self._at_fault.numpy()) if fault]

    def __call__(self, own: Sequence[Any], reduced: Sequence[Any], excused: Any = False) -> list[Any]:
        """The gradients in `reduced`, once they are known to be finite.

        Args:
            own: this rank's gradients before the reduction.
            reduced: gradients after it.
            excused: a condition, the same on all ranks, under which non-finite gradients pass.
        """

        def fail() -> tf.Operation:
            fault = tf.cast(tf.logical_not(are_finite(own)), tf.int32)
            faults = hvd.allgather(fault[None], name="hvtrain_at_fault", ignore_name_scope=True)
            with tf.control_dependencies([self._at_fault.assign(faults)]):
                return tf.debugging.Assert(False, [NOT_FINITE, "by rank:", faults])

        passed = tf.cond(tf.logical_or(are_finite(reduced), excused), tf.no_op, fail)
        with tf.control_dependencies([passed]):
            return [None if gradient is None else map_values(tf.identity, gradient) for gradient in reduced]


def are_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """True if all values are finite. One pass: a tensor's sum is not finite if one of its values is not."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    # Half precision would overflow in the sum.
    values = [tf.cast(value, tf.float32) if value.dtype.size < 4 else value for value in values]
    sums = [tf.cast(tf.reduce_sum(value), tf.float32) for value in values]
    return tf.math.is_finite(tf.add_n(sums)) if sums else tf.constant(True)


def map_values(function: Any, gradient: Any) -> Any:
    """Applies a function to a dense gradient, or to the values of IndexedSlices."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)
