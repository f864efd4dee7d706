"""One rank's step time, measured here: a short training in a process of its own, with the bench's clock."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvtrain.bench.contenders import Steps, measure, named

WARMUP_STEPS, TIMED_STEPS = 5, 20


def measured_step_seconds(words: Sequence[str], batch_size: int) -> float:
    """Seconds a step of the run in these words, on one rank with all cores of this machine and without Horovod.

    Raises LostRankError with the place of its output when it fails.
    """
    steps = Steps(WARMUP_STEPS, TIMED_STEPS)
    more = ["strategy=single", f"train.steps={steps.total}", "train.divide_steps_by_size=false"]
    more += ["train.validate_every_epochs=null", "train.learning_rate_scale=none", f"train.batch_size={batch_size}"]
    kept = [word for word in words if not word.startswith("run.dir=")]
    folder = Path(tempfile.mkdtemp(prefix="hvtrain-plan-"))  # Kept: it says what went wrong.
    threads = len(os.sched_getaffinity(0))
    return measure(named("hvtrain-1"), [*kept, *more], 1, batch_size, steps, folder / "run", threads).step_seconds
