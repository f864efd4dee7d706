"""What the two Kubernetes kinds share: their settings, their pods, and the line that the launcher's pod runs. Pure.

The pods are of the image that our Dockerfile makes: user 10001, whose own sshd is started by the word `worker`. Both
operators mount an ssh key pair, and the launcher's pod finds the hosts in HOSTFILE; it holds no rank itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from hvtrain.config.validate import setting
from hvtrain.errors import ConfigError
from hvtrain.launch.job import Job

SSH_PORT = 2222
SSH_FOLDER = "/home/hvtrain/.ssh"
HOSTFILE = "/etc/mpi/hostfile"
# Ranks run in the home of the image's user, and write below runs/.
RUNS = "/home/hvtrain/runs"
USER = 10001
# A worker's name has to fit a DNS label of 63 letters with what the operators add to it.
LONGEST_NAME = 40


@dataclass
class Settings:
    """One training on Kubernetes: equal workers, each of them a pod with some ranks."""

    image: str | None = setting(None, "the image that the cluster pulls; required")
    name: str = setting("hvtrain", "name of the job; taken until kubectl deletes the job")
    namespace: str | None = setting(None, "namespace; null: the one that kubectl is set to")
    ranks_per_worker: int = setting(1, "ranks, and slots, of one worker pod", low=1)
    gpus_per_rank: int = setting(1, "GPUs of one rank; 0: none", low=0)
    cpus_per_rank: int = setting(4, "CPU cores of one rank", low=1)
    memory_per_rank: str = setting("16Gi", "memory of one rank, shared memory included")
    shared_memory: str = setting("2Gi", "/dev/shm of one worker, for ranks of one pod to talk through")
    data_claim: str | None = setting(None, "volume claim with the data, mounted read-only at data_path")
    data_path: str = setting("/data", "where the data is mounted")
    runs_claim: str | None = setting(None, f"volume claim for results, mounted at {RUNS}; null: lost with the pods")
    retries: int = setting(3, "times a failed run is started again; it goes on from its newest checkpoint", low=0)
    keep_seconds: int = setting(86400, "seconds for which the finished job and its logs stay", low=0)


def check(job: Job, settings: Settings, kind: str) -> None:
    """Raises ConfigError for what the cluster would refuse, or what could not start there."""
    if job.hosts:
        raise ConfigError(
            f"cluster={kind} came with -H; Kubernetes chooses the hosts: set cluster.ranks_per_worker instead"
        )
    if not settings.image:
        raise ConfigError(
            f"cluster={kind} has no image; give the one that your cluster pulls: cluster.image=REGISTRY/hvtrain"
        )
    if len(settings.name) > LONGEST_NAME or not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", settings.name):
        raise ConfigError(
            f"cluster.name={settings.name} is no name for Kubernetes; it takes up to {LONGEST_NAME} of a-z, 0-9 and -, "
            f"a letter first"
        )
    for key in ("namespace", "data_claim", "runs_claim"):
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", value := getattr(settings, key) or "none"):
            raise ConfigError(f"cluster.{key}={value} is no name for Kubernetes; it takes a-z, 0-9, - and dots")
    for key in ("memory_per_rank", "shared_memory"):
        if not re.fullmatch(r"[1-9]\d*([KMGT]i|[kMGT])?", value := getattr(settings, key)):
            raise ConfigError(f"cluster.{key}={value} is no amount of memory; write 16Gi or 512Mi")
    if not re.fullmatch(r"/[^:]*", settings.data_path):
        raise ConfigError(
            f"cluster.data_path={settings.data_path} is no path for a mount; give one from / on, no colon"
        )


def num_workers(num_ranks: int, settings: Settings) -> int:
    """Worker pods for so many ranks. Raises ConfigError where a pod would be filled in part."""
    if num_ranks % settings.ranks_per_worker:
        raise ConfigError(
            f"{num_ranks} ranks do not divide into pods of cluster.ranks_per_worker={settings.ranks_per_worker}; "
            f"choose a number that divides {num_ranks}"
        )
    return num_ranks // settings.ranks_per_worker


def launcher_words(job: Job, settings: Settings, hosts: list[str]) -> list[str]:
    """horovodrun's line; hosts are its words that say where the ranks go. Horovod passes the environment on."""
    words = ["horovodrun", f"--{job.controller}", "--ssh-port", str(SSH_PORT), "-np", str(job.num_ranks), *hosts]
    return [*words, *job.command]


def launcher_pod(name: str, settings: Settings, words: list[str], job: Job) -> dict[str, Any]:
    """The pod that starts the ranks; it needs little."""
    container = _container(name, settings, words)
    if environment := job.environment:
        container["env"] = [{"name": key, "value": _literal(value)} for key, value in environment.items()]
    container["resources"] = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
    return {"restartPolicy": "Never", "securityContext": _pod_security(), "containers": [container]}


def worker_pod(name: str, settings: Settings) -> dict[str, Any]:
    """A pod with ranks: an sshd that waits for the launcher, ready once it answers."""
    container = _container(name, settings, ["worker", str(SSH_PORT)])
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}}
    ]
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if settings.data_claim:
        volumes += [{"name": "data", "persistentVolumeClaim": {"claimName": settings.data_claim, "readOnly": True}}]
        mounts += [{"name": "data", "mountPath": settings.data_path, "readOnly": True}]
    if settings.runs_claim:
        volumes += [{"name": "runs", "persistentVolumeClaim": {"claimName": settings.runs_claim}}]
        mounts += [{"name": "runs", "mountPath": RUNS}]
    ranks = settings.ranks_per_worker
    amount, unit = re.fullmatch(r"(\d+)(\D*)", settings.memory_per_rank).groups()  # type: ignore[union-attr]
    limits = {"cpu": str(ranks * settings.cpus_per_rank), "memory": f"{ranks * int(amount)}{unit}"}
    if settings.gpus_per_rank:
        limits["nvidia.com/gpu"] = str(ranks * settings.gpus_per_rank)
    container |= {
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "initialDelaySeconds": 1, "periodSeconds": 2},
        "resources": {"requests": dict(limits), "limits": limits},
        "volumeMounts": mounts,
    }
    security = _pod_security()
    return {"restartPolicy": "OnFailure", "securityContext": security, "containers": [container], "volumes": volumes}


def metadata(settings: Settings, **more: Any) -> dict[str, Any]:
    """The name, and the namespace where one was chosen."""
    return {"name": settings.name, **({"namespace": settings.namespace} if settings.namespace else {}), **more}


def text(documents: list[dict[str, Any]], about: str) -> str:
    """The documents as one YAML file under a comment."""
    comment = f"# {about}\n# Whoever may read the job reads the values under env: no secrets there.\n"
    return comment + yaml.safe_dump_all(documents, sort_keys=False, width=120, allow_unicode=True)


def _container(name: str, settings: Settings, words: list[str]) -> dict[str, Any]:
    """No command, but arguments: the image's entry point takes them."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {
        "name": name,
        "image": settings.image,
        "args": [_literal(word) for word in words],
        "securityContext": security,
    }


def _literal(word: str) -> str:
    """The word for args and env, in which Kubernetes replaces $(NAME) and reads $$ as a dollar."""
    return word.replace("$", "$$")


def _pod_security() -> dict[str, Any]:
    """Pod Security's level "restricted"; by the group the user may read the mounted key and write to claims."""
    user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    return {**user, "seccompProfile": {"type": "RuntimeDefault"}}
