"""Measures one rank's step time on this machine: a short training in its own process, with the bench's clock."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvtrain.bench.contenders import measure, named

STEPS = (5, 20)  # warm-up, timed


def measured_step_seconds(words: Sequence[str], batch_size: int) -> float:
    """Step time of the run that the words describe, on one rank with all cores of this machine and without Horovod.

    Raises LostRankError, which names the file with its output, if it fails.
    """
    more = ["strategy=single", f"train.steps={sum(STEPS)}", "train.divide_steps_by_size=false"]
    more += ["train.validate_every_epochs=null", "train.learning_rate_scale=none", f"train.batch_size={batch_size}"]
    kept = [word for word in words if not word.startswith("run.dir=")]
    folder = Path(tempfile.mkdtemp(prefix="hvtrain-plan-"))  # Kept for the output of a failure.
    threads = len(os.sched_getaffinity(0))
    return measure(named("hvtrain-1"), [*kept, *more], 1, batch_size, STEPS, folder / "run", threads).step_seconds
