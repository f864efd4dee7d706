"""Composes a run from the command line with Hydra, and lists groups and settings for --help."""

import argparse
import dataclasses
import json
import re
import sys
import textwrap
import typing
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from hvtrain.config.schema import BUNDLES, GROUPS, SEVERAL, ModelOptions, RunConfig
from hvtrain.errors import ConfigError
from hvtrain.system import console, secrets
from hvtrain.system.command import Parser

# conf/ is beside the package in a checkout and inside it in a wheel.
CONFIGS = next(
    folder for folder in (Path(__file__).parents[1] / "conf", Path(__file__).parents[2] / "conf") if folder.is_dir()
)

# Names of all groups of choices.
ALL_GROUPS = (*GROUPS, *SEVERAL, *BUNDLES)

MORE = """\
A setting of a chosen group is changed with GROUP.NAME=VALUE, for example optimizer.learning_rate=0.01.
Every data set takes data.uneven: trim (examples that fill no batch on all ranks are left out of the epoch),
pad (short batches at its end, weighted) or error; and data.on_error: stop, or skip (what cannot be read is
left out and counted). Several callbacks: callbacks=[early_stopping,reduce_lr_on_plateau]; several
trackers: tracker=[tensorboard,mlflow].
Several layers of augmentation, in this order: augment=[random_flip,mix_up].
"""


def compose(overrides: list[str] | None = None) -> list[dict[str, Any]]:
    """Composes the run that these overrides describe, or else the command line, which stays as it is.

    Returns:
        The composed run as one plain dictionary, in a list, which is empty if the line only asks
        to print the run (--cfg job).

    Raises:
        ConfigError: Hydra refuses the line, or it is not one of settings.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    # Both compose too, to know the settings of the choices on a line that is refused.
    from hvtrain.config.mistakes import check_form, explain

    # Hydra reads nothing of notify=. Its errors and --cfg would show what is secret in it, and its grammar refuses
    # many addresses.
    line, notify = secrets.take_addresses(sys.argv[1:] if overrides is None else overrides)
    options, settings = parsed(line)
    check_form(settings)
    run_folder = folder_of_a_run(line)
    if not run_folder:
        folders = [f"file://{folder.absolute()}" for folder in own_folders(line)]
        settings = [override("hydra.searchpath", folders), *quoted(settings)]

    ConfigStore.instance().store("hvtrain_schema", schema())
    try:
        with hydra.initialize_config_dir(str(run_folder or CONFIGS), version_base="1.3"):
            tree = hydra.compose("config", settings, return_hydra_config=True)
        HydraConfig.instance().set_config(tree)
        choices = tree.hydra.runtime.choices
        OmegaConf.set_struct(tree, False)
        del tree.hydra
        if options.cfg:
            print(OmegaConf.to_yaml(tree))
            return []
        if tree.run.name is None:
            name = choices.get("experiment") or f"{choices.get('model')}-{choices.get('dataset')}"
            tree.run.name = name.replace("/", "-")
        values = resolved(tree)
    except Exception as error:
        raise ConfigError(explain(error, line)) from error

    # From here on errors are shown as this run has chosen.
    console.shows_tracebacks = values.get("tracebacks", False)
    if notify is not None:
        values["notify"] = None if notify == "null" else secrets.split_addresses(notify)
    return [values]


def quoted(overrides: list[str]) -> list[str]:
    """Puts the choice debug=nan in quotes, because Hydra would take it for a number.

    >>> quoted(["debug=nan", "debug=fast", "seed=1"])
    ["debug='nan'", 'debug=fast', 'seed=1']
    """
    return ["debug='nan'" if text.lower() == "debug=nan" else text for text in overrides]


def resolved(tree: Any) -> dict[str, Any]:
    """Returns a composed run as plain values.

    ${run.dir} stays in them until the folder is known; see instantiate.build.
    """
    from omegaconf import OmegaConf

    folder = tree.run.dir
    # Escaped, so that OmegaConf leaves references to it as they are.
    tree.run.dir = r"\${run.dir}"
    values = cast("dict[str, Any]", OmegaConf.to_container(tree, resolve=True))
    values["run"]["dir"] = folder
    return values


def schema() -> dict[str, Any]:
    """Returns the declared settings with their defaults, on which Hydra composes the groups."""
    no_choices: dict[str, Any] = {group: {} for group in GROUPS}
    defaults = RunConfig(**no_choices).record
    declared = {name: value for name, value in defaults.items() if name not in GROUPS}
    return {**declared, "model": dataclasses.asdict(ModelOptions())}


def override(name: str, value: Any) -> str:
    """Writes a setting as Hydra reads it on a command line.

    >>> override("train.ema", None), override("model.hidden", [64, 32]), override("optimizer", "sgd")
    ('train.ema=null', 'model.hidden=[64,32]', 'optimizer=sgd')
    >>> override("a.b", "it's 1")
    "a.b='it\\\\'s 1'"
    """
    return f"{name}={override_value(value)}"


def override_value(value: Any) -> str:
    """Writes a value as Hydra reads it on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(override_value, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[A-Za-z][\w./-]*", value):
        return value
    # A backslash is special to Hydra only before a quote, and at the end, where the closing quote follows.
    escaped = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + (match[2] and r"\'"), value)
    return f"'{escaped}'"


def parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of Hydra that a run takes, and all other arguments. Raises ConfigError."""
    parser = Parser("python -m hvtrain", add_help=False)
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd")
    return parser.parse_known_args(arguments)


def own_folders(arguments: list[str]) -> list[Path]:
    """Returns the folder given with --config-dir, if any."""
    # Not by parsed(): the arguments may be those of any program, whose -c is not ours.
    for option, value in pairwise([*arguments, ""]):
        if option in ("--config-dir", "-cd") and value:
            return [Path(value)]
        if option.startswith("--config-dir="):
            return [Path(option.partition("=")[2])]
    return []


def folder_of_a_run(arguments: list[str]) -> Path | None:
    """Returns the folder given with --config-dir if its config.yaml has all settings of a run, and no groups.

    Raises:
        ConfigError: There is another config.yaml. Hydra would say nothing of it, and take
            hvtrain's own instead.
    """
    from omegaconf import OmegaConf

    for folder in own_folders(arguments):
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder} is not a folder; give the one that has yours, such as own/model")
        path = folder / "config.yaml"
        if not path.exists() and (folder / "checkpoints").is_dir():
            raise ConfigError(
                f"--config-dir {folder} is the folder of a run without its config.yaml; give another folder"
            )
        if not path.exists() or path.samefile(CONFIGS / "config.yaml"):
            continue
        if not path.is_file():
            raise ConfigError(f"{path} is not a regular file; give another folder")
        try:
            settings = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        except Exception as error:
            raise ConfigError(f"{path} cannot be read ({' '.join(str(error).split())}); fix it first") from error
        if isinstance(settings, dict) and all("_target_" in (settings.get(group) or ()) for group in GROUPS[:3]):
            return folder.absolute()
        raise ConfigError(
            f"{path} does not have all settings of a run, and hvtrain would take its own config.yaml instead; put your "
            f"settings into groups such as {folder}/experiment/NAME.yaml"
        )
    return None


def run_settings(arguments: list[str]) -> str:
    """Lists the groups with their choices, and the settings with their defaults, for --help."""
    lines = _chosen_settings(arguments)
    lines += ["", "GROUPS (the choice after * is the default)"]
    for group in ALL_GROUPS:
        lines += _group_help(group, arguments)

    lines += ["", "SETTINGS (with their defaults)"]
    lines += setting_lines(RunConfig)
    lines += setting_lines(ModelOptions, "model.")
    return "\n".join([*lines, "", MORE])


def _chosen_settings(arguments: list[str]) -> list[str]:
    """The files of the choices on the command line, whose comments say what their settings mean."""
    lines = []
    for argument in arguments:
        group, _, choice = argument.partition("=")
        for path in choice_files(group, arguments):
            if path.stem == choice:
                lines += ["", f"SETTINGS OF {argument} (as {group}.NAME=VALUE)"]
                lines.append(textwrap.indent(path.read_text("utf-8").rstrip(), "  "))
    return lines


def setting_lines(schema: type, prefix: str = "") -> list[str]:
    """Returns one line for each setting of a dataclass and of its sections: its name, default and meaning."""
    lines = []
    for item in dataclasses.fields(schema):
        section = typing.get_type_hints(schema)[item.name]
        if dataclasses.is_dataclass(section):
            lines += setting_lines(cast(type, section), f"{prefix}{item.name}.")
        elif item.default is not dataclasses.MISSING:
            default = item.default
            # As YAML has them: null, true, and numbers.
            if not isinstance(default, str):
                default = json.dumps(default)
            choices = ", ".join(item.metadata["choices"])
            limits = ""
            if choices:
                limits = f" ({choices})"
            assignment = f"{prefix}{item.name}={default}"
            lines.append(f"  {assignment:<36} {item.metadata['doc']}{limits}")
    return lines


def _group_help(group: str, arguments: list[str]) -> list[str]:
    """The choices of a group, each with the first comment of its file."""
    default = _default_choice(group)
    lines = [f"  {group}="]
    for path in choice_files(group, arguments):
        comments = [line for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
        about = next((line.lstrip("# ").strip() for line in comments if "@package" not in line), "")
        mark = " "
        if path.stem == default:
            mark = "*"
        lines.append(f"   {mark} {path.stem:<20} {about}")
    return lines


def _default_choice(group: str) -> str | None:
    """The choice of a group in the defaults list of conf/config.yaml, where a line is "  - model: cnn"."""
    for line in (CONFIGS / "config.yaml").read_text("utf-8").splitlines():
        name, _, choice = line.strip(" -").partition(":")
        if name == group:
            return choice.strip()
    return None


def choice_files(group: str, arguments: list[str]) -> list[Path]:
    """The files of a group's choices, those of --config-dir last."""
    folders = [CONFIGS, *own_folders(arguments)]
    return [path for folder in folders for path in sorted((folder / group).glob("*.yaml"))]
