"""Validation during training, on all ranks together."""

import logging
from typing import Any

import tensorflow as tf

from hvtrain.strategies.parts import WeightCheck
from hvtrain.training.callbacks.position import Position, RunCallback
from hvtrain.training.run import Run

log = logging.getLogger(__name__)


class Validation(RunCallback):
    """Evaluates every N epochs, every N steps, or both, and adds val_* to the epoch's logs (every rank).

    latest holds the newest results, for callbacks that act within an epoch.
    """

    def __init__(self, run: Run, position: Position, weights: WeightCheck, dataset: tf.data.Dataset) -> None:
        super().__init__(run, position)
        self.config = run.config.train
        self.weights = weights
        self.dataset = dataset
        self.latest: dict[str, float] = {}
        self.latest_step = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.position.is_multiple_of(self.config.validate_every_steps):
            self._validate()
            results = ", ".join(f"{name} {value:.4f}" for name, value in self.latest.items())
            log.info("step %s: %s", f"{self.position.step:,}", results)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.position.in_epoch:
            return  # Stopped within the epoch.
        every = self.config.validate_every_epochs
        is_due = every and ((epoch + 1) % every == 0 or self.position.is_last)
        if is_due and self.latest_step != self.position.step:
            self._validate()
        if logs is not None:
            logs.update(self.latest)

    def _validate(self) -> None:
        self.weights.average_untrained()  # Otherwise each rank would validate a different model.
        results = self.run.strategy.evaluate(self.model, self.dataset)
        self.latest = {f"val_{name}": value for name, value in results.items()}
        self.latest_step = self.position.step
