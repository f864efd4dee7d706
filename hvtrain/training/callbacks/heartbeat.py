"""Tells the watch where this rank's main thread is: in a step, in callbacks, in validation."""

from __future__ import annotations

from typing import Any

import keras

from hvtrain.strategies.base import Strategy
from hvtrain.training.callbacks.position import Position


class StepBegins(keras.callbacks.Callback):
    """The last callback: what comes after it is the step (every rank)."""

    def __init__(self, strategy: Strategy, position: Position) -> None:
        super().__init__()
        self.strategy = strategy
        self.position = position

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.strategy.watchdog.progress.begin_step(self.position.step)


class StepEnds(keras.callbacks.Callback):
    """After Position and before all others: what comes after it is callbacks (every rank)."""

    def __init__(self, strategy: Strategy, position: Position) -> None:
        super().__init__()
        self.strategy = strategy
        self.position = position

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.strategy.watchdog.progress.end_step(self.position.step)
