"""Validation during training, on all ranks together."""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from hvtrain.strategies.base import Strategy
from hvtrain.strategies.parts import WeightCheck
from hvtrain.training.callbacks.position import Position

log = logging.getLogger(__name__)


class Validation(keras.callbacks.Callback):
    """Evaluates after every N epochs, every N steps, or both, and adds val_* to the epoch's logs (every rank).

    latest holds the newest results, for callbacks that act between the ends of epochs.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        strategy: Strategy,
        position: Position,
        every_epochs: int | None,
        every_steps: int | None,
        weights: WeightCheck,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.strategy = strategy
        self.position = position
        self.every_epochs = every_epochs
        self.every_steps = every_steps
        self.weights = weights
        self.latest: dict[str, float] = {}
        self.latest_step = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.every_steps and self.position.step % self.every_steps == 0:
            self._validate()
            shown = ", ".join(f"{name} {value:.4f}" for name, value in self.latest.items())
            log.info("step %s: %s", f"{self.position.step:,}", shown)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.position.in_epoch:
            return  # Stopped in the middle.
        last = self.position.step == self.position.plan.num_steps
        due = self.every_epochs and ((epoch + 1) % self.every_epochs == 0 or last)
        if due and self.latest_step != self.position.step:
            self._validate()
        if logs is not None:
            logs.update(self.latest)

    def _validate(self) -> None:
        self.weights.average_untrained()  # Or each rank would validate another model.
        results = self.strategy.evaluate(self.model, self.dataset)
        self.latest = {f"val_{name}": value for name, value in results.items()}
        self.latest_step = self.position.step
