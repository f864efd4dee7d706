"""The arguments of a command that uses a finished run: run=DIR, the command's own, and changes of the run's settings.

Nothing here needs TensorFlow.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hvtrain.config.compose import CONFIGS, compose
from hvtrain.config.schema import RunConfig, from_dict
from hvtrain.errors import ConfigError
from hvtrain.training.run_folder import CONFIG_FILE, CONFIG_HEADER

CHECKPOINTS = ("best", "last")
SPLITS = ("train", "validation", "test")
BUILT = ("dataset", "model", "task", "optimizer")
"""The parts of a run's settings whose targets are called to open it."""
FROM_KERAS = ("keras.losses.", "keras.metrics.", "keras.optimizers.")
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


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds the option --trust."""
    what = "call code that the run's settings name, besides hvtrain's and Keras's; for runs of your own code"
    parser.add_argument("--trust", action="store_true", help=what)


def finished_config(words: Sequence[str], *names: str, trust: bool = False) -> FinishedConfig:
    """Takes run=DIR, checkpoint=NAME and arguments of these names; composes the rest on the run's settings.

    trust: the settings may name code that is neither hvtrain's nor Keras's. Raises ConfigError.
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
    if not trust and (foreign := foreign_code(folder, settings)):
        raise ConfigError(
            f"run={folder} names code that is not hvtrain's or Keras's, and would be executed: {', '.join(foreign)}; "
            "add --trust (in Python: trust=True) if this run is yours, or you have looked at that code"
        )
    has_own_data = not any(word.startswith(("dataset=", "dataset.")) for word in settings)
    found = FinishedConfig(folder.absolute(), run_config(folder, settings), own, has_own_data)
    found.choice("checkpoint", CHECKPOINTS, CHECKPOINTS[0])
    return found


def foreign_code(folder: Path, settings: Sequence[str]) -> list[str]:
    """What opening a run calls that is not named by a choice of hvtrain's or by these settings, as NAME=TARGET.

    A run folder may be somebody else's, and calling what it names, such as numpy.load, could execute anything.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.load(folder / CONFIG_FILE), resolve=False)
        header: Any = OmegaConf.to_container(OmegaConf.create(CONFIG_HEADER), resolve=False)
    except Exception:
        return []  # Composing it fails too, and says why.
    if not isinstance(tree, dict):
        return []
    chosen = {word.partition("=")[0] for word in settings}
    given = {word.partition("=")[2] for word in settings}
    targets = [one for part in BUILT if part not in chosen for one in _targets(part, tree.get(part))]
    own = {target for file in CONFIGS.rglob("*.yaml") for target in re.findall(r"_target_: ([\w.]+)", file.read_text())}
    known = own | given
    found = [
        f"{name}={target}" for name, target in targets if target not in known and not target.startswith(FROM_KERAS)
    ]
    # Hydra itself calls what its own settings name.
    return found + [name for name in ("defaults", "hydra") if tree.get(name) not in (None, header[name])]


def _targets(name: str, tree: Any) -> Iterator[tuple[str, str]]:
    """(dotted name, target) of all targets in a tree of settings, and of what only OmegaConf turns into settings."""
    if isinstance(tree, str) and "${" in tree.replace("${run.dir}", ""):
        yield name, tree
    branches: Any = ()
    if isinstance(tree, dict):
        branches = tree.items()
    elif isinstance(tree, list):
        branches = enumerate(tree)
    for key, value in branches:
        if key == "_target_":
            yield f"{name}._target_", str(value)
        else:
            yield from _targets(f"{name}.{key}", value)


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
