"""The cluster that the command line chooses: its settings, its files, and how they are submitted."""

import shlex
import shutil
import subprocess
import traceback
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from hvtrain.config.compose import CONFIGS
from hvtrain.config.validate import nearest, typed
from hvtrain.errors import ConfigError
from hvtrain.launch.cluster_kinds import KINDS, ClusterKind
from hvtrain.launch.job import Job


def texts(cluster: ClusterKind, job: Job, folders: Sequence[Path] = ()) -> dict[str, str]:
    """The job's files by name. Raises ConfigError.

    folders: the user's own, whose templates win over ours.
    """
    if job.hosts and cluster.no_hosts:
        raise ConfigError(f"cluster={cluster.kind} came with -H; {cluster.no_hosts}")
    if job.is_elastic and cluster.no_elastic:
        raise ConfigError(f"cluster={cluster.kind} came with --min-np; {cluster.no_elastic}")

    values = {"job": job, "cluster": cluster, **cluster.values(job)}
    return {name: _render(name, folders, values) for name in cluster.files}


def write(cluster: ClusterKind, job: Job, folder: Path, folders: Sequence[Path] = ()) -> list[Path]:
    """Writes the job's files into the folder. Raises ConfigError."""
    files = texts(cluster, job, folders)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # All of them were rendered before, so an error leaves no half of them behind.
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {folder} cannot be written: {error.strerror}; choose another") from error
    return [folder / name for name in files]


def submission(cluster: ClusterKind, folder: Path) -> list[str]:
    """The command that submits the files in the folder."""
    return [part.replace("{}", str(folder)) for part in cluster.submit.split()]


def submit(cluster: ClusterKind, folder: Path) -> int:
    """Runs the command.

    Returns its exit code. Raises ConfigError if it is not installed here.
    """
    command = submission(cluster, folder)
    # Some commands are started by a shell, and bash is always there.
    program = cluster.program or command[0]
    if not shutil.which(program):
        raise ConfigError(
            f"{program} is not installed here; copy the files to a host that has it, or write them with --dry-run"
        )
    return subprocess.call(command)


def choose(arguments: list[str], folders: list[Path]) -> ClusterKind | None:
    """The settings of cluster=KIND cluster.SETTING=VALUE; the user's own KIND is FOLDER/cluster/KIND.yaml.

    Such a file holds `kind: slurm` and settings, which the command line overrides. None for ssh,
    which takes no files. Raises ConfigError.
    """
    values: dict[str, str] = {}
    # All that stands before -- and is no option.
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or (name != "cluster" and not name.startswith("cluster.")):
            raise ConfigError(f"{argument!r} is not a setting of the launcher; those of the run come after --")
        values[name] = value

    kind = values.pop("cluster", "ssh")
    # The first folder that has such a file wins.
    tree: dict[str, Any] = {}
    for folder in folders:
        path = folder / "cluster" / f"{kind}.yaml"
        if path.is_file():
            tree = dict(_yaml(path.read_text(encoding="utf-8"), str(path)) or {})
            kind = str(tree.pop("kind", "?"))
            break

    if kind == "ssh":
        if values:
            raise ConfigError(f"{next(iter(values))}: ssh has no such settings; choose cluster={'|'.join(KINDS)}")
        return None
    if kind not in KINDS:
        raise ConfigError(f"cluster={kind} is not one of ssh, {', '.join(KINDS)}; {nearest(kind, list(KINDS))}")

    # Types are read from the schema: a number in YAML is a text on the command line.
    schema = KINDS[kind]
    hints = typing.get_type_hints(schema)
    for name, text in values.items():
        key = name.removeprefix("cluster.")
        tree[key] = _value(text, hints.get(key, str))
    cluster: ClusterKind = typed(schema, tree, "cluster.")
    return cluster


def _value(text: str, hint: Any) -> Any:
    """A setting's value. Texts stay as they are: YAML would read the time 12:00:00 as a number."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if text == "null" and type(None) in options:
        return None
    return text if str in options else _yaml(text, text)


def _yaml(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from error


def _render(name: str, folders: Sequence[Path], values: dict[str, Any]) -> str:
    """The text of a file, from the first cluster/NAME.j2 in the folders and then in conf/.

    Raises ConfigError.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder / "cluster" for folder in (*folders, CONFIGS)]),
        undefined=jinja2.StrictUndefined,  # A misspelled name in a template is an error, and not an empty text.
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # So that any text arrives as it was: {{ value | quote }} in a shell script, {{ value | yaml }}
    # in YAML.
    environment.filters.update(quote=quote, yaml=yaml_text)
    try:
        return environment.get_template(f"{name}.j2").render(values)
    except Exception as error:  # A template is the user's input and can fail in any way.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())
        raise ConfigError(f"template {frame.filename}, line {frame.lineno}: {message}; fix the template") from error


def quote(value: str | Sequence[str]) -> str:
    """A text, or the parts of a command line, quoted for the shell."""
    return shlex.quote(value) if isinstance(value, str) else shlex.join(value)


def yaml_text(value: object) -> str:
    """A text as a double-quoted scalar of YAML, on one line."""
    text: str = yaml.dump(
        str(value),
        Dumper=yaml.SafeDumper,
        default_style='"',
        width=float("inf"),
        allow_unicode=True,
    )
    return text.strip()
