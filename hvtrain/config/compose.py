"""Composes a run from the command line, by Hydra, with errors of one line; and lists groups and settings for --help."""

import dataclasses
import json
import os
import re
import sys
import typing
from pathlib import Path
from typing import Any, cast

from hvtrain.config.model_options import ModelOptions
from hvtrain.config.schema import BUNDLES, GROUPS, SEVERAL, RunConfig, to_dict
from hvtrain.config.validate import flatten, nearest
from hvtrain.errors import ConfigError
from hvtrain.system import addresses, console

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


def compose(words: list[str] | None = None) -> list[dict[str, Any]]:
    """The run of these words, or else of the command line, in a list; empty when Hydra only printed it (--cfg job)."""
    if words is not None:
        sys.argv = [sys.argv[0], *words]  # Hydra reads nothing else.
    # Otherwise Hydra prints its errors itself and exits.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    ConfigStore.instance().store("hvtrain_schema", schema())
    trees: list[Any] = []

    of_run = folder_of_a_run(sys.argv)

    @hydra.main(version_base="1.3", config_path=str(of_run or CONFIGS), config_name="config")
    def job(tree: DictConfig) -> None:
        choices = HydraConfig.get().runtime.choices
        if tree.run.name is None:
            name = choices.get("experiment") or f"{choices['model']}-{choices['dataset']}"
            tree.run.name = name.replace("/", "-")
        trees.append(resolved(tree))
        console.shows_tracebacks = tree.tracebacks

    given = sys.argv
    # Hydra's errors and --cfg would show what is secret in notify=, and its grammar refuses many addresses.
    sys.argv, notify = addresses.take(given)
    if not of_run:
        sys.argv = quoted(sys.argv)
    try:
        job()
    except Exception as error:
        raise ConfigError(_in_one_line(error)) from error
    finally:
        sys.argv = given
    if notify is not None:
        for tree in trees:
            tree["notify"] = None if notify == "null" else addresses.split(notify)
    return trees


def quoted(words: list[str]) -> list[str]:
    """The words, with the choice debug=nan in quotes: Hydra would take it for a number.

    >>> quoted(["debug=nan", "debug=fast", "seed=1"])
    ["debug='nan'", 'debug=fast', 'seed=1']
    """
    return ["debug='nan'" if word.lower() == "debug=nan" else word for word in words]


def resolved(tree: Any) -> dict[str, Any]:
    """A composed run as plain values. ${run.dir} stays in them until the folder is known; see instantiate.build."""
    from omegaconf import OmegaConf

    folder, tree.run.dir = tree.run.dir, r"\${run.dir}"
    values = cast("dict[str, Any]", OmegaConf.to_container(tree, resolve=True))
    values["run"]["dir"] = folder
    return values


def schema() -> dict[str, Any]:
    """The declared settings with their defaults, on which Hydra composes the groups, which bring their own."""
    empty: dict[str, Any] = {group: {} for group in GROUPS}
    declared = {name: value for name, value in to_dict(RunConfig(**empty)).items() if name not in GROUPS}
    return {**declared, "model": dataclasses.asdict(ModelOptions())}


def _in_one_line(error: Exception) -> str:
    """Hydra's error in one line, with the nearest known name."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    text = " ".join(str(error).split())
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        group, _, setting = unknown[1].partition(".")
        of_choices = {path.stem: [*cast("dict", OmegaConf.load(path))] for path in _choices(group, sys.argv)}
        if others := [name for name, own in of_choices.items() if setting in own]:
            return (
                f"{unknown[1]} is a setting of {group}={', '.join(others)} alone; choose one of these, or leave it out"
            )
        keys = [f"{group}.{key}" for own in of_choices.values() for key in own]
        known = [*flatten(schema()), *keys, *GROUPS, *SEVERAL, *BUNDLES]
        return f"unknown setting '{unknown[1]}'; {nearest(unknown[1], known)}"
    if option := re.search(r"Could not (?:find|load) '([^'/]+)/([^']+)'", text):
        choices = sorted(path.stem for path in _choices(option[1], sys.argv))
        return f"{option[1]}={option[2]} is not one of {', '.join(choices)}; --help describes them"
    if several := re.search(r"Ambiguous value for argument '([^'=]+)=([^']*)'", text):
        name, value = several.groups()
        return (
            f"{name}={value} has several values; give one, a list ({name}=[{value}]), or quote it: \"{name}='{value}'\""
        )
    # Hydra's message does not name the word that its grammar refuses.
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        try:
            if "=" in word and not word.startswith("-"):
                OverridesParser.create().parse_override(word)
        except HydraException:
            word, value = (f"{name}=...", "...") if "://" in value else (word, value)  # It may be a misspelt notify=.
            return f"{word} has a character that is special to Hydra; put it in quotes: \"{name}='{value}'\""
    return f"{text}; see --help"


def _choices(group: str, words: list[str]) -> list[Path]:
    return [path for folder in [CONFIGS, *own_folders(words)] for path in sorted((folder / group).glob("*.yaml"))]


def own_folders(words: list[str]) -> list[Path]:
    """The folder given with --config-dir, if any."""
    for index, word in enumerate(words):
        if word.startswith("--config-dir="):
            return [Path(word.partition("=")[2])]
        if word in ("--config-dir", "-cd") and index + 1 < len(words):
            return [Path(words[index + 1])]
    return []


def folder_of_a_run(words: list[str]) -> Path | None:
    """The folder given with --config-dir if its config.yaml has all settings of a run, and no groups.

    Raises ConfigError for any other config.yaml there, of which Hydra would say nothing: it takes hvtrain's own.
    """
    from omegaconf import OmegaConf

    for folder in own_folders(words):
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
            raise ConfigError(f"{path} cannot be read ({' '.join(str(error).split())}); mend it first") from error
        if isinstance(settings, dict) and all("_target_" in (settings.get(group) or ()) for group in GROUPS[:3]):
            return folder.absolute()
        raise ConfigError(
            f"{path} does not have all settings of a run, and hvtrain would take its own config.yaml instead; put your "
            f"settings into groups such as {folder}/experiment/NAME.yaml"
        )
    return None


def run_settings(words: list[str]) -> str:
    """Groups with their choices, and settings with their defaults, of a run that these words describe."""
    entries = [line.strip(" -").partition(":") for line in (CONFIGS / "config.yaml").read_text("utf-8").splitlines()]
    defaults = {key: value.strip() for key, _, value in entries}
    lines = ["", "GROUPS (the choice after * is the default)"]
    for group in (*GROUPS, *SEVERAL, *BUNDLES):
        lines.append(f"  {group}=")
        for path in _choices(group, words):
            comments = (line for line in path.read_text("utf-8").splitlines() if line.startswith("#"))
            about = next((line.lstrip("# ").strip() for line in comments if "@package" not in line), "")
            lines.append(f"   {'*' if defaults.get(group) == path.stem else ' '} {path.stem:<20} {about}")
    return "\n".join(
        [
            *lines,
            "",
            "SETTINGS (with their defaults)",
            *settings(RunConfig),
            *settings(ModelOptions, "model."),
            "",
            MORE,
        ]
    )


def settings(schema: type, prefix: str = "") -> list[str]:
    """One line for each setting of a dataclass, those of its sections too: its name, default and meaning."""
    lines = []
    for item in dataclasses.fields(schema):
        section = typing.get_type_hints(schema)[item.name]
        if dataclasses.is_dataclass(section):
            lines += settings(cast(type, section), f"{prefix}{item.name}.")
        elif item.default is not dataclasses.MISSING:
            choices = item.metadata["choices"]
            doc = item.metadata["doc"] + (f" ({', '.join(choices)})" if choices else "")
            default = item.default if isinstance(item.default, str) else json.dumps(item.default)
            lines.append(f"  {f'{prefix}{item.name}={default}':<36} {doc}")
    return lines
