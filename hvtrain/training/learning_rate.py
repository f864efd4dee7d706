"""A pure schedule as a Keras optimizer's learning rate: computed inside the graph, without a host round trip."""

from __future__ import annotations

from typing import Any

import keras

from hvtrain.core.schedule import Schedule


class LearningRate:
    """The rate of `schedule` at the optimizer's step, times a factor that callbacks may change.

    Keras calls a learning rate that is callable, and sets one with `assign`. So callbacks that set the rate, such
    as ReduceLROnPlateau, work: what they set is the rate of this moment, and the schedule goes on from there.
    A LearningRateSchedule of Keras's own cannot be set.

    Args:
        shift: steps of the optimizer that the schedule does not count: see plan.StepPlan.
    """

    def __init__(self, schedule: Schedule, shift: int = 0) -> None:
        self.schedule = schedule
        self.shift = shift
        self.factor = keras.Variable(1.0, trainable=False, name="learning_rate_factor")
        self._optimizer: Any = None

    def follow(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Reads the step from this optimizer, which must be the one that has this rate."""
        self._optimizer = optimizer

    def __call__(self) -> Any:
        # Keras's schedules count batches, those too that only accumulate; its public counter does not.
        step = keras.ops.cast(self._optimizer._iterations, "float32") if self._optimizer is not None else 0.0
        return self.schedule(step - self.shift, ops=keras.ops) * self.factor

    def assign(self, value: Any) -> None:
        """Makes `value` the rate of this step, by the factor."""
        planned = self() / self.factor
        self.factor.assign(keras.ops.where(planned > 0, value / planned, 1.0))
