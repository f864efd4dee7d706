"""Times the steps of one rank, and reports them as a JSON file that `processes` reads.

The clock runs from the end of the last graph call within the warm-up steps to the end of the last
step. So it includes waiting for data, computing, reduction, callbacks and the ends of epochs.
"""

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import keras

from benchmarks import processes
from hvtrain.system.console import launched_rank


class Stopwatch:
    """Times the steps of one rank. Call `step_ended` after one or more steps and `report` after the last."""

    def __init__(self) -> None:
        self.warmup = int(os.environ[processes.WARMUP])
        self.steps = 0
        self._untimed_steps = 0
        self._first_step_seconds = 0.0
        # time.perf_counter() and time.process_time() at the begin and at the end of the timed
        # steps.
        self._begin = self._begin_cpu = 0.0
        self._end = self._end_cpu = 0.0

    def step_ended(self, steps: int = 1) -> None:
        """Counts steps that have ended on the device."""
        if not self.steps:
            # By the wall clock: another process took the begin.
            self._first_step_seconds = time.time() - float(os.environ[processes.BEGAN])

        self.steps += steps
        self._end = time.perf_counter()
        self._end_cpu = time.process_time()
        # A call that starts within the warm-up and ends after it is timed whole: there may be no
        # other.
        if self.steps <= self.warmup or not self._begin:
            self._begin = self._end
            self._begin_cpu = self._end_cpu
            self._untimed_steps = self.steps

    def report(self, rank: int, loss: float) -> None:
        """Writes this rank's figures. loss: the mean over the last epoch's steps."""
        timed_steps = self.steps - self._untimed_steps

        figures = {
            "rank": rank,
            "step_seconds": (self._end - self._begin) / timed_steps,
            "step_cpu_seconds": (self._end_cpu - self._begin_cpu) / timed_steps,
            "first_step_seconds": self._first_step_seconds,
            # Linux counts it in units of 1024 bytes.
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "loss": loss,
        }
        # Each rank has a file of its own.
        Path(f"{os.environ[processes.REPORT]}.{rank}").write_text(json.dumps(figures))


class Clock(keras.callbacks.Callback):
    """Counts steps over all calls of fit and reports after the last one, on every rank.

    Args:
        num_steps: Steps of the whole training.
        rank: Default: what the launcher says.
    """

    def __init__(self, num_steps: int, rank: int | None = None) -> None:
        super().__init__()
        self._num_steps = num_steps
        self._rank = launched_rank() if rank is None else rank
        self._stopwatch = Stopwatch()
        self._last_batch = -1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Keras calls once for each graph call, which may be several steps.
        self._stopwatch.step_ended(batch - self._last_batch)
        self._last_batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._stopwatch.steps == self._num_steps:
            self._stopwatch.report(self._rank, float((logs or {})["loss"]))
