"""Progress of a run: steps and epochs done. Position is the first callback; the others read it."""

from typing import Any

import keras

from hvtrain.core.step_plan import StepPlan
from hvtrain.keras.equality import WeightCheck
from hvtrain.training.run import Run


class Position(keras.callbacks.Callback):
    """Counts the run's optimizer steps, from the step of a resume on (every rank)."""

    def __init__(self, plan: StepPlan, start_step: int) -> None:
        super().__init__()
        self.plan = plan
        self.start_step = self.step = start_step
        self.epoch = plan.position(start_step)[0]

    @property
    def in_epoch(self) -> bool:
        """True within an epoch; False after a step that ends an epoch or the run."""
        return self.plan.position(self.step)[1] > 0 and not self.is_last

    @property
    def is_last(self) -> bool:
        """True after the last step of the plan."""
        return self.step >= self.plan.num_steps

    def is_multiple_of(self, steps: int | None) -> bool:
        """True if the steps done are a multiple of `steps`; False for 0 and None."""
        return bool(steps) and self.step % (steps or 1) == 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # A call of the graph may have done several steps.
        self.step = self.plan.shift + self.epoch * self.plan.steps_per_epoch + batch + 1


class RunCallback(keras.callbacks.Callback):
    """A callback with access to its run, the run's position and the check of its weights."""

    def __init__(self, run: Run, position: Position, weights: WeightCheck) -> None:
        super().__init__()
        self.run = run
        self.comm = run.strategy.comm
        self.position = position
        self.weights = weights
