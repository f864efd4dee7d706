"""Images a second over all ranks, warm-up left out."""

from __future__ import annotations

import time
from typing import Any

import keras

from hvtrain.training.callbacks.position import Position

# The first steps trace and compile, fill the data pipeline and wake the other ranks.
WARMUP_STEPS = 10


class Throughput(keras.callbacks.Callback):
    """Times the steps and puts images/s into the logs (every rank; the steps are the same on all of them).

    Steps are timed from Keras's batch begin to its batch end: waiting for data, compute and reduction, but
    not validation, checkpoints and other callbacks.
    """

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position
        self._examples_per_step = position.plan.examples_per_epoch / position.plan.steps_per_epoch
        remaining = position.plan.num_steps - position.start_step
        self._first = position.start_step + min(WARMUP_STEPS, remaining // 2)
        self._seconds = 0.0
        self._steps = 0
        self._begin = self._epoch_begin = self._epoch_step_seconds = 0.0
        self._epoch_steps = 0
        self._last_step = position.start_step
        self.epoch_seconds = 0.0

    @property
    def is_warm(self) -> bool:
        """True when the next steps count."""
        return self.position.step >= self._first

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step after the warm-up."""
        return self._seconds / self._steps if self._steps else None

    @property
    def images_per_second(self) -> float | None:
        return self._examples_per_step * self._steps / self._seconds if self._steps else None

    @property
    def epoch_images_per_second(self) -> float:
        """Images a second over the steps of the epoch so far, warm-up included."""
        return self._examples_per_step * self._epoch_steps / max(self._epoch_step_seconds, 1e-9)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_begin = time.perf_counter()
        self._epoch_step_seconds = 0.0
        self._epoch_steps = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        seconds = time.perf_counter() - self._begin
        steps, self._last_step = self.position.step - self._last_step, self.position.step
        self._epoch_step_seconds += seconds
        self._epoch_steps += steps
        if self.position.step > self._first:
            self._seconds += seconds
            self._steps += steps
        if logs is not None:
            logs["images/s"] = self.epoch_images_per_second

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.epoch_seconds = time.perf_counter() - self._epoch_begin
        if logs is not None:
            logs["images/s"] = self.epoch_images_per_second
