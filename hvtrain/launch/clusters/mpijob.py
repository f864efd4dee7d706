"""An MPIJob for Kubernetes with Kubeflow's MPI operator, kubeflow.org/v2beta1.

Pure. The operator makes the key pair, the workers and the list of their names. An elastic job asks the operator's list
of running workers again and again, and takes those whose sshd answers.
"""

from __future__ import annotations

from hvtrain.errors import ConfigError
from hvtrain.launch.clusters import kubernetes
from hvtrain.launch.clusters.kubernetes import Settings
from hvtrain.launch.job import Job

FILE = "mpijob.yaml"

# The operator lists a worker as soon as it runs. Horovod drops a host for good whose ssh fails once, so such a host is
# named only when its port is open. One line of bash, and no name of a host holds anything but a-z, 0-9, - and dots.
DISCOVERY = (
    "/etc/mpi/discover_hosts.sh | while read -r host; do "
    'if timeout 2 bash -c "</dev/tcp/$host/{port}" 2>/dev/null; then echo "$host:{slots}"; fi; done'
)


def files(job: Job, settings: Settings) -> dict[str, str]:
    """The MPIJob. Raises ConfigError for what cannot start."""
    kubernetes.check(job, settings, "mpijob")
    if job.is_elastic and job.controller != "gloo":
        raise ConfigError(f"--min-np came with --{job.controller}; ranks can come and go over Gloo alone: use --gloo")
    most = max(job.num_ranks, job.max_ranks or 0) if job.is_elastic else job.num_ranks
    workers = kubernetes.num_workers(most, settings)
    hosts = _elastic(job, settings, most) if job.is_elastic else ["--hostfile", kubernetes.HOSTFILE]
    words = kubernetes.launcher_words(job, settings, hosts)
    launcher = kubernetes.launcher_pod("launcher", settings, words, job)
    worker = kubernetes.worker_pod("worker", settings)
    # The operator takes the restart policy from the replica and warns about a second one.
    policies = {"Launcher": launcher.pop("restartPolicy"), "Worker": worker.pop("restartPolicy")}
    # A mesh's proxy in front of ssh would cut the ranks off from each other.
    labels = {"sidecar.istio.io/inject": "false"}
    replicas = {
        role: {
            "replicas": count,
            "restartPolicy": policies[role],
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        }
        for role, count, pod in (("Launcher", 1, launcher), ("Worker", workers, worker))
    }
    tree = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": kubernetes.metadata(settings),
        "spec": {
            "slotsPerWorker": settings.ranks_per_worker,
            "mpiImplementation": "OpenMPI",
            "sshAuthMountPath": kubernetes.SSH_FOLDER,
            "launcherCreationPolicy": "AtStartup" if job.is_elastic else "WaitForWorkersReady",
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": settings.retries,
                "ttlSecondsAfterFinished": settings.keep_seconds,
            },
            "mpiReplicaSpecs": replicas,
        },
    }
    return {
        FILE: kubernetes.text([tree], "An MPIJob, for the MPI operator 0.5 or newer: kubectl create -f mpijob.yaml")
    }


def commands(job: Job, settings: Settings, folder: str) -> list[list[str]]:
    """What submits the file; not `apply`, which starts nothing where an old job has the name."""
    return [["kubectl", "create", "-f", f"{folder}/{FILE}"]]


def _elastic(job: Job, settings: Settings, most: int) -> list[str]:
    script = DISCOVERY.format(port=kubernetes.SSH_PORT, slots=settings.ranks_per_worker)
    return ["--min-np", str(job.min_ranks), "--max-np", str(most), "--host-discovery-script", script]
