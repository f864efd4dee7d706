"""The kinds of clusters that take files: their settings, and checks of a job for them. Pure.

Each file is rendered from its template, conf/cluster/FILE.j2, which gets the job as `job`, the
settings as `cluster`, and what `values` returns.
"""

import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from hvtrain.config.validate import nearest, setting
from hvtrain.errors import RESTART_HELPS, ConfigError
from hvtrain.launch.job import Job, hosts_option, place_ranks


class ClusterKind:
    """A kind of cluster. A subclass is a dataclass of its settings, cluster.SETTING=VALUE.

    Attributes:
        kind: its name.
        about: one line of help.
        files: what is submitted.
        submit: the command that submits the files; {} stands for their folder.
        program: what the command needs; "": its first word.
        no_elastic: why the kind takes no --min-np, and what to do instead; "": it does.
        no_hosts: likewise for -H.
        starts_servers: it also starts parameter servers and a coordinator.
        starts_replicas: it also starts one process for several GPUs.
    """

    kind: ClassVar[str]
    about: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    submit: ClassVar[str]
    program: ClassVar[str] = ""
    no_elastic: ClassVar[str] = ""
    no_hosts: ClassVar[str] = ""
    starts_servers: ClassVar[bool] = False
    starts_replicas: ClassVar[bool] = False

    def values(self, job: Job) -> dict[str, Any]:
        """Returns what the templates need besides job and settings.

        Raises ConfigError for what cannot start there.
        """
        raise NotImplementedError

    def check_texts(self, names: Iterable[str], pattern: str, needed: str) -> None:
        """Raises ConfigError for a setting that does not match the pattern; null always does."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not re.fullmatch(pattern, value):
                raise ConfigError(f"cluster.{name}={' '.join(value.split())} is not {needed}")


@dataclass
class Slurm(ClusterKind):
    """Settings of a batch file for Slurm. Every null is left to the cluster's defaults.

    The file starts `python -m hvtrain launch` on the first host of the allocation. Shortly before
    the time limit Slurm signals the batch shell; the launcher has all ranks save and ends with
    RESTART_HELPS; the file then requeues the job, without a newer checkpoint only a few times.
    Slurm keeps the job's number, so the run folder is the same.
    """

    kind = "slurm"
    about = "a batch file for Slurm, which requeues the job at its time limit"
    files = ("hvtrain.sbatch",)
    submit = "sbatch {}/hvtrain.sbatch"
    no_elastic = "an allocation keeps its size: leave --min-np out"
    no_hosts = "Slurm chooses the hosts: leave -H out and set cluster.nodes"
    starts_servers = True
    starts_replicas = True

    time: str | None = setting(None, "time limit as Slurm writes it (12:00:00; 2-12: 2 days and 12 hours); required")
    nodes: int | None = setting(None, "hosts; null: as many as ranks_per_node needs, or 1", low=1)
    ranks_per_node: int | None = setting(None, "ranks on each host; null: all ranks over nodes", low=1)
    cpus_per_rank: int = setting(4, "CPU cores of one rank", low=1)
    gpus_per_rank: int = setting(1, "GPUs of one rank; 0: none", low=0)
    partition: str | None = setting(None, "partition; several: a,b")
    account: str | None = setting(None, "account that is charged")
    qos: str | None = setting(None, "quality of service")
    name: str = setting("hvtrain", "name of the job in squeue")
    output: str = setting("hvtrain-%j.out", "file of everything printed; %j is the job's number")
    workdir: str | None = setting(None, "folder on all hosts in which ranks run; null: where sbatch was called")
    setup: str | None = setting(None, "shell line run first, on the first host: source .venv/bin/activate")
    signal_seconds: int = setting(120, "seconds before the time limit at which the run saves and is requeued", low=1)
    idle_requeues: int = setting(3, "times in a row that a job without a newer checkpoint is started again", low=0)

    def values(self, job: Job) -> dict[str, Any]:
        # Either number follows from the other; with neither, one host takes all ranks.
        nodes = self.nodes or max(1, job.num_ranks // (self.ranks_per_node or job.num_ranks))
        ranks_per_node = self.ranks_per_node or job.num_ranks // nodes
        # sbatch asks for the same number of ranks on all hosts.
        if nodes * ranks_per_node != job.num_ranks:
            sizes = {"nodes": self.nodes, "ranks_per_node": self.ranks_per_node}
            chosen = " ".join(f"cluster.{name}={value}" for name, value in sizes.items() if value)
            raise ConfigError(
                f"-np {job.num_ranks} does not divide over {chosen}; Slurm gives each host the same number of ranks"
            )

        if self.time is None:
            raise ConfigError("cluster.time is not set; Slurm needs a time limit: cluster.time=12:00:00")
        last_signal = self.signal_seconds + 60  # Slurm may send it up to a minute early.
        if slurm_seconds(self.time) <= last_signal:
            raise ConfigError(
                f"cluster.time={self.time} leaves no time to train: the run is told to save up to {last_signal} s "
                f"before it; raise it, or lower cluster.signal_seconds={self.signal_seconds}"
            )
        self.check_texts(
            ("name", "partition", "account", "qos", "output"),
            r"[\w./%+@:,=~-]+",
            "what #SBATCH can take; use a name of letters, digits and ./%+@:,=~-_ without blanks",
        )

        # The launcher checks the settings of a run once more; it takes any other command as it is.
        is_run = job.command[:3] == ("python", "-m", "hvtrain")
        trains = ("-m", "hvtrain") in pairwise(job.command)
        run_folder = _run_folder(job.command)
        # The script reads the newest checkpoint there, to tell a requeue that helps from one that
        # does not.
        folder_in_shell = None
        if trains:
            folder_in_shell = shlex.quote(run_folder) if run_folder else '"runs/slurm-$SLURM_JOB_ID"'
        return {
            "nodes": nodes,
            "ranks_per_node": ranks_per_node,
            "words": job.command[3:] if is_run else job.command,
            # A training that names no run folder would not find at its next start what it saved.
            "needs_run_folder": trains and not run_folder,
            "run_folder": folder_in_shell,
            "resumes": is_run and not any(argument.startswith("resume=") for argument in job.command),
            "restart_code": RESTART_HELPS,
        }


def _run_folder(command: Iterable[str]) -> str | None:
    """The folder of the command's run.dir=, +run.dir= or ++run.dir=; None if it names none."""
    for argument in command:
        match = re.match(r"\+{0,2}run\.dir=(.+)", argument)
        if match:
            return match[1]
    return None


def slurm_seconds(limit: str) -> int:
    """Seconds of a time limit as Slurm writes it. Raises ConfigError.

    >>> slurm_seconds("90"), slurm_seconds("12:00:00"), slurm_seconds("2-12")
    (5400, 43200, 216000)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not match:
        raise ConfigError(f"cluster.time={limit} is not a time limit; write 12:00:00, 90 (minutes) or 2-12:30")

    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:  # Minutes, or minutes:seconds.
        return first * 60 + second
    return days * 86400 + first * 3600 + second * 60 + third


# What a site may add to the pods: the templates write the other fields, and the MPI operator drops a misspelt one.
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
    """Settings of one training on Kubernetes, each process of which is a pod, known by its name and index.

    A pod (conf/cluster/kubernetes-pods.yaml.j2) has the image that our Dockerfile makes, and starts its
    process as one by hand does (by_hand.py): without ssh, and without an operator for MPI.
    """

    kind = "jobset"
    about = "a JobSet for Kubernetes, jobset.x-k8s.io/v1alpha2: each process a pod, also parameter servers"
    files = ("jobset.yaml",)
    # Not `kubectl apply`, which starts nothing if an old job has the name.
    submit = "kubectl create -f {}/jobset.yaml"
    no_elastic = "a JobSet keeps its size: leave it out or use cluster=mpijob"
    no_hosts = "Kubernetes chooses the hosts: give -np alone"
    starts_servers = True

    image: str | None = setting(None, "the image that the cluster pulls; required")
    name: str = setting("hvtrain", "name of the job; taken until kubectl deletes the job")
    namespace: str | None = setting(None, "namespace; null: the one that kubectl is set to")
    queue: str | None = setting(None, "Kueue's local queue, which starts all pods of the job or none")
    gpus_per_rank: int = setting(1, "GPUs of one rank; 0: none", low=0)
    cpus_per_rank: int = setting(4, "CPU cores of one rank", low=1)
    memory_per_rank: str = setting("16Gi", "memory of one rank, shared memory included")
    shared_memory: str = setting("2Gi", "/dev/shm of one worker, through which ranks of one pod talk")
    data_claim: str | None = setting(None, "volume claim with the data, mounted read-only at data_path")
    data_path: str = setting("/data", "where the data is mounted")
    runs_claim: str | None = setting(
        None, "volume claim for results, mounted at /home/hvtrain/runs; null: lost with the pods"
    )
    pod: dict[str, Any] | None = setting(  # noqa: RUF009
        None, "more fields of each pod: {nodeSelector: {pool: gpu}, imagePullSecrets: [{name: registry}]}"
    )
    grace_seconds: int = setting(120, "seconds that a drained pod has, in which the run is saved", low=1)
    retries: int = setting(3, "times a failed run is started again, from its newest checkpoint", low=0)
    keep_seconds: int = setting(86400, "seconds for which the finished job and its logs stay", low=0)

    def values(self, job: Job) -> dict[str, Any]:
        if not self.image:
            raise ConfigError(
                "cluster.image is not set; give the one that your cluster pulls: cluster.image=REGISTRY/hvtrain"
            )
        # A pod's name has to fit a DNS label of 63 letters with what the operators add to it.
        self.check_texts(
            ("name",),
            r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
            "a name for Kubernetes; use up to 40 of a-z, 0-9 and -, a letter first",
        )
        self.check_texts(
            ("namespace", "queue", "data_claim", "runs_claim"),
            r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
            "a name for Kubernetes; use a-z, 0-9, - and dots",
        )
        self.check_texts(
            ("memory_per_rank", "shared_memory"),
            r"[1-9]\d*([KMGT]i|[kMGT])?",
            "an amount of memory; write 16Gi or 512Mi",
        )
        self.check_texts(("data_path",), r"/[^:]*", "a place to mount data; give an absolute path without a colon")
        for name in self.pod or ():
            if name not in POD_FIELDS:
                raise ConfigError(f"unknown setting 'cluster.pod.{name}'; {nearest(name, list(POD_FIELDS))}")
        return {"worker_memory": self.memory_per_rank}


@dataclass
class MpiJob(JobSet):
    """Settings of equal workers, each of them a pod with some ranks.

    The pods have user 10001, whose own sshd starts with the argument `worker`. The operator mounts an
    ssh key pair and gives the launcher's pod, which has no rank, the list of hosts.
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
        # An elastic job gets as many pods as it may ever use, each for the same number of ranks.
        max_ranks = max(job.num_ranks, job.max_ranks or 0)
        ranks = self.ranks_per_worker
        if max_ranks % ranks:
            raise ConfigError(
                f"{max_ranks} ranks do not divide into pods of cluster.ranks_per_worker={ranks}; "
                f"choose a number that divides {max_ranks}"
            )
        # Kubernetes limits a pod as a whole, so its ranks share the sum.
        memory = re.sub(r"\d+", lambda amount: str(ranks * int(amount[0])), self.memory_per_rank)
        return {"max_ranks": max_ranks, "num_workers": max_ranks // ranks, "worker_memory": memory}


@dataclass
class TrainJob(MpiJob):
    """The same settings for the newer operator, whose jobs keep their size."""

    kind = "trainjob"
    about = "a TrainJob for Kubernetes with Kubeflow Trainer, trainer.kubeflow.org/v1alpha1"
    files = ("trainjob.yaml",)
    submit = "kubectl create -f {}/trainjob.yaml"
    no_elastic = "a TrainJob keeps its size: leave it out or use cluster=mpijob"


@dataclass
class Docker(ClusterKind):
    """Settings of containers of the images that our Dockerfile makes.

    conf/cluster/docker-run.sh.j2 is one script for every host: given that host's name, it starts
    there either the ranks or an sshd that waits for them. conf/cluster/compose.yaml.j2 needs one
    machine, no GPU and no key: its two containers make a key pair themselves.
    """

    kind = "docker"
    about = "a `docker run` script for hosts with GPUs, and a trial of two containers on this machine"
    files = ("docker-run.sh", "compose.yaml")
    submit = "docker compose --file {}/compose.yaml up --exit-code-from s1"
    no_elastic = "its hosts are fixed: leave --min-np out"

    image: str = setting("hvtrain", "the image on the hosts")
    cpu_image: str = setting("hvtrain:cpu", "the image of the trial in compose.yaml")
    gpus: bool = setting(True, "give each container all GPUs of its host")
    keys: str | None = setting(
        None, "folder on each host with id_ed25519 and authorized_keys; needed for several hosts"
    )
    data: str | None = setting(None, "folder on each host with the data, mounted at /data")
    runs: str | None = setting(None, "folder on the first host for results, writable by user 10001; null: lost with it")
    ssh_port: int = setting(2222, "port of the workers' sshd, free on each host", low=1024)

    def values(self, job: Job) -> dict[str, Any]:
        if len(job.hosts) > 1 and not self.keys:
            raise ConfigError(
                "several hosts need ssh keys; give the folder that holds them on each: cluster.keys=/path/to/keys"
            )
        if job.hosts:
            place_ranks(job)  # Raises ConfigError if the hosts have too few slots.
        # docker run -v takes a colon for the end of the path.
        self.check_texts(
            ("keys", "data", "runs"),
            r"/[^:\n]*",
            "a folder for Docker; give an absolute path without a colon",
        )
        return {"hosts": hosts_option(job.hosts)}


@dataclass
class Spark(ClusterKind):
    """Settings of executors of a Spark cluster whose hosts have the same environment at the same path.

    Each rank is one Spark task with cores of its own, and all run at once; hvtrain/spark.py is the
    driver's side.
    """

    kind = "spark"
    about = "the executors of a Spark cluster, YARN or standalone, by spark-submit"
    files = ("spark-submit.sh", "hvtrain_on_spark.py")
    submit = "bash {}/spark-submit.sh"
    program = "spark-submit"
    no_elastic = "its ranks are fixed: leave --min-np out"
    no_hosts = "Spark chooses the hosts: give -np alone"
    starts_servers = True

    master: str = setting("yarn", "yarn, or spark://HOST:7077 for a standalone cluster")
    deploy_mode: str = setting(
        "client",
        "where the driver runs: here, or (YARN only) in the cluster",
        choices=("client", "cluster"),
    )
    name: str = setting("hvtrain", "the application's name in Spark's pages")
    queue: str | None = setting(None, "YARN's queue")
    executors: int | None = setting(None, "executors; null: one for each rank", low=1)
    cores_per_rank: int = setting(4, "cores of a rank", low=1)
    memory_per_rank: str = setting("8g", "memory of a rank; YARN ends an executor that takes more: 8g, 512m")
    executor_memory: str = setting("1g", "memory of an executor's Java part, which holds no data of ours")
    gpus_per_rank: int = setting(0, "GPUs of a rank: 0 or 1", low=0)
    gpu_discovery_script: str | None = setting(None, "path on all hosts; lists an executor's GPUs to Spark")
    python: str | None = setting(None, "the interpreter on all hosts; null: the path of this one")

    def values(self, job: Job) -> dict[str, Any]:
        if job.command[1:3] != ("-m", "hvtrain"):
            raise ConfigError(
                f"cluster=spark can only run python -m hvtrain, and {' '.join(job.command[:3])} came; "
                "give settings of a run after --"
            )
        self.check_texts(("master",), r"yarn|spark://\S+|local\S*", "a master; give yarn or spark://HOST:7077")
        self.check_texts(("memory_per_rank",), r"[1-9]\d*[mg]", "an amount of memory; write 8g or 512m")

        if self.deploy_mode == "cluster" and self.master != "yarn":
            raise ConfigError(f"cluster.deploy_mode=cluster needs YARN and not {self.master}; choose client")
        # A relative run folder would be in a container of YARN's, and go with it.
        if self.deploy_mode == "cluster" and not any(argument.startswith("run.dir=/") for argument in job.command):
            raise ConfigError(
                "cluster.deploy_mode=cluster starts the driver on any host; give run.dir=/a/folder/that/all/hosts/see"
            )
        # Each rank is one Spark task, and Horovod gives a rank one GPU.
        if self.gpus_per_rank > 1:
            raise ConfigError(f"cluster.gpus_per_rank={self.gpus_per_rank}: a rank uses one GPU; give 0 or 1")

        # All executors of an application are alike.
        executors = self.executors or job.num_processes
        ranks_per_executor, remainder = divmod(job.num_processes, executors)
        if remainder:
            raise ConfigError(
                f"cluster.executors={executors} does not divide {job.num_processes} ranks; all executors take as many"
            )
        # Ranks run outside the executor's Java heap, so their memory is its overhead.
        overhead = int(self.memory_per_rank[:-1]) * ranks_per_executor
        return {
            "words": job.command[3:],
            "executors": executors,
            "ranks_per_executor": ranks_per_executor,
            "overhead": f"{overhead}{self.memory_per_rank[-1]}",
            "python": self.python or sys.executable,
        }


KINDS: dict[str, type[ClusterKind]] = {kind.kind: kind for kind in (Slurm, MpiJob, TrainJob, JobSet, Docker, Spark)}
