"""What a sweep looks for: a metric of history.csv, and whether more or less of it is better."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvtrain.compare.summary import lower_is_better
from hvtrain.config.schema import RunConfig
from hvtrain.core.records import EpochRecord
from hvtrain.errors import ConfigError

MAX, MIN = "max", "min"


@dataclass(frozen=True)
class Goal:
    """A metric, and MAX or MIN of it. is_given: the user named the direction.

    first_epoch: the first whose end has the metric.
    """

    metric: str
    direction: str
    is_given: bool = False
    first_epoch: int = 1

    def best(self, values: Sequence[float]) -> float:
        """The best of these values."""
        return max(values) if self.direction == MAX else min(values)

    def values(self, history: Sequence[EpochRecord]) -> dict[int, float]:
        """The metric by epoch, where it was measured. Raises ConfigError if it should have been and was not."""
        if history and history[-1].epoch >= self.first_epoch and self.metric not in history[-1].metrics:
            names = list(dict.fromkeys(name for record in history for name in record.metrics))
            if self.metric not in names:
                raise ConfigError(
                    f"the first trial has no {self.metric} in its history.csv, which has {', '.join(names)}; give the "
                    "data set validation data, or choose --metric among these, with another --output"
                )
        found = {record.epoch: record.metrics.get(self.metric, math.nan) for record in history}
        return {epoch: value for epoch, value in found.items() if math.isfinite(value)}

    def check(self, starts: Sequence[dict[str, Any]]) -> None:
        """Raises ConfigError if the task of a run that has started knows better which values are good."""
        last = starts[-1] if starts else {}
        told = {1: MAX, -1: MIN}.get(last.get("sign", 0))
        if not self.is_given and last.get("best") == self.metric and told not in (None, self.direction):
            raise ConfigError(
                f"{self.metric} looked like one whose {self.direction} is best, and the task says {told}; add "
                f"--direction {told}, and another --output"
            )


def goal_of(config: RunConfig, metric: str | None = None, direction: str | None = None) -> Goal:
    """The metric whose best checkpoint the run keeps, unless another is given. Raises ConfigError."""
    name = metric or config.checkpoint.best
    if name is None:
        if not (of_task := config.task.get("best")):
            raise ConfigError(f"{config.task['_target_']} names no best metric; give --metric NAME --direction max|min")
        name = f"val_{of_task}"
    every = config.train.validate_every_epochs
    if name.startswith("val_"):
        if config.dataset.get("num_validation", 1) == 0:
            raise ConfigError(
                f"dataset.num_validation=0 leaves no validation data, which {name} needs; raise it, or choose another "
                "--metric"
            )
        if every is None:
            raise ConfigError(f"train.validate_every_epochs=null leaves no {name} at the end of epochs; give a number")
    found = direction or (MIN if lower_is_better(name) else MAX)
    return Goal(name, found, direction is not None, every if name.startswith("val_") and every else 1)
