"""The arguments of a command that uses a finished run: run=DIR, the command's own, and changes of the run's settings.

Nothing here needs TensorFlow.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvtrain.config.compose import compose
from hvtrain.config.schema import RunConfig, from_dict
from hvtrain.errors import ConfigError
from hvtrain.training.run_folder import CONFIG_FILE

CHECKPOINTS = ("best", "last")
SPLITS = ("train", "validation", "test")
SETTINGS = """\
SETTING=VALUE overrides a setting of the run, such as dataset.dir=OTHER; dataset=NAME takes another data set."""


@dataclass(frozen=True)
class FinishedConfig:
    """The run's folder, its settings with the changes of the command line, and the command's own arguments."""

    folder: Path
    config: RunConfig
    words: dict[str, str]
    has_own_data: bool = True
    """Whether the data set is the run's, with its settings."""

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        """The argument of that name. Raises ConfigError if its value is not allowed."""
        given = self.words.get(name, default)
        if not given:
            raise ConfigError(f"{name}= is missing; give one of {', '.join(allowed)}")
        if given not in allowed:
            raise ConfigError(f"{name}={given} is not one of {', '.join(allowed)}")
        return given


def finished_config(words: Sequence[str], *names: str) -> FinishedConfig:
    """Takes run=DIR, checkpoint=NAME and arguments of these names; composes the rest on the run's settings.

    Raises ConfigError.
    """
    own, settings = {}, []
    for word in words:
        name, is_given, value = word.partition("=")
        if is_given and name in ("run", "checkpoint", *names):
            own[name] = value
        elif is_given or word.startswith("-"):
            settings.append(word)
        else:
            raise ConfigError(f"{word} is not a setting; write NAME=VALUE")
    if not own.get("run"):
        raise ConfigError("run=DIR is missing; name the folder of a run, such as run=runs/first")
    folder = Path(own.pop("run"))
    if not (folder / CONFIG_FILE).is_file() or not (folder / "checkpoints").is_dir():
        raise ConfigError(f"run={folder} is not the folder of a run: it has no {CONFIG_FILE} and checkpoints/")
    has_own_data = not any(word.startswith(("dataset=", "dataset.")) for word in settings)
    found = FinishedConfig(folder.absolute(), run_config(folder, settings), own, has_own_data)
    found.choice("checkpoint", CHECKPOINTS, CHECKPOINTS[0])
    return found


def run_config(folder: Path, settings: Sequence[str]) -> RunConfig:
    """The run's settings with changes; a newly chosen data set replaces the run's. Raises ConfigError."""
    options = [word for word in settings if word.startswith("-")]
    is_chosen = any(word.startswith("dataset=") for word in settings)
    of_data = [word for word in settings if is_chosen and word.startswith(("dataset=", "dataset."))]
    others = [word for word in settings if word not in (*of_data, *options)]
    tree = tree_of([f"--config-dir={folder}", *others])
    if is_chosen:
        tree["dataset"] = tree_of([*options, *of_data])["dataset"]
    config = from_dict(tree)
    return replace(config, run=replace(config.run, dir=str(folder.absolute())))


def composed(words: Sequence[str]) -> RunConfig:
    """The settings that these overrides give. Raises ConfigError."""
    return from_dict(tree_of(words))


def tree_of(words: Sequence[str]) -> dict[str, Any]:
    """The composed settings; sys.argv stays as it was. Raises ConfigError."""
    given = sys.argv[:]
    try:
        if not (trees := compose(list(words))):
            raise ConfigError(f"{' '.join(words)} composes no run; leave out options such as --cfg")
        return trees[0]
    finally:
        sys.argv[:] = given
