"""Counts and times the phases of this process's training steps inside the graph.

The watchdog's thread reads the counts; the record of a run has the times. The graph itself reads the clock, because
Python sees neither the wait for a batch nor the wait for other ranks. loop and the reducer set the marks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class StepTimes(NamedTuple):
    """Total seconds of `steps` steps of this process.

    data: wait for a batch. communication: from this rank's gradients to the reduced ones, including the wait for slower
    ranks. compute: the rest, forward, backward and update.
    """

    steps: float
    data: float
    compute: float
    communication: float

    def __sub__(self, other: "StepTimes") -> "StepTimes":
        return StepTimes(*(mine - its for mine, its in zip(self, other)))

    def each(self) -> "StepTimes":
        """Mean times of one step."""
        return StepTimes(*(total / max(self.steps, 1.0) for total in self))

    @property
    def own_work(self) -> float:
        """Seconds without the wait for other ranks."""
        return self.data + self.compute

    @property
    def whole(self) -> float:
        return self.own_work + self.communication


class StepMarks:
    """Counters and clocks of one process. Call the methods that set marks while a graph is traced.

    timed: must be False if TensorFlow's operations are deterministic, which a clock is not.
    host_only: there is no GPU. Values are then available only after the clock was read, since a single thread might use
    them first otherwise. A GPU would wait for the host in each step, for a few microseconds of truth.
    """

    def __init__(self) -> None:
        self.timed = True
        self.host_only = not tf.config.list_logical_devices("GPU")
        # On the CPU, so that reading them waits for no GPU.
        with tf.init_scope(), tf.device("/CPU:0"):
            self._arrived, self._ready, self._reduced = (
                tf.Variable(0, dtype=tf.int64, trainable=False, name="mark") for _ in range(3)
            )
            # When it began, when its batch arrived, and 1 until it ends.
            self._step = tf.Variable([0.0, 0.0, 0.0], dtype=tf.float64, trainable=False, name="step")
            # Seconds of waiting for data, seconds in all, and the number of steps.
            self._totals = tf.Variable([0.0, 0.0, 0.0], dtype=tf.float64, trainable=False, name="totals")
            self._examples = tf.Variable(0, dtype=tf.int64, trainable=False, name="examples")
            self._waiting = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="seconds")

    def __call__(self) -> tuple[int, int, int, int]:
        """Counts of batches that arrived, of gradients ready to be reduced and reduced, and of steps that ended."""
        arrived, ready, reduced = (int(mark.numpy()) for mark in (self._arrived, self._ready, self._reduced))
        return arrived, ready, reduced, int(self._totals.numpy()[2])

    @property
    def num_examples(self) -> int:
        """Examples in all batches that arrived."""
        return int(self._examples.numpy())

    def times(self) -> StepTimes:
        """Times since this process started."""
        data, whole, steps = map(float, self._totals.numpy())
        communication = float(self._waiting.numpy())
        return StepTimes(steps, data, whole - data - communication, communication)

    def now(self, after: Sequence[Any] = ()) -> tf.Tensor:
        """Reads the clock once these values are computed, or these operations are done."""
        # Grouped on their own device: one signal goes to the CPU, not one for each.
        with tf.control_dependencies([tf.group(*after)] if after else []), tf.device("/CPU:0"):
            return tf.timestamp() if self.timed else tf.zeros([], tf.float64)

    def arrived(self, data: Any, began: tf.Tensor) -> Any:
        """Marks that a step, which began at that time, has its batch; returns the batch to continue with."""
        now = self.now(tf.nest.flatten(data, expand_composites=True))
        with tf.control_dependencies([now]), tf.device("/CPU:0"):
            self._arrived.assign_add(1)
            self._examples.assign_add(tf.shape(tf.nest.flatten(data)[0], tf.int64)[0])
            self._step.assign(tf.stack([began, now, 1.0]))
        return self._after(now, data)

    def ready(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Marks that this rank's gradients are ready to be reduced; returns the time."""
        now = self.now(tf.nest.flatten(list(gradients), expand_composites=True))
        with tf.control_dependencies([now]):
            self._ready.assign_add(1)
        return now

    def reduced(self, gradients: Sequence[Any], ready: tf.Tensor, last: Sequence[Any]) -> list[Any]:
        """Marks that gradients are reduced; returns `last`, to continue with."""
        now = self.now(gradients)
        with tf.control_dependencies([now]), tf.device("/CPU:0"):
            self._waiting.assign_add(now - ready)
            self._reduced.assign_add(1)
        return self._after(now, list(last))

    def ended(self, result: Any) -> tf.Tensor:
        """Marks that the step before, if any, ended with that result, and that the next begins; returns the time."""
        now = self.now(tf.nest.flatten(result))
        with tf.control_dependencies([now]), tf.device("/CPU:0"):
            began, arrived, is_open = tf.unstack(self._step)
            totals = self._totals.assign_add(is_open * tf.stack([arrived - began, now - began, 1.0]))
            closed = self._step.assign([0.0, 0.0, 0.0])
            with tf.control_dependencies([totals, closed]):
                return tf.identity(now)

    def _after(self, now: tf.Tensor, values: Any) -> Any:
        if not self.host_only:
            return values
        with tf.control_dependencies([now]):
            return tf.nest.map_structure(tf.identity, values, expand_composites=True)
