"""Ends a training in time, so that it can go on later."""

from __future__ import annotations

import time
from typing import Any

import keras

from hvtrain.config import seconds


class MaxTime(keras.callbacks.Callback):
    """Wishes to stop when the time is over, by the chief's clock (chief only; the ranks then stop together).

    began: time.monotonic() at the beginning of the run.
    """

    def __init__(self, max_time: str | None, began: float, is_chief: bool) -> None:
        super().__init__()
        self.reached = False
        self._deadline = began + seconds(max_time) if max_time and is_chief else float("inf")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if time.monotonic() >= self._deadline:
            self.reached = True
            self.model.stop_training = True
