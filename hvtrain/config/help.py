"""The part of --help that is generated: groups with their choices, and settings with their defaults. Pure."""

import dataclasses
import json
import typing
from pathlib import Path

from hvtrain.config.schema import GROUPS, RunConfig

MORE = """\
A setting of a chosen group is changed with GROUP.NAME=VALUE, for example optimizer.learning_rate=0.01.
Every data set takes data.uneven: trim (examples that fill no batch on all ranks are left out of the epoch),
pad (short batches at its end, weighted) or error; and data.on_error: stop, or skip (what cannot be read is
left out and counted). Several callbacks: callbacks=[early_stopping,reduce_lr_on_plateau].
"""


def run_settings(folders: list[Path]) -> str:
    """Groups and settings of a run; the groups' choices are the YAML files in the given folders of configs."""
    lines = ["", "GROUPS (the choice after * is the default)"]
    defaults = _defaults(folders[0] / "config.yaml")
    for group in (*GROUPS, "callbacks", "experiment"):
        lines.append(f"  {group}=")
        for folder in folders:
            for path in sorted((folder / group).glob("*.yaml")):
                mark = "*" if defaults.get(group) == path.stem else " "
                lines.append(f"   {mark} {path.stem:<20} {_first_comment(path)}")
    return "\n".join([*lines, "", "SETTINGS (with their defaults)", *settings(RunConfig), "", MORE])


def settings(schema: type, prefix: str = "") -> list[str]:
    """One line for each setting of a dataclass, those of its sections too: its name, default and meaning."""
    lines = []
    for item in dataclasses.fields(schema):
        section = typing.get_type_hints(schema)[item.name]
        if dataclasses.is_dataclass(section):
            lines += settings(typing.cast(type, section), f"{prefix}{item.name}.")
        elif item.default is not dataclasses.MISSING:
            choices = item.metadata["choices"]
            doc = item.metadata["doc"] + (f" ({', '.join(choices)})" if choices else "")
            default = item.default if isinstance(item.default, str) else json.dumps(item.default)
            lines.append(f"  {f'{prefix}{item.name}={default}':<36} {doc}")
    return lines


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ").strip() for line in lines if line.startswith("#") and "@package" not in line]
    return comments[0] if comments else ""


def _defaults(path: Path) -> dict[str, str]:
    lines = [line.strip().removeprefix("- ") for line in path.read_text(encoding="utf-8").splitlines()]
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines if ": " in line)}
