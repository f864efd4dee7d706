"""The kinds of clusters that take files: their settings from the command line, their files, and how to submit them."""

import shlex
import shutil
import subprocess
import traceback
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml

from hvtrain.config.compose import CONFIGS
from hvtrain.config.validate import nearest, typed
from hvtrain.errors import ConfigError
from hvtrain.launch.clusters import docker, kubernetes, slurm, spark
from hvtrain.launch.job import Job


@dataclass(frozen=True)
class Kind:
    """A kind of cluster.

    Args:
        about: one line of help.
        settings: the dataclass of cluster.SETTING=VALUE.
        values: what the templates need besides `job` and `cluster`; raises ConfigError for what cannot start.
        files: each is rendered from its template, conf/cluster/FILE.j2.
        submit: the command that submits the files; {} stands for their folder.
        fixed: why it takes no --min-np, and what to do instead; empty: it does.
        chosen: likewise for -H.
        program: what submit needs; None: its first word.
        starts_roles: it also starts parameter servers, a coordinator, or one process for several GPUs.
    """

    about: str
    settings: type
    values: Callable[[Job, Any], dict[str, Any]]
    files: tuple[str, ...]
    submit: str
    fixed: str = ""
    chosen: str = ""
    program: str | None = None
    starts_roles: bool = False


_BY_KUBERNETES = "Kubernetes chooses the hosts: set cluster.ranks_per_worker instead"
# Not `kubectl apply`, which starts nothing if an old job has the name.
KINDS = {
    "slurm": Kind(
        "a batch file for Slurm, which requeues the job at its time limit",
        slurm.Settings,
        slurm.values,
        ("hvtrain.sbatch",),
        "sbatch {}/hvtrain.sbatch",
        fixed="an allocation keeps its size: leave --min-np out",
        chosen="Slurm chooses the hosts: leave -H out and set cluster.nodes",
        starts_roles=True,
    ),
    "mpijob": Kind(
        "an MPIJob for Kubernetes with Kubeflow's MPI operator, kubeflow.org/v2beta1",
        kubernetes.Settings,
        kubernetes.values,
        ("mpijob.yaml",),
        "kubectl create -f {}/mpijob.yaml",
        chosen=_BY_KUBERNETES,
    ),
    "trainjob": Kind(
        "a TrainJob for Kubernetes with Kubeflow Trainer, trainer.kubeflow.org/v1alpha1",
        kubernetes.Settings,
        kubernetes.values,
        ("trainjob.yaml",),
        "kubectl create -f {}/trainjob.yaml",
        fixed="a TrainJob keeps its size: leave it out or use cluster=mpijob",
        chosen=_BY_KUBERNETES,
    ),
    "docker": Kind(
        "a `docker run` script for hosts with GPUs, and a trial of two containers on this machine",
        docker.Settings,
        docker.values,
        ("docker-run.sh", "compose.yaml"),
        "docker compose --file {}/compose.yaml up --exit-code-from s1",
        fixed="its hosts are fixed: leave --min-np out",
    ),
    "spark": Kind(
        "the executors of a Spark cluster, YARN or standalone, by spark-submit",
        spark.Settings,
        spark.values,
        ("spark-submit.sh", "hvtrain_on_spark.py"),
        "bash {}/spark-submit.sh",
        fixed="its ranks are fixed: leave --min-np out",
        chosen="Spark chooses the hosts: give -np alone",
        program="spark-submit",
    ),
}


@dataclass(frozen=True)
class Cluster:
    """A kind of cluster with its settings, or ssh, which takes no files; folders may have templates that win."""

    kind: str
    settings: Any = None
    folders: tuple[Path, ...] = ()

    def texts(self, job: Job) -> dict[str, str]:
        """The job's files by name. Raises ConfigError."""
        kind = KINDS[self.kind]
        for option, given, why in (("-H", job.hosts, kind.chosen), ("--min-np", job.is_elastic, kind.fixed)):
            if given and why:
                raise ConfigError(f"cluster={self.kind} came with {option}; {why}")
        values = {"job": job, "cluster": self.settings, **kind.values(job, self.settings)}
        return {name: _render(name, self.folders, values) for name in kind.files}

    def write(self, job: Job, folder: Path) -> list[Path]:
        """Writes the job's files into the folder. Raises ConfigError."""
        texts = self.texts(job)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {folder} cannot be written: {error.strerror}; choose another") from error
        return [folder / name for name in texts]

    def command(self, folder: Path) -> list[str]:
        """Submits the files in the folder."""
        return [word.replace("{}", str(folder)) for word in KINDS[self.kind].submit.split()]

    def submit(self, folder: Path) -> int:
        """Runs the command; its exit code. Raises ConfigError if it is not installed here."""
        command = self.command(folder)
        program = KINDS[self.kind].program or command[0]
        if shutil.which(program):
            return subprocess.call(command)
        advice = "copy the files to a host that has it, or write them with --dry-run"
        raise ConfigError(f"{program} is not installed here; {advice}")


def choose(words: list[str], folders: list[Path]) -> Cluster:
    """The cluster of cluster=KIND cluster.SETTING=VALUE; the user's own KIND is FOLDER/cluster/KIND.yaml.

    Such a file holds `kind: slurm` and settings, which the command line overrides. Raises ConfigError.
    """
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or (name != "cluster" and not name.startswith("cluster.")):
            raise ConfigError(f"{word!r} is not a setting of the launcher; those of the run come after --")
        given[name] = value
    kind = given.pop("cluster", "ssh")
    tree: dict[str, Any] = {}
    if own := next((file for folder in folders if (file := folder / "cluster" / f"{kind}.yaml").is_file()), None):
        tree = dict(_yaml(own.read_text(encoding="utf-8"), str(own)) or {})
        kind = str(tree.pop("kind", "?"))
    if kind == "ssh":
        if given:
            raise ConfigError(f"{next(iter(given))}: ssh has no such settings; choose cluster={'|'.join(KINDS)}")
        return Cluster("ssh")
    if kind not in KINDS:
        raise ConfigError(f"cluster={kind} is not one of ssh, {', '.join(KINDS)}; {nearest(kind, list(KINDS))}")
    schema = KINDS[kind].settings
    hints = typing.get_type_hints(schema)
    for name, text in given.items():
        key = name.removeprefix("cluster.")
        if key not in hints:
            raise ConfigError(f"unknown setting {name!r} of cluster={kind}; {nearest(key, list(hints))}")
        tree[key] = _value(text, hints[key])
    return Cluster(kind, typed(schema, tree, "cluster."), tuple(folders))


def _value(text: str, hint: Any) -> Any:
    """A setting's value. Texts stay as they are: YAML would read the time 12:00:00 as a number."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if text == "null" and type(None) in options:
        return None
    return text if str in options else _yaml(text, text)


def _yaml(text: str, place: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{place} is not YAML: {' '.join(str(error).split())}") from error


def _render(name: str, folders: Sequence[Path], values: dict[str, Any]) -> str:
    """The text of a file, from the first cluster/NAME.j2 in the folders and then in conf/. Raises ConfigError."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder / "cluster" for folder in (*folders, CONFIGS)]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(quote=quote, yaml=yaml_text)
    try:
        return environment.get_template(f"{name}.j2").render(values)
    except Exception as error:  # A template is the user's input and can fail in any way.
        place, said = traceback.extract_tb(error.__traceback__)[-1], " ".join(str(error).split())
        raise ConfigError(f"template {place.filename}, line {place.lineno}: {said}; fix the template") from error


def quote(words: str | Sequence[str]) -> str:
    """One word, or several, quoted for the shell."""
    return shlex.quote(words) if isinstance(words, str) else shlex.join(words)


def yaml_text(value: object) -> str:
    """A text as a double-quoted scalar of YAML, on one line."""
    text: str = yaml.dump(str(value), Dumper=yaml.SafeDumper, default_style='"', width=float("inf"), allow_unicode=True)
    return text.strip()
