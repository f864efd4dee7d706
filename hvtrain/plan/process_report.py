"""A contender's report on its run: one JSON file for each rank, read by `python -m benchmarks`. Pure.

The clock runs from the end of the last graph call within the warm-up steps to the end of the last step. So it includes
waiting for data, computing, reduction, callbacks and the ends of epochs.
"""

import json
import os
import resource
import time
from pathlib import Path

# Variables: the report's path, when the command started (seconds since the epoch), the number of warm-up steps, and for
# independent jobs which one this is ("1 of 2", counted from 0).
FILE, BEGAN, WARMUP = "HVTRAIN_BENCH_FILE", "HVTRAIN_BENCH_BEGAN", "HVTRAIN_BENCH_WARMUP"
JOB = "HVTRAIN_BENCH_JOB"


class Stopwatch:
    """Times the steps of one rank. Call `step_ended` after one or more steps and `report` after the last."""

    def __init__(self) -> None:
        self.warmup = int(os.environ[WARMUP])
        self.steps = self._steps_before = 0
        self._first = self._begin = self._end = self._begin_cpu = self._end_cpu = 0.0

    def step_ended(self, steps: int = 1) -> None:
        """Counts steps that have ended on the device."""
        if not self.steps:
            self._first = time.time() - float(os.environ[BEGAN])
        self.steps += steps
        self._end, self._end_cpu = time.perf_counter(), time.process_time()
        # A call that starts within the warm-up and ends after it is timed whole: there may be no other.
        if self.steps <= self.warmup or not self._begin:
            self._begin, self._begin_cpu, self._steps_before = self._end, self._end_cpu, self.steps

    def report(self, rank: int, loss: float) -> None:
        """Writes this rank's figures; loss is the mean over the last epoch's steps."""
        timed = self.steps - self._steps_before
        found = {
            "rank": rank,
            "step_seconds": (self._end - self._begin) / timed,
            "step_cpu_seconds": (self._end_cpu - self._begin_cpu) / timed,
            "first_step_seconds": self._first,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "loss": loss,
        }
        Path(f"{os.environ[FILE]}.{rank}").write_text(json.dumps(found))
