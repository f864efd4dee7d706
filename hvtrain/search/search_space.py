"""Reads and checks the search space and the goal of a sweep, before anything starts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvtrain.config.choices import choice_files
from hvtrain.config.schema import RunConfig
from hvtrain.config.validate import is_number, nearest
from hvtrain.errors import ConfigError, in_one_line
from hvtrain.system.run_files import EpochRecord, lower_is_better

MAX = "max"
MIN = "min"

# The definition of one searched setting: {low, high}, both inclusive, optionally with log or a
# step; or {choices}, each of which is a value or a list of values. Only whole numbers are tried if
# both ends and the step are whole.
Setting = Mapping[str, Any]


@dataclass(frozen=True)
class SearchSpace:
    """The definitions of the searched settings by name, and the file from which they were read."""

    path: Path
    settings: Mapping[str, Setting]

    def examples(self) -> list[dict[str, Any]]:
        """Returns combinations of values that together cover both ends or every choice of each setting."""
        values_of = {
            name: setting.get("choices") or (setting["low"], setting["high"])
            for name, setting in self.settings.items()
        }
        # As many combinations as the longest list has values; shorter lists start over.
        count = max(map(len, values_of.values()))
        return [
            {name: values[index % len(values)] for name, values in values_of.items()}
            for index in range(count)
        ]


def read_space(name: str, overrides: Sequence[str]) -> SearchSpace:
    """Reads the search space that `sweep=NAME` names.

    Args:
        name: the name of a file in the folder sweep of conf or of --config-dir, or the path of a YAML file.
        overrides: the command line, which may have --config-dir.

    Raises:
        ConfigError: there is no such file, or one of its lines is invalid.
    """
    import yaml
    from omegaconf import OmegaConf

    path = _space_file(name, overrides)

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read: {in_one_line(error)}; give a YAML file"
        ) from error

    if not isinstance(tree, dict) or not tree:
        raise ConfigError(
            f"{path} defines no settings; each line is NAME: {{low: 1, high: 9}} or {{choices: [a, b]}}"
        )
    settings = {str(key): line for key, line in tree.items()}
    for name, line in settings.items():
        _check_line(f"{path}: {name}", line)

    return SearchSpace(path, settings)


def _space_file(name: str, overrides: Sequence[str]) -> Path:
    # A path is used as given; a name is looked up in the folders.
    if name.endswith((".yaml", ".yml")):
        return Path(name)

    # The user's folder comes last, so its spaces replace hvtrain's of the same name.
    known = {path.stem: path for path in choice_files("sweep", overrides)}
    if name not in known:
        raise ConfigError(
            f"sweep={name} is not a search space; {nearest(name, list(known))} (or name a YAML file)"
        )

    return known[name]


def _check_line(location: str, line) -> None:
    """Raises ConfigError for an invalid line of a space. `location`, its file and setting, begins the message."""
    if not isinstance(line, dict) or not (_lists_choices(line) or _is_range(line)):
        raise ConfigError(
            f"{location} is {line!r}, which does not define a search; "
            "write {low: 1, high: 9}, with log: true or a step if need be, or {choices: [a, b]}"
        )
    if "choices" in line:
        return

    low = line["low"]
    high = line["high"]
    if low >= high:
        raise ConfigError(f"{location}: low {low:g} is not below high {high:g}; widen the range")
    # optuna accepts neither a log range from 0 or below, nor one with steps.
    if line.get("log") and (low <= 0 or "step" in line):
        raise ConfigError(
            f"{location} is {line!r}, but log needs a low above 0 and no step; change the range or leave out log"
        )
    step = line.get("step", high - low)
    # If steps do not reach `high`, optuna would lower it, at most with a warning.
    if step <= 0 or abs((high - low) / step - round((high - low) / step)) > 1e-9:
        raise ConfigError(
            f"{location}: steps of {step:g} do not lead from {low:g} to {high:g}; change one of them"
        )


def _lists_choices(line: Setting) -> bool:
    choices = line.get("choices")
    return len(line) == 1 and isinstance(choices, list) and choices != [] and _is_plain(choices)


def _is_plain(value) -> bool:
    # A mapping would be a group of settings, which cannot be given on a command line.
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | None)


def _is_range(line: Setting) -> bool:
    numbers = {key: value for key, value in line.items() if key != "log"}
    return (
        {"low", "high"} <= numbers.keys() <= {"low", "high", "step"}
        and isinstance(line.get("log", False), bool)
        # In Python a bool is an int, but true is not a number here.
        and all(is_number(value) and math.isfinite(value) for value in numbers.values())
    )


@dataclass(frozen=True)
class Goal:
    """The metric that a sweep optimizes.

    Attributes:
        metric: a column of history.csv.
        direction: MAX if its highest value is best, MIN if its lowest is.
        is_explicit: True if the user gave the direction.
        first_epoch: the first epoch that has the metric.
    """

    metric: str
    direction: str
    is_explicit: bool = False
    first_epoch: int = 1

    def values(self, history: Sequence[EpochRecord]) -> dict[int, float]:
        """Returns the metric's finite values by epoch.

        Raises:
            ConfigError: no epoch has the metric, although first_epoch is over.
        """
        # A validation metric is missing in epochs without validation, a misspelt one in all epochs.
        names = dict.fromkeys(name for record in history for name in record.metrics)
        is_due = bool(history) and history[-1].epoch >= self.first_epoch
        if is_due and self.metric not in names:
            raise ConfigError(
                f"a trial has no {self.metric} in its history.csv, which has {', '.join(names)}; give the "
                "data set validation data, or choose one of these with --metric, and another --output"
            )

        return {
            record.epoch: record.metrics[self.metric]
            for record in history
            if math.isfinite(record.metrics.get(self.metric, math.nan))
        }

    def check(self, starts: Sequence[dict[str, Any]]) -> None:
        """Compares the direction with the task's, which is known only once a run has started.

        Args:
            starts: the content of the run's starts.json.

        Raises:
            ConfigError: the directions differ, and the user gave none.
        """
        # The newest start counts, since an earlier one may have had other settings.
        if self.is_explicit or not starts or starts[-1].get("best") != self.metric:
            return
        direction = {1: MAX, -1: MIN}.get(starts[-1].get("sign", 0), self.direction)
        if direction != self.direction:
            raise ConfigError(
                f"judging by its name, {self.metric} is best at its {self.direction}, but the task says {direction}; "
                f"add --direction {direction}, and another --output"
            )


def goal_of(config: RunConfig, metric: str | None = None, direction: str | None = None) -> Goal:
    """Returns the goal of a sweep.

    Args:
        config: the settings of one of its runs.
        metric: a column of history.csv; None: the metric by which the run chooses its best checkpoint.
        direction: MAX or MIN; None: guessed from the metric's name.

    Raises:
        ConfigError: there is no metric, or the run has no validation for it.
    """
    name = metric or config.checkpoint.best
    if name is None:
        task_metric = config.task.get("best")
        if not task_metric:
            raise ConfigError(
                f"{config.task['_target_']} names no best metric; give --metric NAME --direction max|min"
            )
        name = f"val_{task_metric}"

    first_epoch = 1
    if name.startswith("val_"):
        interval = config.train.validate_every_epochs
        # A data set without num_validation may come with its own validation split.
        if interval is None or config.dataset.get("num_validation") == 0:
            raise ConfigError(
                f"dataset.num_validation=0 or train.validate_every_epochs=null leaves no {name} at the end of epochs; "
                "give numbers above 0, or choose another --metric"
            )
        first_epoch = interval

    # Only a guess: once a run has started, Goal.check compares it with the task's direction.
    guess = MIN if lower_is_better(name) else MAX
    return Goal(name, direction or guess, direction is not None, first_epoch)
