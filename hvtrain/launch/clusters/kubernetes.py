"""Settings and checks of MPIJob and TrainJob, the two kinds of job for Kubernetes. Pure.

The pods (conf/cluster/kubernetes-pods.yaml.j2) have the image that our Dockerfile makes: user 10001, whose own sshd
starts with the argument `worker`. Both operators mount an ssh key pair and give the launcher's pod, which has no rank,
the list of hosts.
"""

import re
from dataclasses import dataclass
from typing import Any

from hvtrain.config.validate import setting
from hvtrain.errors import ConfigError
from hvtrain.launch.clusters import check_texts
from hvtrain.launch.job import Job


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
    shared_memory: str = setting("2Gi", "/dev/shm of one worker, through which ranks of one pod talk")
    data_claim: str | None = setting(None, "volume claim with the data, mounted read-only at data_path")
    data_path: str = setting("/data", "where the data is mounted")
    runs_claim: str | None = setting(
        None, "volume claim for results, mounted at /home/hvtrain/runs; null: lost with the pods"
    )
    retries: int = setting(3, "times a failed run is started again, from its newest checkpoint", low=0)
    keep_seconds: int = setting(86400, "seconds for which the finished job and its logs stay", low=0)


def values(job: Job, settings: Settings) -> dict[str, Any]:
    """What the templates need. Raises ConfigError for what the cluster would refuse, or what could not start there."""
    if not settings.image:
        advice = "give the one that your cluster pulls: cluster.image=REGISTRY/hvtrain"
        raise ConfigError(f"cluster.image is not set; {advice}")
    # A worker's name has to fit a DNS label of 63 letters with what the operators add to it.
    short = "a name for Kubernetes; use up to 40 of a-z, 0-9 and -, a letter first"
    check_texts(settings, ["name"], r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", short)
    names = "a name for Kubernetes; use a-z, 0-9, - and dots"
    check_texts(settings, ("namespace", "data_claim", "runs_claim"), r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", names)
    amount = "an amount of memory; write 16Gi or 512Mi"
    check_texts(settings, ("memory_per_rank", "shared_memory"), r"[1-9]\d*([KMGT]i|[kMGT])?", amount)
    check_texts(settings, ["data_path"], r"/[^:]*", "a place to mount data; give an absolute path without a colon")
    max_ranks, ranks = max(job.num_ranks, job.max_ranks or 0), settings.ranks_per_worker
    if max_ranks % ranks:
        found = f"{max_ranks} ranks do not divide into pods of cluster.ranks_per_worker={ranks}"
        raise ConfigError(f"{found}; choose a number that divides {max_ranks}")
    memory = re.sub(r"\d+", lambda amount: str(ranks * int(amount[0])), settings.memory_per_rank)
    return {"max_ranks": max_ranks, "num_workers": max_ranks // ranks, "worker_memory": memory}
