"""How far this process's training steps came and what they spent their time on, marked inside the graph.

A thread that watches from outside reads the counts; the record of a run has the times. The clock is read by the
graph itself: Python sees neither the wait for a batch nor the one for the other ranks. loop and the reducer mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class StepTimes:
    """Seconds in all of `steps` steps of this process, or what they are a step.

    data: waiting for a batch. communication: from own gradients to those of all ranks, so waiting for slower ranks
    is in it. compute: all else, forward, backward and update.
    """

    steps: float
    data: float
    compute: float
    communication: float

    def __sub__(self, other: StepTimes) -> StepTimes:
        return StepTimes(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))

    def each(self) -> StepTimes:
        """Of one step."""
        number = max(self.steps, 1.0)
        return StepTimes(1.0, self.data / number, self.compute / number, self.communication / number)

    @property
    def own_work(self) -> float:
        """What would be left if the others answered at once."""
        return self.data + self.compute

    @property
    def whole(self) -> float:
        return self.own_work + self.communication


class StepMarks:
    """Of one process. The methods that mark are called while a graph is traced.

    timed: may be set to False, as it must be where TensorFlow's operations are deterministic, for a clock is not.
    """

    def __init__(self) -> None:
        self.timed = True
        # On the CPU, so that reading them waits for no GPU.
        with tf.init_scope(), tf.device("/CPU:0"):
            self._arrived, self._ready, self._reduced, self._ended = (
                tf.Variable(0, dtype=tf.int64, trainable=False, name="mark") for _ in range(4)
            )
            self._data_and_step = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False, name="seconds")
            self._waiting = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="seconds")

    def __call__(self) -> tuple[int, int, int, int]:
        """Batches that arrived in a step; gradients that were ready to be reduced; that were reduced; steps ended."""
        marks = (self._arrived, self._ready, self._reduced, self._ended)
        return tuple(int(mark.numpy()) for mark in marks)  # type: ignore[return-value]

    def times(self) -> StepTimes:
        """Since this process began."""
        data, whole = self._data_and_step.numpy()
        communication = float(self._waiting.numpy())
        return StepTimes(int(self._ended.numpy()), float(data), float(whole - data) - communication, communication)

    def now(self, after: Sequence[Any] = ()) -> tf.Tensor:
        """The clock, once those values are there, or operations have ended."""
        # Grouped where they are: one signal goes to the CPU, not one for each of them.
        with tf.control_dependencies([tf.group(*after)] if after else []), tf.device("/CPU:0"):
            return tf.timestamp() if self.timed else tf.zeros([], tf.float64)

    def arrived(self, data: Any) -> tuple[Any, tf.Tensor]:
        """A step has its batch: the batch to go on with, and when."""
        now = self.now(tf.nest.flatten(data, expand_composites=True))
        with tf.control_dependencies([now]):
            self._arrived.assign_add(1)
        return _after(now, data), now

    def ready(self, gradients: Sequence[Any]) -> tf.Tensor:
        """This rank's gradients wait for the other ranks' from now on."""
        now = self.now(tf.nest.flatten(list(gradients), expand_composites=True))
        with tf.control_dependencies([now]):
            self._ready.assign_add(1)
        return now

    def reduced(self, gradients: Sequence[Any], ready: tf.Tensor, last: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks are here. Returns those of them that came last, to go on with."""
        now = self.now(gradients)
        with tf.control_dependencies([now]), tf.device("/CPU:0"):
            self._waiting.assign_add(now - ready)
            self._reduced.assign_add(1)
        return _after(now, list(last))

    def ended(self, step: tf.Operation, began: tf.Tensor, arrived: tf.Tensor) -> None:
        """A step has done all that it does."""
        now = self.now([step])
        with tf.control_dependencies([now]), tf.device("/CPU:0"):
            self._data_and_step.assign_add(tf.stack([arrived - began, now - began]))
            self._ended.assign_add(1)


def _after(now: tf.Tensor, values: Any) -> Any:
    """The same values, for what must not begin before the clock was read: a single thread may do it first otherwise."""
    with tf.control_dependencies([now]):
        return tf.nest.map_structure(tf.identity, values, expand_composites=True)
