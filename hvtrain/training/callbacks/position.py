"""Where the run stands: steps and epochs done. The first callback; the others read it."""

from __future__ import annotations

from typing import Any

import keras

from hvtrain.core.step_plan import StepPlan


class Position(keras.callbacks.Callback):
    """Counts the run's optimizer steps, from the step of a resume on (every rank)."""

    def __init__(self, plan: StepPlan, start_step: int) -> None:
        super().__init__()
        self.plan = plan
        self.start_step = start_step
        self.step = start_step
        self.epoch = plan.position(start_step)[0]

    @property
    def in_epoch(self) -> bool:
        """True when an epoch was begun and is not ended."""
        return self.plan.position(self.step)[1] > 0 and self.step < self.plan.num_steps

    @property
    def ends_epoch(self) -> bool:
        """True after a step that ends an epoch or the run."""
        return not self.in_epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Several steps may have been done since the last time.
        self.step = self.plan.shift + self.epoch * self.plan.steps_per_epoch + batch + 1
