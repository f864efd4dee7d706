"""The kinds of clusters that take job files: their settings, and checks that a job fits them. Pure.

Each file is rendered from its template, conf/cluster/FILE.j2, which gets the job as `job`, the
settings as `cluster`, and what `values` returns.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from hvtrain.config.compose import quote_value
from hvtrain.config.validate import setting
from hvtrain.core.commands import first_word
from hvtrain.errors import RESTART_HELPS, ConfigError
from hvtrain.launch.job import ClusterKind, Job, hosts_option, place_ranks
from hvtrain.launch.kubernetes import JobSet, MpiJob, TrainJob
from hvtrain.system.files import is_remote


@dataclass
class Slurm(ClusterKind):
    """Settings of a batch file for Slurm. A null setting is left to the cluster's defaults.

    The file starts `python -m hvtrain launch` on the first host of the allocation. Shortly before
    the time limit Slurm signals the batch shell; the launcher makes all ranks save, and exits with
    RESTART_HELPS; the file then requeues the job, but only a few times without a newer checkpoint.
    A requeued job keeps its number, so the run folder stays the same.
    """

    kind = "slurm"
    about = "a batch file for Slurm, which requeues the job at its time limit"
    files = ("hvtrain.sbatch",)
    submit = "sbatch {}/hvtrain.sbatch"
    no_elastic = "an allocation keeps its size: leave --min-np out"
    no_hosts = "Slurm chooses the hosts: leave -H out and set cluster.nodes"
    starts_servers = True
    starts_replicas = True

    time: str | None = setting(None, "time limit, required: 12:00:00, or 2-12 (days-hours)")
    nodes: int | None = setting(None, "hosts; null: as many as ranks_per_node needs, or 1", low=1)
    ranks_per_node: int | None = setting(None, "ranks on each host; null: -np / nodes", low=1)
    cpus_per_rank: int = setting(4, "CPU cores of one rank", low=1)
    gpus_per_rank: int = setting(1, "GPUs of one rank; 0: none", low=0)
    partition: str | None = setting(None, "partition; several: a,b")
    account: str | None = setting(None, "account that is charged")
    qos: str | None = setting(None, "quality of service")
    name: str = setting("hvtrain", "name of the job in squeue")
    output: str = setting("hvtrain-%j.out", "file for the job's output; %j is the job's number")
    workdir: str | None = setting(None, "folder of the ranks on all hosts; null: sbatch's own")
    setup: str | None = setting(None, "shell line for the first host: source .venv/bin/activate")
    signal_seconds: int = setting(120, "seconds before the limit to save and requeue", low=1)
    idle_requeues: int = setting(3, "requeues in a row without a newer checkpoint", low=0)

    def values(self, job: Job) -> dict[str, Any]:
        # Each of the two follows from the other; without either, one host takes all ranks.
        nodes = self.nodes or max(1, job.num_ranks // (self.ranks_per_node or job.num_ranks))
        ranks_per_node = self.ranks_per_node or job.num_ranks // nodes
        # sbatch requests the same number of ranks on all hosts.
        if nodes * ranks_per_node != job.num_ranks:
            raise ConfigError(
                f"-np {job.num_ranks} is not cluster.nodes={nodes} x cluster.ranks_per_node={ranks_per_node}; "
                "change one of them: Slurm gives each host the same number of ranks"
            )

        self._check_time()
        self.check_texts(
            r"[\w./%+@:,=~-]+",
            "what #SBATCH can take; use only letters, digits and ./%+@:,=~-_",
            "name",
            "partition",
            "account",
            "qos",
            "output",
        )

        # The launcher adds `python -m hvtrain` to settings of a run; any
        # other command is passed on unchanged.
        trains = is_training(job.command)
        is_run = trains and job.command[:3] == ("python", "-m", "hvtrain")
        run_folder = _run_folder(job.command) if trains else None
        # The script looks for the newest checkpoint in this folder, to tell whether a requeue made progress.
        # It cannot look into object storage, and does not know what ${oc.env:NAME} stands for.
        folder_in_shell = None
        if trains and not is_remote(run_folder) and "${" not in (run_folder or ""):
            folder_in_shell = (
                shlex.quote(run_folder) if run_folder else '"runs/slurm-$SLURM_JOB_ID"'
            )
        return {
            "nodes": nodes,
            "ranks_per_node": ranks_per_node,
            "arguments": job.command[3:] if is_run else job.command,
            # Without a fixed run folder, the next start would not find the checkpoints.
            "needs_run_folder": trains and not run_folder,
            "run_folder": folder_in_shell,
            "resumes": is_run
            and not any(re.match(r"\+{0,2}resume=", argument) for argument in job.command),
            "restart_code": RESTART_HELPS,
        }

    def _check_time(self) -> None:
        """Raises ConfigError if the time limit is missing, or leaves no time before the signal to save."""
        if self.time is None:
            raise ConfigError(
                "cluster.time is not set; Slurm needs a time limit: cluster.time=12:00:00"
            )
        # Slurm may send the signal up to a minute early.
        last_signal = self.signal_seconds + 60
        if slurm_seconds(self.time) <= last_signal:
            raise ConfigError(
                f"cluster.time={self.time} leaves no time to train: the run is told to save up to {last_signal} s "
                f"before the limit; raise cluster.time, or lower cluster.signal_seconds={self.signal_seconds}"
            )


def is_training(command: Sequence[str]) -> bool:
    """Returns True if the command trains (-m hvtrain SETTING=VALUE ...), False for others (-m hvtrain evaluate)."""
    for index, pair in enumerate(pairwise(command)):
        if pair == ("-m", "hvtrain"):
            return not first_word(command[index + 2 :])
    return False


def _run_folder(command: Sequence[str]) -> str | None:
    """Returns the folder of the command's last run.dir= (or +run.dir=, ++run.dir=), as Hydra reads it, or None."""
    for argument in reversed(command):
        match = re.fullmatch(r"\+{0,2}run\.dir=(.+)", argument)
        if match:
            try:
                value = OverridesParser.create().parse_override(quote_value(argument)).value()
            except HydraException:
                return match[1]  # The run will refuse it.
            return None if value is None else str(value)
    return None


def slurm_seconds(limit: str) -> int:
    """Converts a time limit in Slurm's format to seconds. Raises ConfigError.

    >>> slurm_seconds("90"), slurm_seconds("12:00:00"), slurm_seconds("2-12")
    (5400, 43200, 216000)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not match:
        raise ConfigError(
            f"cluster.time={limit} is not a time limit; write 12:00:00, 90 (minutes) or 2-12:30"
        )

    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:  # Minutes, or minutes:seconds.
        return first * 60 + second
    return days * 86400 + first * 3600 + second * 60 + third


@dataclass
class Docker(ClusterKind):
    """Settings of containers that run the images built by hvtrain's Dockerfile.

    conf/cluster/docker-run.sh.j2 is one script for every host: given the host's name, it starts
    either the ranks or an sshd that waits for them. conf/cluster/compose.yaml.j2 needs one
    machine, no GPU and no key: its two containers make a key pair themselves.
    """

    kind = "docker"
    about = (
        "a `docker run` script for hosts with GPUs, and a trial of two containers on this machine"
    )
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
    runs: str | None = setting(
        None, "first host's folder for results, owned by user 10001; null: results are lost"
    )
    ssh_port: int = setting(2222, "port of the workers' sshd, free on each host", low=1024)

    def values(self, job: Job) -> dict[str, Any]:
        if len(job.hosts) > 1 and not self.keys:
            raise ConfigError(
                "several hosts need ssh keys; give the folder that holds them on each host: cluster.keys=/path/to/keys"
            )
        if job.hosts:
            place_ranks(job)  # Raises ConfigError if the hosts have too few slots.
        # For docker run -v, a colon ends the path.
        self.check_texts(
            r"/[^:\n]*",
            "a folder for Docker; give an absolute path without a colon",
            "keys",
            "data",
            "runs",
        )
        return {"hosts": hosts_option(job.hosts)}


@dataclass
class Spark(ClusterKind):
    """Settings for a Spark cluster whose hosts all have the same environment at the same path.

    Each rank is one Spark task with its own cores, and all tasks run at once. hvtrain/spark.py runs
    in the driver.
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
    memory_per_rank: str = setting("8g", "memory of a rank, a limit under YARN: 8g, 512m")
    executor_memory: str = setting("1g", "memory of an executor's Java heap, without its ranks")
    gpus_per_rank: int = setting(0, "GPUs of a rank: 0 or 1", low=0)
    gpu_discovery_script: str | None = setting(
        None, "script, at this path on all hosts, that lists a host's GPUs"
    )
    python: str | None = setting(None, "the interpreter on all hosts; null: the path of this one")

    def values(self, job: Job) -> dict[str, Any]:
        if job.command[1:3] != ("-m", "hvtrain") or not is_training(job.command):
            raise ConfigError(
                f"cluster=spark can only train with python -m hvtrain, not run {' '.join(job.command[:4])}; "
                "give settings of a run after --"
            )
        self.check_texts(
            r"yarn|spark://\S+|local\S*", "a master; give yarn or spark://HOST:7077", "master"
        )
        self.check_texts(
            r"[1-9]\d*[mg]", "an amount of memory; write 8g or 512m", "memory_per_rank"
        )

        if self.deploy_mode == "cluster":
            if self.master != "yarn":
                raise ConfigError(
                    f"cluster.deploy_mode=cluster needs cluster.master=yarn, not {self.master}; "
                    "choose cluster.deploy_mode=client"
                )
            # A relative run folder would be inside a YARN container, and be deleted with it.
            if not (_run_folder(job.command) or "").startswith("/"):
                raise ConfigError(
                    "cluster.deploy_mode=cluster starts the driver on any host; give "
                    "run.dir=/a/folder/that/all/hosts/see"
                )
        # Each rank is one Spark task, and Horovod gives a rank one GPU.
        if self.gpus_per_rank > 1:
            raise ConfigError(
                f"cluster.gpus_per_rank={self.gpus_per_rank}: a rank uses one GPU; give 0 or 1"
            )

        # All executors of an application have the same size.
        executors = self.executors or job.num_processes
        ranks_per_executor, remainder = divmod(job.num_processes, executors)
        if remainder:
            raise ConfigError(
                f"cluster.executors={executors} does not divide {job.num_processes} ranks; give a number that does"
            )
        return {
            "arguments": job.command[3:],
            "executors": executors,
            "ranks_per_executor": ranks_per_executor,
            # Ranks run outside the executor's Java heap, so their memory counts as memory overhead.
            "overhead": f"{int(self.memory_per_rank[:-1]) * ranks_per_executor}{self.memory_per_rank[-1]}",
            "python": self.python or sys.executable,
        }


KINDS = {kind.kind: kind for kind in (Slurm, MpiJob, TrainJob, JobSet, Docker, Spark)}
