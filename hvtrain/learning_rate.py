"""A pure schedule as a Keras schedule, so that the rate is computed inside the graph, without a host round trip."""

from __future__ import annotations

from typing import Any

import keras

from hvtrain.schedule import Schedule


class LearningRate(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate of `schedule` at the optimizer's iteration."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def __call__(self, step: Any) -> Any:
        return self.schedule(keras.ops.cast(step, "float32"), ops=keras.ops)

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError(
            "the learning rate of a run depends on its plan and is not saved with a model; "
            "compile the model with a plain rate before saving it"
        )
