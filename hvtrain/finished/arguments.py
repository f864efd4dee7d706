"""Parses the arguments of commands on a finished run: RUN, the command's own, and overrides of the run's settings.

RUN is the run folder, which may also be written run=RUN. Nothing here imports TensorFlow.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from hvtrain.config.choices import CONFIGS
from hvtrain.config.compose import compose
from hvtrain.config.schema import RunConfig, from_dict
from hvtrain.config.validate import check_choice
from hvtrain.errors import ConfigError
from hvtrain.report.run_files import is_run_folder
from hvtrain.system.command import Parser, take_values
from hvtrain.system.run_files import CONFIG_FILE
from hvtrain.system.storage.cache import path_of
from hvtrain.training.run_folder import CONFIG_HEADER

CHECKPOINTS = ("best", "last")
SPLITS = ("train", "validation", "test")
# The groups whose `_target_` is called when a run is opened, and when it is trained again.
OPENING_GROUPS = ("dataset", "model", "task", "optimizer")
TRAINING_GROUPS = (*OPENING_GROUPS, "schedule", "strategy", "augment", "callbacks")
TRUSTED_MODULES = ("keras.losses.", "keras.metrics.", "keras.optimizers.")
SETTINGS_HELP = """\
SETTING=VALUE overrides a setting of the run, such as dataset.dir=OTHER; dataset=NAME selects another data set."""


@dataclass(frozen=True)
class FinishedConfig:
    """A finished run, and how a command line uses it.

    Attributes:
        folder: the run folder, absolute.
        config: its settings, with the overrides of the command line.
        arguments: the command's own arguments by name, such as split=test.
        has_own_data: True if the data set and its settings are the run's own.
    """

    folder: Path
    config: RunConfig
    arguments: dict[str, str]
    has_own_data: bool

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        """Returns the argument `name` or its default. Raises ConfigError if the value is not in `allowed`."""
        value = self.arguments.get(name, default)
        # `split=` without a value is a mistake, not the default.
        if not value:
            raise ConfigError(f"{name}= needs a value; give one of {', '.join(allowed)}")
        check_choice(name, value, allowed)
        return value


def parse_command(
    command: str,
    usage: str,
    description: str,
    examples: str,
    *names: str,
    trains: bool = False,
    **options: dict[str, Any],
) -> tuple[argparse.Namespace, FinishedConfig]:
    """Parses the command line, and returns its options and the finished run that it names.

    Args:
        command: the name of the command.
        usage: the command's own arguments and options, shown between RUN and the settings in the
            usage line.
        description: what the command does, shown in its help.
        examples: command lines, indented.
        *names: the names of the command's own arguments, such as split.
        trains: True if the command trains the run again.
        **options: the command's own options by name, as keyword arguments of add_argument.

    Raises:
        ConfigError: see finished_config.
    """
    parser = Parser(
        f"python -m hvtrain {command}",
        usage=f"%(prog)s RUN {usage} [SETTING=VALUE ...]",
        description=description,
        epilog=f"{SETTINGS_HELP}\n\nexamples:\n{examples}",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="call code outside hvtrain and Keras that the run's settings name; for runs that use your own code",
    )
    for name, arguments in options.items():
        parser.add_argument(f"--{name}", **arguments)
    parsed = parser.parse_with_overrides()
    return parsed, finished_config(parsed.overrides, *names, trust=parsed.trust, trains=trains)


def finished_config(
    arguments: Sequence[str], *names: str, trust: bool, trains: bool = False
) -> FinishedConfig:
    """Finds the run named by RUN or run=RUN, and separates the command's own arguments from its overrides.

    Every command takes the argument checkpoint=NAME; all other arguments override the run's settings.

    Args:
        arguments: the command line, without options.
        *names: the names of the command's own arguments.
        trust: allow the run's settings to name code that is neither hvtrain's nor Keras's.
        trains: True if the run is trained again, which calls more of its settings.

    Raises:
        ConfigError: there is no such run, a setting is wrong, or the run names foreign code.
    """
    values, others = take_values(arguments, "run", "run.dir", "checkpoint", *names)
    settings = [argument for argument in others if "=" in argument or argument[:1] in ("-", "~")]
    positional = [argument for argument in others if argument not in settings]
    if positional and "run" in values:
        raise ConfigError(f"{positional[0]} and run={values['run']} are two runs; give one of them")
    if positional:
        values["run"] = positional.pop(0)
    if positional:
        raise ConfigError(f"{positional[0]} is not a setting; write NAME=VALUE")

    if "run.dir" in values:
        raise ConfigError(
            f"run.dir={values['run.dir']}: a finished run keeps its folder; leave run.dir out"
        )
    if not values.get("run"):
        raise ConfigError("RUN is missing; name the folder of a run, such as run=runs/first")
    folder = path_of(values.pop("run"))
    # A folder that holds only settings has no model to open.
    if not is_run_folder(folder):
        raise ConfigError(
            f"run={folder} is not the folder of a run: it lacks {CONFIG_FILE} or checkpoints/; give a run's folder, "
            "such as runs/first"
        )

    # Checked before anything is composed, since composing may call Hydra's callbacks.
    groups = TRAINING_GROUPS if trains else OPENING_GROUPS
    foreign = [] if trust else foreign_code(folder, settings, groups)
    if foreign:
        raise ConfigError(
            f"run={folder} names code that is not hvtrain's or Keras's, and would be executed: {', '.join(foreign)}; "
            "add --trust (in Python: trust=True) if this run is yours, or you have looked at that code"
        )

    has_own_data = not any(map(_is_data_setting, settings))
    finished = FinishedConfig(folder.absolute(), run_config(folder, settings), values, has_own_data)
    finished.choice("checkpoint", CHECKPOINTS, CHECKPOINTS[0])

    return finished


def foreign_code(
    folder: Path, settings: Sequence[str], groups: Sequence[str] = OPENING_GROUPS
) -> list[str]:
    """Returns the foreign code that using a run would call, each item as NAME=TARGET.

    A run folder may come from somebody else, and calling what its settings name, such as numpy.load,
    could execute anything. Targets are trusted if hvtrain's own choices or `settings` name them, or
    if they are losses, metrics or optimizers of Keras. The keys `defaults` and `hydra`, through which
    Hydra calls code too, are returned by name alone if they were changed. Choices in the run folder
    are returned by path.

    Args:
        folder: the run folder.
        settings: the overrides on the command line.
        groups: the groups of settings whose targets would be called.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.load(folder / CONFIG_FILE), resolve=False)
        header = yaml.safe_load(CONFIG_HEADER)
    except Exception:
        return []  # Composing it will fail too, with a better message.

    if not isinstance(tree, dict):
        return []

    # A choice on the command line replaces the run's part, targets included. A value in braces is
    # only merged into it.
    overridden = {setting.partition("=")[0] for setting in settings if "{" not in setting}
    trusted = {setting.partition("=")[2] for setting in settings}
    for path in CONFIGS.rglob("*.yaml"):
        trusted.update(re.findall(r"_target_: ([\w.]+)", path.read_text()))

    foreign: list[str] = []
    for part in groups:
        # Hydra would prefer a choice in the run folder, where runs have none, to hvtrain's own.
        foreign += map(str, (folder / part).rglob("*.yaml"))
        if part not in overridden:
            for name, target in _targets(part, tree.get(part)):
                if target not in trusted and not target.startswith(TRUSTED_MODULES):
                    foreign.append(f"{name}={target}")

    # Hydra calls what these two keys name.
    foreign += [
        name for name in ("defaults", "hydra") if tree.get(name) not in (None, header[name])
    ]

    return foreign


def _targets(name: str, tree) -> Iterator[tuple[str, str]]:
    """Yields the dotted names and values of all targets in a tree of settings.

    Interpolations count as targets, since only OmegaConf knows what they resolve to.
    """
    # ${run.dir} is the one reference in a run's recorded settings, and names no code.
    if isinstance(tree, str) and "${" in tree.replace("${run.dir}", ""):
        yield name, tree
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return

    for key, value in tree.items():
        if key == "_target_":
            yield f"{name}._target_", str(value)
        else:
            yield from _targets(f"{name}.{key}", value)


def _is_data_setting(setting: str) -> bool:
    # Hydra's +dataset.NAME=VALUE adds a setting, and ~dataset.NAME removes one.
    return setting.lstrip("+~").startswith(("dataset=", "dataset."))


def run_config(folder: Path, settings: Sequence[str]) -> RunConfig:
    """Composes the run's settings with overrides. Raises ConfigError if one is wrong."""
    options = [setting for setting in settings if setting.startswith("-")]
    overrides = [setting for setting in settings if not setting.startswith("-")]

    # dataset=NAME replaces the data set, and must not inherit the run's settings for the old
    # one, so it is composed separately.
    data_overrides = []
    if any(setting.startswith("dataset=") for setting in overrides):
        data_overrides = list(filter(_is_data_setting, overrides))
        overrides = [setting for setting in overrides if setting not in data_overrides]

    # A run folder serves as a config folder, whose config.yaml takes the place of hvtrain's.
    tree = compose([f"--config-dir={folder}", *overrides])
    if data_overrides:
        tree["dataset"] = compose([*options, *data_overrides])["dataset"]
    config = from_dict(tree)

    # The run folder may have been moved since training.
    return replace(config, run=replace(config.run, dir=str(folder.absolute())))
