"""A TrainJob for Kubernetes with Kubeflow Trainer, trainer.kubeflow.org/v1alpha1.

Pure. The TrainingRuntime says how pods look, the TrainJob how many. Trainer knows the pods by their names: the
replicated jobs "launcher" and "node", and in both a container "node". Only these get the key pair and the hosts.
"""

from __future__ import annotations

from typing import Any

from hvtrain.errors import ConfigError
from hvtrain.launch.clusters import kubernetes
from hvtrain.launch.clusters.kubernetes import Settings
from hvtrain.launch.job import Job

FILE = "trainjob.yaml"
API = "trainer.kubeflow.org/v1alpha1"


def files(job: Job, settings: Settings) -> dict[str, str]:
    """The TrainingRuntime and the TrainJob. Raises ConfigError for what cannot start."""
    kubernetes.check(job, settings, "trainjob")
    if job.is_elastic:
        raise ConfigError(
            "cluster=trainjob came with --min-np; a TrainJob keeps its size: leave it out or use cluster=mpijob"
        )
    nodes = kubernetes.num_workers(job.num_ranks, settings)
    runtime = {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": kubernetes.metadata(settings, labels={"trainer.kubeflow.org/framework": "hvtrain"}),
        "spec": {
            "mlPolicy": {
                "numNodes": nodes,
                "mpi": {
                    "numProcPerNode": settings.ranks_per_worker,
                    "mpiImplementation": "OpenMPI",
                    "sshAuthMountPath": kubernetes.SSH_FOLDER,
                    "runLauncherAsNode": False,
                },
            },
            "template": {"spec": _job_set(job, settings)},
        },
    }
    train_job = {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": kubernetes.metadata(settings),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": settings.name},
            # Said again here: without it Trainer counts GPUs for a runtime of one process a node.
            "trainer": {"numNodes": nodes, "numProcPerNode": settings.ranks_per_worker},
        },
    }
    about = "A TrainJob and its runtime, for Kubeflow Trainer 2: kubectl create -f trainjob.yaml"
    return {FILE: kubernetes.text([runtime, train_job], about)}


def commands(job: Job, settings: Settings, folder: str) -> list[list[str]]:
    """What submits the file; not `apply`, which starts nothing where an old job has the name."""
    return [["kubectl", "create", "-f", f"{folder}/{FILE}"]]


def _job_set(job: Job, settings: Settings) -> dict[str, Any]:
    """Nodes first; the launcher once they are ready; all is over when the launcher is."""
    words = kubernetes.launcher_words(job, settings, ["--hostfile", kubernetes.HOSTFILE])
    # The words stand in the runtime and not in the TrainJob, where some versions give them to every node too.
    launcher = kubernetes.launcher_pod("node", settings, words, job)
    node = kubernetes.worker_pod("node", settings)
    labels = {"sidecar.istio.io/inject": "false"}
    return {
        "ttlSecondsAfterFinished": settings.keep_seconds,
        "network": {"publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
        "replicatedJobs": [
            {
                "name": "node",
                "template": {"spec": {"template": {"metadata": {"labels": dict(labels)}, "spec": node}}},
            },
            {
                "name": "launcher",
                "dependsOn": [{"name": "node", "status": "Ready"}],
                "template": {
                    "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                    "spec": {
                        "backoffLimit": settings.retries,
                        "template": {"metadata": {"labels": dict(labels)}, "spec": launcher},
                    },
                },
            },
        ],
    }
