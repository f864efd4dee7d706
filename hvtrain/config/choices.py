"""Lists the choices of each group, from conf/ and --config-dir, and all settings, for --help."""

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_type_hints

from hvtrain.config.schema import BUNDLES, GROUPS, SEVERAL, ModelOptions, RunConfig

# conf/ is beside the package in a checkout and inside it in a wheel.
CONFIGS = next(
    folder / "conf" for folder in Path(__file__).parents[1:3] if (folder / "conf").is_dir()
)

ALL_GROUPS = (*GROUPS, *SEVERAL, *BUNDLES)

_NOTES = """\
A setting of a chosen group is changed with GROUP.NAME=VALUE, for example optimizer.learning_rate=0.01.
Every data set takes data.uneven: trim (examples that fill no batch on all ranks are left out of the epoch),
pad (short batches at its end, weighted), auto (pad if trim would leave out more than 1%) or error; and
data.on_error: stop, or skip (what cannot be read is left out and counted).
Several callbacks: callbacks=[early_stopping,reduce_lr_on_plateau]; several trackers: tracker=[tensorboard,mlflow].
Several layers of augmentation, in this order: augment=[random_flip,mix_up].
"""


def config_dirs(arguments: Sequence[str]) -> list[Path]:
    """Returns the folders given with --config-dir.

    >>> config_dirs(["-cd", "mine", "model=mlp", "--config-dir=ours"])
    [PosixPath('mine'), PosixPath('ours')]
    """
    # Not parsed as in compose(): the arguments may be another program's,
    # whose -c means something else.
    folders = []
    for option, value in pairwise([*arguments, ""]):
        if option in ("--config-dir", "-cd") and value:
            folders.append(Path(value))
        elif option.startswith(("--config-dir=", "-cd=")):
            folders.append(Path(option.partition("=")[2]))
    return folders


def choice_files(group: str, arguments: Sequence[str] = ()) -> list[Path]:
    """Returns the YAML files of a group's choices: hvtrain's own, then those of --config-dir."""
    folders = [CONFIGS, *config_dirs(arguments)]
    return [path for folder in folders for path in sorted((folder / group).glob("*.yaml"))]


def run_settings(arguments: list[str]) -> str:
    """Lists the groups with their choices, and the settings with their defaults, for --help."""
    lines = []
    # A choice on the command line is shown as its whole file, whose comments explain its settings.
    for argument in arguments:
        group, _, choice = argument.partition("=")
        for path in choice_files(group, arguments):
            if path.stem == choice:
                text = textwrap.indent(path.read_text("utf-8").rstrip(), "  ")
                lines += ["", f"SETTINGS OF {argument} (as {group}.NAME=VALUE)", text]
    lines += ["", "GROUPS (the choice after * is the default)"]
    for group in ALL_GROUPS:
        lines += _group_help(group, arguments)

    lines += ["", "SETTINGS (with their defaults)"]
    lines += setting_lines(RunConfig)
    lines += setting_lines(ModelOptions, "model.")
    return "\n".join([*lines, "", _NOTES])


def settings_of(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yields the dotted name, the type and the field of each setting in a dataclass and its nested dataclasses."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        name = f"{prefix}{item.name}"
        hint = hints[item.name]
        if is_dataclass(hint):
            yield from settings_of(cast(type, hint), f"{name}.")
        elif item.default is not MISSING:
            yield name, hint, item


def setting_lines(schema: type, prefix: str = "") -> list[str]:
    """Returns a line for each setting in a dataclass and its nested dataclasses: name, default and meaning."""
    lines = []
    for name, _, item in settings_of(schema, prefix):
        default = item.default
        # JSON writes None and booleans as YAML does: null, true, false.
        if not isinstance(default, str):
            default = json.dumps(default)
        choices = item.metadata["choices"]
        limits = f" ({', '.join(choices)})" if choices else ""
        assignment = f"{name}={default}"
        lines.append(f"  {assignment:<36} {item.metadata['doc']}{limits}")
    return lines


def _group_help(group: str, arguments: list[str]) -> list[str]:
    """Returns a line for each choice of a group, with the first comment of its file."""
    default = default_choice(group)
    lines = [f"  {group}="]
    for path in choice_files(group, arguments):
        comments = re.findall(r"(?m)^#(?!.*@package).*", path.read_text("utf-8"))
        about = "".join(comments[:1]).strip("# ")
        mark = "*" if path.stem == default else " "
        lines.append(f"   {mark} {path.stem:<20} {about}")
    return lines


def default_choice(group: str) -> str | None:
    """Reads a group's default choice from the defaults list in conf/config.yaml, whose lines read "  - model: cnn"."""
    text = (CONFIGS / "config.yaml").read_text("utf-8")
    match = re.search(rf"(?m)^ *- {group}: *(\S+)", text)
    return match[1] if match else None
