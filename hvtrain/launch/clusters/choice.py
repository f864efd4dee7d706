"""The kinds of clusters that take files, their settings from the words of a command line, and the files written."""

from __future__ import annotations

import shutil
import subprocess
import types
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from hvtrain.config.validate import nearest, typed
from hvtrain.errors import ConfigError
from hvtrain.launch.clusters import docker, mpijob, slurm, spark, trainjob
from hvtrain.launch.job import Job

KINDS: dict[str, types.ModuleType] = {
    "slurm": slurm,
    "mpijob": mpijob,
    "trainjob": trainjob,
    "docker": docker,
    "spark": spark,
}


@dataclass(frozen=True)
class Cluster:
    """A kind of cluster and its settings, or ssh, which takes no files."""

    kind: str
    settings: Any = None

    def write(self, job: Job, folder: Path) -> list[Path]:
        """Writes the job's files into the folder. Raises ConfigError."""
        texts = KINDS[self.kind].files(job, self.settings)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {folder} cannot be written: {error.strerror}; choose another") from error
        return [folder / name for name in texts]

    def commands(self, job: Job, folder: Path) -> list[list[str]]:
        """What hands the files to the cluster."""
        commands: list[list[str]] = KINDS[self.kind].commands(job, self.settings, str(folder))
        return commands


def submit(commands: list[list[str]]) -> int:
    """Runs the commands one after the other; the code of the first that failed. Raises ConfigError."""
    for command in commands:
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"there is no {command[0]} here; take the files to where it is, or only write them with --dry-run"
            )
        code = subprocess.call(command)
        if code:
            return code
    return 0


def choose(words: list[str], folders: list[Path]) -> Cluster:
    """The cluster of the words cluster=KIND cluster.SETTING=VALUE; a KIND of one's own is FOLDER/cluster/KIND.yaml.

    Such a file holds `kind: slurm` and settings, to be changed by words. Raises ConfigError.
    """
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or (name != "cluster" and not name.startswith("cluster.")):
            raise ConfigError(f"{word!r} is no word of the launcher; those of the run come after --")
        given[name] = value
    kind = given.pop("cluster", "ssh")
    tree: dict[str, Any] = {}
    own = next((file for folder in folders if (file := folder / "cluster" / f"{kind}.yaml").is_file()), None)
    if own:
        tree = dict(_yaml(own.read_text(encoding="utf-8"), str(own)) or {})
        kind = str(tree.pop("kind", "?"))
    if kind == "ssh":
        if given:
            raise ConfigError(f"{next(iter(given))}: ssh has no such settings; choose cluster={'|'.join(KINDS)}")
        return Cluster("ssh")
    if kind not in KINDS:
        raise ConfigError(f"cluster={kind} is not one of ssh, {', '.join(KINDS)}; {nearest(kind, list(KINDS))}")
    schema = KINDS[kind].Settings
    hints = typing.get_type_hints(schema)
    for name, text in given.items():
        key = name.removeprefix("cluster.")
        if key not in hints:
            raise ConfigError(f"unknown setting {name!r} of cluster={kind}; {nearest(key, list(hints))}")
        tree[key] = _value(text, hints[key])
    return Cluster(kind, typed(schema, tree, "cluster."))


def settings_help(kind: str) -> list[str]:
    """One line for each setting of a kind, with its default."""
    return [
        f"    {'cluster.' + item.name + '=' + ('null' if item.default is None else str(item.default)):<36} "
        f"{item.metadata['doc']}"
        for item in fields(KINDS[kind].Settings)
    ]


def _value(text: str, hint: Any) -> Any:
    """A word's value. Texts stay as they are: YAML would read the time 12:00:00 as a number."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if text == "null" and type(None) in options:
        return None
    return text if str in options else _yaml(text, text)


def _yaml(text: str, place: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{place} is not YAML: {' '.join(str(error).split())}") from error
