"""A Keras callback that times a fit. Given on its command line, it makes the runner a contender."""

from typing import Any

import keras

from hvtrain.plan.process_report import Stopwatch
from hvtrain.system.console import launched_rank


class Clock(keras.callbacks.Callback):
    """Counts steps over all calls of fit and reports after the last of num_steps, on every rank."""

    def __init__(self, num_steps: int, rank: int | None = None) -> None:
        super().__init__()
        self._num_steps = num_steps
        self._rank = launched_rank() if rank is None else rank
        self._stopwatch = Stopwatch()
        self._before = -1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._before = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._stopwatch.step_ended(batch - self._before)
        self._before = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._stopwatch.steps == self._num_steps:
            self._stopwatch.report(self._rank, float((logs or {})["loss"]))
