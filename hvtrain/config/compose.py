"""Composes a run from the command line with Hydra."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from hvtrain.config.choices import CONFIGS, config_dirs
from hvtrain.config.mistakes import check_experiment, check_form, explain
from hvtrain.config.schema import GROUPS, ModelOptions, RunConfig, Settings, from_dict
from hvtrain.errors import ConfigError
from hvtrain.system import console, secrets
from hvtrain.system.command import Parser
from hvtrain.system.files import read_file


def composed(overrides: list[str] | None = None) -> RunConfig:
    """Composes a run and returns its validated settings. Raises the errors of compose() and from_dict()."""
    return from_dict(compose(overrides))


def compose(overrides: list[str] | None = None) -> Settings:
    """Composes the run described by these overrides, by default those on the command line.

    Returns:
        The composed run as a plain nested dictionary.

    Raises:
        ConfigError: Hydra refuses an override, an override is not a setting, or an option has a bad value.
        SystemExit: The overrides include --cfg job, which only prints the composed run.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    # Hydra must not see notify=: its errors and --cfg would show the secrets in it, and its grammar
    # refuses many addresses.
    arguments, notify = secrets.take_addresses(sys.argv[1:] if overrides is None else overrides)
    # The two options of Hydra that a run accepts.
    parser = Parser("python -m hvtrain", add_help=False)
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd")
    options, settings = parser.parse_known_args(arguments)
    check_form(settings, compose)
    check_experiment(arguments)
    run_folder = find_run_folder(arguments)
    settings = [quote_value(argument) for argument in settings]
    if not run_folder:
        folders = [f"file://{folder.absolute()}" for folder in config_dirs(arguments)]
        settings.insert(0, override("hydra.searchpath", folders))

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
            sys.exit(0)
        if tree.run.name is None:
            name = choices.get("experiment") or f"{choices.get('model')}-{choices.get('dataset')}"
            tree.run.name = name.replace("/", "-")
        values = resolve(tree)
    except Exception as error:
        raise ConfigError(explain(error, arguments, compose)) from error

    # From here on, errors follow the run's own `tracebacks` setting.
    console.shows_tracebacks = values.get("tracebacks", False)
    if notify is not None:
        values["notify"] = None if notify == "null" else secrets.split_addresses(notify)
    return values


def resolve(tree: Any) -> Settings:
    """Returns a composed run as plain values, with all references resolved except those to ${run.dir}.

    References to ${run.dir} are resolved once the run folder is known; see instantiate.build.
    """
    from omegaconf import OmegaConf

    folder = tree.run.dir
    # Escaped, so that OmegaConf does not resolve references to it.
    tree.run.dir = r"\${run.dir}"
    values: Any = OmegaConf.to_container(tree, resolve=True)
    # A shell does not expand the ~ of run.dir=~/x.
    if isinstance(folder, str):
        folder = os.path.expanduser(folder)  # noqa: PTH111
    values["run"]["dir"] = folder
    return values


def schema() -> Settings:
    """Returns the declared settings with their defaults, the base onto which Hydra composes the groups."""
    no_choices: Settings = {group: {} for group in GROUPS}
    defaults = RunConfig(**no_choices).record
    declared = {name: value for name, value in defaults.items() if name not in GROUPS}
    return declared | {"model": dataclasses.asdict(ModelOptions())}


def quote_value(argument: str) -> str:
    """Quotes the value of debug=, run.dir= or run.name= if Hydra would read it as a number.

    >>> quote_value("debug=nan"), quote_value("run.dir=2026_11_30")
    ("debug='nan'", "run.dir='2026_11_30'")
    >>> quote_value("run.name=1.10"), quote_value("run.dir=runs/1")
    ("run.name='1.10'", 'run.dir=runs/1')
    """
    return re.sub(r"(?i)^(\+*(?:debug|run\.\w+)=)(nan|\d[\w.+-]*)$", r"\1'\2'", argument)


def override(name: str, value: Any) -> str:
    """Formats NAME=VALUE so that Hydra's command-line grammar reads the value back unchanged.

    >>> override("train.ema", None), override("model.hidden", [64, 32]), override("optimizer", "sgd")
    ('train.ema=null', 'model.hidden=[64,32]', 'optimizer=sgd')
    >>> override("a.b", "it's 1"), override("a.b", "null")
    ("a.b='it\\\\'s 1'", "a.b='null'")
    >>> override("run.dir", "runs/café")
    "run.dir='runs/café'"
    """
    return f"{name}={override_value(value)}"


def override_value(value: Any) -> str:
    """Formats a value for Hydra's command-line grammar, quoting it if needed."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if isinstance(value, list | tuple):
        return f"[{','.join(map(override_value, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    # ASCII letters only: Hydra needs quotes around others.
    if re.fullmatch(r"(?ai)(?!(null|true|false|nan|inf)\Z)[a-z][\w./-]*", value):
        return value
    return QuotedString(value, Quote.single).with_quotes()


def find_run_folder(arguments: list[str]) -> Path | None:
    """Returns the folder given with --config-dir if its config.yaml holds a whole run, as a run folder's does.

    Returns None if there is no such option, or if its folder only adds choices to groups.

    Raises:
        ConfigError: The option does not name a folder, or names a run folder without config.yaml, or a folder
            whose config.yaml is not a whole run: Hydra would silently use hvtrain's own instead.
    """
    from omegaconf import OmegaConf

    for folder in config_dirs(arguments):
        if not folder.is_dir():
            raise ConfigError(
                f"--config-dir {folder} is not a folder; give the one that holds your groups, such as model/"
            )
        path = folder / "config.yaml"
        if not path.exists() and (folder / "checkpoints").is_dir():
            raise ConfigError(
                f"--config-dir {folder} is a run folder without its config.yaml; restore that, or give another folder"
            )
        if not path.exists() or path.samefile(CONFIGS / "config.yaml"):
            continue
        try:
            settings = OmegaConf.to_container(OmegaConf.create(read_file(path)))
        except Exception as error:
            raise ConfigError(f"{path} cannot be read ({error}); fix it first") from error
        if isinstance(settings, dict) and all(
            "_target_" in (settings.get(group) or ()) for group in GROUPS
        ):
            return folder.absolute()
        raise ConfigError(
            f"{path} does not have all settings of a run, and hvtrain would take its own config.yaml instead; put your "
            f"settings into groups such as {folder}/experiment/NAME.yaml"
        )
    return None
