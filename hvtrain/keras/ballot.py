"""Decisions that all ranks must take at the same step, voted on without a message of their own.

A rank that leaves the training loop alone makes the others wait for ever. So a rank only wishes to stop; its
wish travels in one message with the next gradients, and every rank reads the same result after the same step.
"""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf


class Ballot:
    """Yes-or-no questions, numbered from 0; a yes of any rank is everyone's (every rank holds one ballot)."""

    def __init__(self, num_questions: int) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            self._wishes = tf.Variable(tf.zeros([num_questions]), trainable=False, name="wishes")
            self._agreed = tf.Variable(tf.zeros([num_questions]), trainable=False, name="agreed")

    def wish(self, question: int) -> None:
        """Says yes for this rank, from the next reduction on."""
        wishes = self._wishes.numpy()
        wishes[question] = 1.0
        self._wishes.assign(wishes)

    def agreed(self) -> list[bool]:
        """What the last reduction brought, the same on every rank; with one rank, its wishes."""
        return [bool(value) for value in (self._wishes if hvd.size() == 1 else self._agreed).numpy() > 0]

    def clear(self) -> None:
        """Forgets all wishes and results (every rank, at the same step)."""
        for variable in (self._wishes, self._agreed):
            variable.assign(np.zeros(variable.shape, np.float32))

    def wishes(self, dtype: tf.DType) -> tf.Tensor:
        """This rank's wishes, to be reduced beside gradients of that type. In the graph."""
        return tf.cast(self._wishes.read_value(), dtype)

    def count(self, reduced: tf.Tensor) -> tf.Tensor:
        """Takes the reduced wishes: mean, sum or Adasum, each is above 0 where one was. In the graph."""
        return self._agreed.assign(tf.cast(reduced, tf.float32))
