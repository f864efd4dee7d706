"""A flag that any rank sets and that all ranks see after the same step, without a message of its own.

A rank that leaves the training loop alone makes the others wait for ever. So it only sets its flag, which travels in
one message with the next gradients, and every rank reads the same result after the same step.
"""

import horovod.tensorflow as hvd
import tensorflow as tf


class SharedFlag:
    """Like threading.Event, over all ranks; every rank holds one."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            self._own = tf.Variable([0.0], trainable=False, name="own_flag")
            self._reduced = tf.Variable([0.0], trainable=False, name="reduced_flag")

    def set(self) -> None:
        """Sets this rank's flag; the other ranks see it after the next reduction."""
        self._own.assign([1.0])

    def is_set(self) -> bool:
        """True if any rank's flag was set at the last reduction; the same on every rank."""
        return bool((self._own if hvd.size() == 1 else self._reduced).numpy()[0] > 0)

    def clear(self) -> None:
        """Clears the flag (every rank, at the same step)."""
        for variable in (self._own, self._reduced):
            variable.assign([0.0])

    def own(self, dtype: tf.DType) -> tf.Tensor:
        """This rank's flag as a tensor [1], to be reduced beside gradients of that dtype. In the graph."""
        return tf.cast(self._own.read_value(), dtype)

    def update(self, reduced: tf.Tensor) -> tf.Tensor:
        """Takes the reduced flag: mean, sum and Adasum are all above 0 if one rank's flag is. In the graph."""
        return self._reduced.assign(tf.cast(reduced, tf.float32))
