"""Composes a run from the command line with Hydra, and lists groups and settings for --help. Errors are one line."""

import dataclasses
import json
import os
import re
import sys
import typing
from pathlib import Path
from typing import Any, cast

from hvtrain.config.schema import BUNDLES, GROUPS, SEVERAL, ModelOptions, RunConfig
from hvtrain.config.validate import flatten, nearest
from hvtrain.errors import ConfigError
from hvtrain.system import console, secrets

# conf/ is beside the package in a checkout and inside it in a wheel.
CONFIGS = next(
    folder for folder in (Path(__file__).parents[1] / "conf", Path(__file__).parents[2] / "conf") if folder.is_dir()
)

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
        The composed run as one plain dictionary, in a list, which is empty if Hydra only printed
        the run (--cfg job).

    Raises:
        ConfigError: Hydra refuses the line.
    """
    # Otherwise Hydra prints its errors itself and exits.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    ConfigStore.instance().store("hvtrain_schema", schema())
    trees: list[Any] = []
    command_line = sys.argv
    arguments = command_line
    if overrides is not None:
        arguments = [command_line[0], *overrides]
    run_folder = folder_of_a_run(arguments)

    @hydra.main(version_base="1.3", config_path=str(run_folder or CONFIGS), config_name="config")
    def job(tree: DictConfig) -> None:
        choices = HydraConfig.get().runtime.choices
        if tree.run.name is None:
            name = choices.get("experiment") or f"{choices['model']}-{choices['dataset']}"
            tree.run.name = name.replace("/", "-")
        trees.append(resolved(tree))
        # From here on errors are shown as this run has chosen.
        console.shows_tracebacks = tree.tracebacks

    # Hydra reads nothing else. Its errors and --cfg would show what is secret in notify=, and its grammar refuses
    # many addresses.
    sys.argv, notify = secrets.take_addresses(arguments)
    if not run_folder:
        sys.argv = quoted(sys.argv)
    try:
        job()
    except Exception as error:
        raise ConfigError(_in_one_line(error)) from error
    finally:
        sys.argv = command_line

    if notify is not None:
        for tree in trees:
            tree["notify"] = None if notify == "null" else secrets.split_addresses(notify)
    return trees


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


def own_folders(arguments: list[str]) -> list[Path]:
    """Returns the folder given with --config-dir, if any."""
    for index, argument in enumerate(arguments):
        # Hydra takes it in one word or in two.
        if argument.startswith("--config-dir="):
            return [Path(argument.partition("=")[2])]
        if argument in ("--config-dir", "-cd") and index + 1 < len(arguments):
            return [Path(arguments[index + 1])]
    return []


def folder_of_a_run(arguments: list[str]) -> Path | None:
    """Returns the folder given with --config-dir if its config.yaml has all settings of a run, and no groups.

    Raises:
        ConfigError: There is another config.yaml. Hydra would say nothing of it, and take
            hvtrain's own instead.
    """
    from omegaconf import OmegaConf

    for folder in own_folders(arguments):
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
    lines = ["", "GROUPS (the choice after * is the default)"]
    for group in (*GROUPS, *SEVERAL, *BUNDLES):
        lines += _group_help(group, arguments)

    lines += ["", "SETTINGS (with their defaults)"]
    lines += setting_lines(RunConfig)
    lines += setting_lines(ModelOptions, "model.")
    return "\n".join([*lines, "", MORE])


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
    for path in _choices(group, arguments):
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


def _choices(group: str, arguments: list[str]) -> list[Path]:
    folders = [CONFIGS, *own_folders(arguments)]
    return [path for folder in folders for path in sorted((folder / group).glob("*.yaml"))]


def _in_one_line(error: Exception) -> str:
    """Rewrites an error of Hydra 1.3 in one line, with the nearest known name. Its texts are matched literally."""
    text = " ".join(str(error).split())

    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        return _unknown_setting(unknown[1])

    choice = re.search(r"Could not (?:find|load) '([^'/]+)/([^']+)'", text)
    if choice:
        group, name = choice.groups()
        names = sorted(path.stem for path in _choices(group, sys.argv))
        return f"{group}={name} is not one of {', '.join(names)}; --help describes them"

    ambiguous = re.search(r"Ambiguous value for argument '([^'=]+)=([^']*)'", text)
    if ambiguous:
        name, value = ambiguous.groups()
        advice = f"give one, a list ({name}=[{value}]), or quote it: \"{name}='{value}'\""
        return f"{name}={value} has several values; {advice}"

    return _refused_by_grammar() or f"{text}; see --help"


def _unknown_setting(name: str) -> str:
    from omegaconf import OmegaConf

    group, _, setting = name.partition(".")
    settings = {path.stem: list(cast("dict", OmegaConf.load(path))) for path in _choices(group, sys.argv)}
    choices = [choice for choice, names in settings.items() if setting in names]
    if choices:
        return f"{name} is a setting of {group}={', '.join(choices)} alone; choose one of these, or leave it out"
    of_group = [f"{group}.{key}" for names in settings.values() for key in names]
    known = [*flatten(schema()), *of_group, *GROUPS, *SEVERAL, *BUNDLES]
    return f"unknown setting '{name}'; {nearest(name, known)}"


def _refused_by_grammar() -> str | None:
    """The first argument that Hydra's grammar refuses, which Hydra's own message does not name."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for argument in sys.argv[1:]:
        name, equals, value = argument.partition("=")
        if not equals or argument.startswith("-"):
            continue
        try:
            parser.parse_override(argument)
        except HydraException:
            if "://" in value:  # It may be a misspelt notify=, whose address holds a secret.
                value = "..."
            advice = f"put it in quotes: \"{name}='{value}'\""
            return f"{name}={value} has a character that is special to Hydra; {advice}"
    return None
