"""What a contender reports of its run: one JSON file, read by `python -m hvtrain.bench`. Pure.

The clock begins at the end of the last call of the graph that stays within the warm-up steps, and ends at the end of
the last step: waiting for data, work, reduction, callbacks and what comes at the end of an epoch are all inside.
"""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

# Where a contender reports, when its command was started (seconds since the epoch), steps before the clock begins, and
# which job this is where several run at once that know nothing of each other ("1 of 2"; they count from 0).
FILE, BEGAN, WARMUP = "HVTRAIN_BENCH_FILE", "HVTRAIN_BENCH_BEGAN", "HVTRAIN_BENCH_WARMUP"
JOB = "HVTRAIN_BENCH_JOB"


class Stopwatch:
    """Call `step_ended` after a step or some, `report` after the last one. Each rank has one; every one reports."""

    def __init__(self) -> None:
        self.warmup = int(os.environ[WARMUP])
        self.steps = self._steps_before = 0
        self._first = self._begin = self._end = 0.0

    def step_ended(self, steps: int = 1) -> None:
        """Counts a step, or some, that really ended on the device."""
        if not self.steps:
            self._first = time.time() - float(os.environ[BEGAN])
        self.steps += steps
        self._end = time.perf_counter()
        # A call of some steps that runs past the warm-up is timed whole: it may be the last one.
        if self.steps <= self.warmup or not self._begin:
            self._begin, self._steps_before = self._end, self.steps

    def report(self, rank: int, loss: float) -> None:
        """Writes what this rank saw. loss: the mean over the last epoch's steps."""
        found = {
            "rank": rank,
            "step_seconds": (self._end - self._begin) / (self.steps - self._steps_before),
            "first_step_seconds": self._first,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "loss": loss,
        }
        Path(f"{os.environ[FILE]}.{rank}").write_text(json.dumps(found))
