"""Makes a pure schedule the learning rate of a Keras optimizer, computed in the graph without a host round trip."""

from typing import Any

import keras

from hvtrain.core.schedule import Schedule


class LearningRate:
    """The rate of `schedule` at the optimizer's step, times a factor that callbacks may change.

    Keras calls a callable learning rate, and sets one with `assign`. So callbacks that set the rate, such as
    ReduceLROnPlateau, work: they set the rate of this step, and the schedule scales with it from then on. Keras's
    own LearningRateSchedule cannot be set.

    Args:
        schedule: the rate by step.
        shift: optimizer steps that the schedule does not count; see StepPlan.
    """

    def __init__(self, schedule: Schedule, shift: int = 0) -> None:
        self.schedule = schedule
        self.shift = shift
        self.factor = keras.Variable(1.0, trainable=False, name="learning_rate_factor")
        self._optimizer: Any = None

    def follow(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Takes the step from this optimizer, whose learning rate this is."""
        self._optimizer = optimizer

    def __call__(self) -> Any:
        # As in Keras's schedules, batches that only accumulate count too; the public counter leaves them out.
        step = keras.ops.cast(self._optimizer._iterations, "float32") if self._optimizer is not None else 0.0
        return self.schedule(step - self.shift, ops=keras.ops) * self.factor

    def assign(self, value: Any) -> None:
        """Sets the factor so that the rate of this step is `value`."""
        scheduled = self() / self.factor
        self.factor.assign(keras.ops.where(scheduled > 0, value / scheduled, 1.0))
