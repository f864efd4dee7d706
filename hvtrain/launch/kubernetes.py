"""The kinds of jobs on Kubernetes: their settings, and checks that a job fits them. Pure.

As in cluster_kinds.py, `values` returns what the templates need besides the job and the settings.
"""

import re
from dataclasses import dataclass
from typing import Any

from hvtrain.config.validate import nearest, setting
from hvtrain.errors import ConfigError
from hvtrain.launch.job import ClusterKind, Job

# Fields that a site may add to the pods. Others are refused: the templates set some of them, and
# the MPI operator silently drops misspelled ones.
POD_FIELDS = (
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "tolerations",
)


@dataclass
class JobSet(ClusterKind):
    """Settings of a run on Kubernetes with one pod per process.

    Each pod (conf/cluster/kubernetes-pods.yaml.j2) runs the image built by hvtrain's Dockerfile, and starts
    its process by job name and index (see by_hand.py), without ssh and without an MPI operator.
    """

    kind = "jobset"
    about = "a JobSet for Kubernetes, jobset.x-k8s.io/v1alpha2: one pod per process, also for parameter servers"
    files = ("jobset.yaml",)
    # Not `kubectl apply`, which starts nothing if an old job has the same name.
    submit = "kubectl create -f {}/jobset.yaml"
    no_elastic = "a JobSet keeps its size: leave --min-np out, or use cluster=mpijob"
    no_hosts = "Kubernetes chooses the hosts: give -np alone"
    starts_servers = True

    image: str | None = setting(None, "the image that the cluster pulls; required")
    name: str = setting("hvtrain", "name of the job; in use until kubectl deletes the job")
    namespace: str | None = setting(None, "namespace; null: kubectl's current namespace")
    queue: str | None = setting(None, "Kueue's local queue, which starts all pods or none")
    gpus_per_rank: int = setting(1, "GPUs of one rank; 0: none", low=0)
    cpus_per_rank: int = setting(4, "CPU cores of one rank", low=1)
    memory_per_rank: str = setting("16Gi", "memory of one rank, shared memory included")
    shared_memory: str = setting("2Gi", "size of a worker's /dev/shm, which its ranks share")
    data_claim: str | None = setting(None, "volume claim with the data, read-only at data_path")
    data_path: str = setting("/data", "where the data is mounted")
    runs_claim: str | None = setting(
        None, "volume claim for results, mounted at /home/hvtrain/runs; null: lost with the pods"
    )
    pod: dict[str, Any] | None = setting(  # noqa: RUF009
        None,
        "more fields of each pod: {nodeSelector: {pool: gpu}, imagePullSecrets: [{name: registry}]}",
    )
    grace_seconds: int = setting(120, "seconds that a drained pod has to save the run", low=1)
    retries: int = setting(3, "times a failed run is started again, from its checkpoint", low=0)
    keep_seconds: int = setting(86400, "seconds that the finished job and its logs stay", low=0)

    def values(self, job: Job) -> dict[str, Any]:
        if not self.image:
            raise ConfigError(
                "cluster.image is not set; give the image that your cluster pulls: cluster.image=REGISTRY/hvtrain"
            )
        # With the operators' additions, a pod's name has to fit a DNS label of 63 characters.
        self.check_texts(
            r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
            "a name for Kubernetes; use up to 40 characters of a-z, 0-9 and -, beginning with a letter",
            "name",
        )
        self.check_texts(
            r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
            "a name for Kubernetes; use a-z, 0-9, - and dots",
            "namespace",
            "queue",
            "data_claim",
            "runs_claim",
        )
        self.check_texts(
            r"[1-9]\d*([KMGT]i|[kMGT])?",
            "an amount of memory; write 16Gi or 512Mi",
            "memory_per_rank",
            "shared_memory",
        )
        self.check_texts(
            r"/[^:]*", "a path to mount data at; give an absolute path without a colon", "data_path"
        )
        for name in self.pod or ():
            if name not in POD_FIELDS:
                raise ConfigError(
                    f"unknown setting 'cluster.pod.{name}'; {nearest(name, POD_FIELDS)}"
                )
        return {"worker_memory": self.memory_per_rank}


@dataclass
class MpiJob(JobSet):
    """Settings of a run on Kubernetes with equal workers, each a pod with one or more ranks.

    The pods run as user 10001. With the argument `worker`, the image starts an sshd as this user. The
    operator mounts an ssh key pair and gives the launcher's pod, which has no rank, the list of hosts.
    """

    kind = "mpijob"
    about = "an MPIJob for Kubernetes with Kubeflow's MPI operator, kubeflow.org/v2beta1"
    files = ("mpijob.yaml",)
    submit = "kubectl create -f {}/mpijob.yaml"
    no_elastic = ""
    no_hosts = "Kubernetes chooses the hosts: set cluster.ranks_per_worker instead"
    starts_servers = False

    ranks_per_worker: int = setting(1, "ranks, and slots, of one worker pod", low=1)

    def values(self, job: Job) -> dict[str, Any]:
        super().values(job)
        # An elastic job gets enough pods for its max_ranks, each for the same number of ranks.
        max_ranks = job.max_ranks or job.num_ranks
        ranks = self.ranks_per_worker
        if max_ranks % ranks:
            raise ConfigError(
                f"{max_ranks} ranks do not divide into pods of cluster.ranks_per_worker={ranks}; "
                f"choose a number that divides {max_ranks}"
            )
        # Kubernetes limits the memory of a whole pod, so it gets the sum over its ranks.
        memory = re.sub(r"\d+", lambda amount: str(ranks * int(amount[0])), self.memory_per_rank)
        return {"max_ranks": max_ranks, "num_workers": max_ranks // ranks, "worker_memory": memory}


@dataclass
class TrainJob(MpiJob):
    """Settings of MpiJob for Kubeflow's newer operator, whose jobs have a fixed size."""

    kind = "trainjob"
    about = "a TrainJob for Kubernetes with Kubeflow Trainer, trainer.kubeflow.org/v1alpha1"
    files = ("trainjob.yaml",)
    submit = "kubectl create -f {}/trainjob.yaml"
    no_elastic = "a TrainJob keeps its size: leave --min-np out, or use cluster=mpijob"
