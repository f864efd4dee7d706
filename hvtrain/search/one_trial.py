"""One trial: a run in processes of its own, watched by its epochs."""

import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvtrain.compare.one_run import read_result
from hvtrain.core.records import EpochRecord, read_history
from hvtrain.core.starts import read_starts
from hvtrain.errors import LostRankError
from hvtrain.launch.child import SECONDS_TO_SAVE, end, ends_within, failure, started
from hvtrain.search.goal import Goal

SECONDS_BETWEEN_LOOKS = 0.5


def value_of(
    command: Sequence[str], folder: Path, goal: Goal, is_hopeless: Callable[[int, float], bool]
) -> float | None:
    """Runs the command, whose run folder this is; the best value of its epochs, or None if it was pruned.

    is_hopeless takes an epoch and its value, and says whether to prune the run.
    Raises LostRankError if the run fails, ConfigError if it does not have the metric.
    """
    log, seen = folder.with_suffix(".txt"), 0
    with started(command, log) as process:
        has_ended = False
        while not has_ended:
            has_ended = ends_within(process, SECONDS_BETWEEN_LOOKS)
            history, starts = read_history(folder), read_starts(folder)
            values = goal.values(history)
            goal.check(starts)
            new = [(epoch, value) for epoch, value in values.items() if epoch > seen]
            seen = max(values, default=seen)
            # All of them are told, since later trials are judged by them.
            judged = [is_hopeless(*one) for one in new]
            if any(judged) and not has_ended and not _is_trained(history, starts):
                _stop(process)
                return None
    if process.returncode:
        raise LostRankError(failure(log.read_text(errors="replace"), process.returncode))
    read_result(folder)
    if not values:
        raise LostRankError(f"the run ended well, but {goal.metric} was never a finite number")
    return goal.best(list(values.values()))


def _is_trained(history: Sequence[EpochRecord], starts: Sequence[dict[str, Any]]) -> bool:
    """True after the last step: ending the run would save nothing."""
    return bool(history and starts) and history[-1].step >= starts[-1].get("num_steps", math.inf)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the launcher to end all ranks, and ends them by force when it does not."""
    process.terminate()
    if not ends_within(process, SECONDS_TO_SAVE):
        end(process)
