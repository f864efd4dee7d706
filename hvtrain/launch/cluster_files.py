"""The cluster chosen on the command line: parses its settings, and renders, writes and submits its job files."""

import shlex
import shutil
import subprocess
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import jinja2
import yaml

from hvtrain.config.choices import CONFIGS
from hvtrain.config.validate import nearest, typed, types_of
from hvtrain.errors import ConfigError
from hvtrain.launch.cluster_kinds import KINDS
from hvtrain.launch.job import ClusterKind, Job
from hvtrain.system.command import make_output
from hvtrain.system.files import write_atomic


def texts(cluster: ClusterKind, job: Job, folders: Sequence[Path] = ()) -> dict[str, str]:
    """Returns the text of each of the job's files by name.

    Raises ConfigError if the job does not fit the cluster or its settings, or a template fails.

    folders: the user's config folders, whose templates override hvtrain's.
    """
    if job.hosts and cluster.no_hosts:
        raise ConfigError(f"cluster={cluster.kind} does not take -H; {cluster.no_hosts}")
    if job.is_elastic and cluster.no_elastic:
        raise ConfigError(f"cluster={cluster.kind} does not take --min-np; {cluster.no_elastic}")

    values = {"job": job, "cluster": cluster, **cluster.values(job)}
    return {name: _render(name, folders, values) for name in cluster.files}


def write(cluster: ClusterKind, job: Job, folder: Path, folders: Sequence[Path] = ()) -> list[Path]:
    """Writes the job's files into the folder, and returns their paths. Raises ConfigError or StorageError."""
    files = texts(cluster, job, folders)
    make_output(folder, may_hold_files=True)
    # All files are rendered by now, so an error in a template leaves no partial set behind.
    for name, text in files.items():
        write_atomic(folder / name, text)
    return [folder / name for name in files]


def submission(cluster: ClusterKind, folder: Path) -> list[str]:
    """Returns the command that submits the files in the folder."""
    return [part.replace("{}", str(folder)) for part in cluster.submit.split()]


def submit(cluster: ClusterKind, command: list[str]) -> int:
    """Runs the command from `submission`, and returns its exit code.

    Raises ConfigError if the program that it needs is not installed here.
    """
    # A command may run a bash script: check the program that the script
    # needs, since bash is always installed.
    program = cluster.program or command[0]
    if not shutil.which(program):
        raise ConfigError(
            f"{program} is not installed here; copy the files to a host that has it, or write them with --dry-run"
        )
    return subprocess.call(command)


def choose(arguments: list[str], folders: list[Path]) -> ClusterKind | None:
    """Returns the settings of cluster=KIND cluster.SETTING=VALUE; None for ssh, which needs no files.

    Users can define a KIND of their own in FOLDER/cluster/KIND.yaml. The file names the kind that theirs is
    based on, for example `kind: slurm`, and holds settings, which the command line overrides. Raises
    ConfigError for an unknown kind or setting, or a wrong value.
    """
    values = {}
    # The arguments are those before -- that are not options.
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or (name != "cluster" and not name.startswith("cluster.")):
            raise ConfigError(
                f"{argument!r} is not a setting of the launcher; write the run's settings after --"
            )
        values[name] = value

    kind, tree, unparsed = _own_kind(values.pop("cluster", "ssh"), folders)
    if kind == "ssh":
        # Settings of the command line, or of a file with `kind: ssh`.
        for name in (*values, *tree):
            raise ConfigError(f"{name}: ssh has no such setting; choose cluster={'|'.join(KINDS)}")
        return None
    if kind not in KINDS:
        raise ConfigError(
            f"cluster={kind} is not one of ssh, {', '.join(KINDS)}; {nearest(kind, list(KINDS))}"
        )

    # Values on the command line are text, so their types come from the schema.
    schema = KINDS[kind]
    hints = get_type_hints(schema)
    for key, value in tree.items():
        if str in types_of(hints.get(key)) and isinstance(value, int | float):
            tree[key] = unparsed.get(key, str(value))
    for name, text in values.items():
        key = name.removeprefix("cluster.")
        tree[key] = _value(text, hints.get(key, str))
    return typed(schema, tree, "cluster.")


def _own_kind(kind: str, folders: Sequence[Path]) -> tuple[str, dict[str, Any], Mapping[str, str]]:
    """Reads the user's file of a kind from the first folder that has one.

    Returns the kind that it is based on, its settings, and the settings' text. If there is no file, returns
    the kind itself and no settings. Raises ConfigError if the file is not YAML, holds no settings, or names
    no kind.
    """
    for folder in folders:
        path = folder / "cluster" / f"{kind}.yaml"
        if not path.is_file():
            continue
        text = path.read_text("utf-8")
        tree = _yaml(text, str(path)) or {}
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} holds no settings; write lines such as kind: slurm")
        if "kind" not in tree:
            raise ConfigError(f"{path} names no kind of cluster; write a line such as kind: slurm")
        # The text is needed too, since YAML reads the time 12:00:00 as a number.
        unparsed = yaml.BaseLoader(text).get_single_data() or {}
        return str(tree.pop("kind")), tree, unparsed
    return kind, {}, {}


def _value(text: str, hint):
    """Converts a setting's text to its type. Strings stay text: YAML would read the time 12:00:00 as a number."""
    options = types_of(hint)
    if text == "null" and type(None) in options:
        return None
    return text if str in options else _yaml(text, text)


def _yaml(text: str, source: str):
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source} is not YAML: {reason}; fix it") from error


def _render(name: str, folders: Sequence[Path], values: dict[str, Any]) -> str:
    """Returns the text of a file, rendered from the first cluster/NAME.j2 in the folders or else in conf/.

    Raises ConfigError if the template fails.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder / "cluster" for folder in (*folders, CONFIGS)]),
        undefined=jinja2.StrictUndefined,  # A misspelled name in a template is an error, not an empty string.
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Filters that escape any text: {{ value | quote }} in a shell
    # script, {{ value | yaml }} in YAML.
    environment.filters.update(quote=quote, yaml=yaml_text)
    try:
        return environment.get_template(f"{name}.j2").render(values)
    except Exception as error:  # A template is the user's input and can fail in any way.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"template {frame.filename}, line {frame.lineno}: {error}; fix the template"
        ) from error


def quote(value: str | Sequence[str]) -> str:
    """Quotes a string, or the words of a command line, for the shell."""
    return shlex.quote(value) if isinstance(value, str) else shlex.join(value)


def yaml_text(value: object) -> str:
    """Returns a value as a double-quoted YAML scalar on one line."""
    return yaml.safe_dump(
        str(value), default_style='"', width=float("inf"), allow_unicode=True
    ).strip()
