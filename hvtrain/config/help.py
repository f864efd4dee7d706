"""What `python -m hvtrain --help` prints: groups with their choices, and all settings with their meaning. Pure."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

from hvtrain.config.schema import GROUPS, RunConfig

USAGE = """\
python -m hvtrain [GROUP=CHOICE ...] [SETTING=VALUE ...]

Trains a Keras model, on one process or, under a launcher, on as many as it starts:
  python -m hvtrain                                             one process, for debugging
  horovodrun -np 2 python -m hvtrain                            two ranks on this host
  horovodrun -np 16 -H s1:4,s2:4,s3:4,s4:4 python -m hvtrain    four hosts with four GPUs each
  mpirun -np 2 python -m hvtrain                                the same without horovodrun
"""

MORE = """\
A setting of a chosen group is changed with GROUP.NAME=VALUE, for example optimizer.learning_rate=0.01.
Every data set takes data.uneven: trim (examples that fill no batch on all ranks are left out of the epoch),
pad (short batches at its end, weighted) or error; and data.on_error: stop, or skip (what cannot be read is
left out and counted). Several callbacks: callbacks=[early_stopping,reduce_lr_on_plateau].
  --cfg job          print the composed run and stop
  --config-dir DIR   add a folder of your own with the same groups
"""


def help_text(folders: list[Path]) -> str:
    """The help of a run; the groups' choices are the YAML files in the given folders of configs."""
    lines = [USAGE, "GROUPS (the choice after * is the default)"]
    defaults = _defaults(folders[0] / "config.yaml")
    for group in (*GROUPS, "callbacks", "experiment"):
        lines.append(f"  {group}=")
        for folder in folders:
            for path in sorted((folder / group).glob("*.yaml")):
                mark = "*" if defaults.get(group) == path.stem else " "
                lines.append(f"   {mark} {path.stem:<20} {_first_comment(path)}")
    lines += ["", "SETTINGS (with their defaults)", *_settings(RunConfig, ""), "", MORE]
    return "\n".join(lines)


def _settings(schema: type, prefix: str) -> list[str]:
    lines = []
    for item in dataclasses.fields(schema):
        section = typing.get_type_hints(schema)[item.name]
        if dataclasses.is_dataclass(section):
            lines += _settings(typing.cast(type, section), f"{prefix}{item.name}.")
        elif item.name not in (*GROUPS, "callbacks"):
            choices = item.metadata.get("choices")
            doc = item.metadata["doc"] + (f" ({', '.join(choices)})" if choices else "")
            default = "null" if item.default is None else str(item.default).lower()
            lines.append(f"  {prefix + item.name + '=' + default:<36} {doc}")
    return lines


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ").strip() for line in lines if line.startswith("#") and "@package" not in line]
    return comments[0] if comments else ""


def _defaults(path: Path) -> dict[str, str]:
    lines = [line.strip().removeprefix("- ") for line in path.read_text(encoding="utf-8").splitlines()]
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines if ": " in line)}
