"""The kinds of clusters that take files: their settings from the command line, their files, and how to submit them."""

import shutil
import subprocess
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hvtrain.config.validate import nearest, typed
from hvtrain.errors import ConfigError
from hvtrain.launch.clusters import docker, kubernetes, slurm, spark
from hvtrain.launch.clusters.render import render
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
        program: what submit needs; None: its first word.
    """

    about: str
    settings: type
    values: Callable[[Job, Any], dict[str, Any]]
    files: tuple[str, ...]
    submit: str
    program: str | None = None


# Not `kubectl apply`, which starts nothing if an old job has the name.
KINDS = {
    "slurm": Kind(
        "a batch file for Slurm, which requeues the job at its time limit",
        slurm.Settings,
        slurm.values,
        ("hvtrain.sbatch",),
        "sbatch {}/hvtrain.sbatch",
    ),
    "mpijob": Kind(
        "an MPIJob for Kubernetes with Kubeflow's MPI operator, kubeflow.org/v2beta1",
        kubernetes.Settings,
        kubernetes.mpijob,
        ("mpijob.yaml",),
        "kubectl create -f {}/mpijob.yaml",
    ),
    "trainjob": Kind(
        "a TrainJob for Kubernetes with Kubeflow Trainer, trainer.kubeflow.org/v1alpha1",
        kubernetes.Settings,
        kubernetes.trainjob,
        ("trainjob.yaml",),
        "kubectl create -f {}/trainjob.yaml",
    ),
    "docker": Kind(
        "a `docker run` script for hosts with GPUs, and a trial of two containers on this machine",
        docker.Settings,
        docker.values,
        ("docker-run.sh", "compose.yaml"),
        "docker compose --file {}/compose.yaml up --exit-code-from s1",
    ),
    "spark": Kind(
        "the executors of a Spark cluster, YARN or standalone, by spark-submit",
        spark.Settings,
        spark.values,
        ("spark-submit.sh", "hvtrain_on_spark.py"),
        "bash {}/spark-submit.sh",
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
        values = {"job": job, "cluster": self.settings, **kind.values(job, self.settings)}
        return {name: render(name, self.folders, values) for name in kind.files}

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
        if shutil.which(program) is None:
            raise ConfigError(
                f"{program} is not installed here; copy the files to a host that has it, or write them with --dry-run"
            )
        return subprocess.call(command)


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
