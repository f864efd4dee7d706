"""Settings and checks of `spark-submit` on YARN or a standalone cluster (conf/cluster/spark-submit.sh.j2). Pure.

Each rank is one Spark task with cores of its own, and all run at once; hvtrain/spark.py is the driver's side.
"""

import re
import sys
from dataclasses import dataclass
from typing import Any

from hvtrain.config.validate import setting
from hvtrain.errors import ConfigError
from hvtrain.launch.job import Job


@dataclass
class Settings:
    """Executors of a Spark cluster whose hosts have the same environment at the same path."""

    master: str = setting("yarn", "yarn, or spark://HOST:7077 for a standalone cluster")
    deploy_mode: str = setting(
        "client", "where the driver runs: here, or (YARN only) in the cluster", choices=("client", "cluster")
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


def values(job: Job, settings: Settings) -> dict[str, Any]:
    """What the template needs. Raises ConfigError for what cannot start."""
    _check(job, settings)
    executors = settings.executors or job.num_ranks
    if job.num_ranks % executors:
        raise ConfigError(
            f"cluster.executors={executors} does not divide {job.num_ranks} ranks; all executors take as many"
        )
    memory = re.fullmatch(r"([1-9]\d*)([mg])", settings.memory_per_rank)
    if not memory:
        raise ConfigError(
            f"cluster.memory_per_rank={settings.memory_per_rank} is not an amount of memory; write 8g or 512m"
        )
    ranks_per_executor = job.num_ranks // executors
    return {
        "words": job.command[3:],
        "executors": executors,
        "ranks_per_executor": ranks_per_executor,
        "overhead": f"{int(memory[1]) * ranks_per_executor}{memory[2]}",
        "python": settings.python or sys.executable,
    }


def _check(job: Job, settings: Settings) -> None:
    if job.command[1:3] != ("-m", "hvtrain"):
        raise ConfigError(
            f"cluster=spark can only run python -m hvtrain, and {' '.join(job.command[:3])} came; "
            "give settings of a run after --"
        )
    if job.is_elastic:
        raise ConfigError("cluster=spark came with --min-np; its ranks are fixed: leave --min-np out")
    if job.hosts:
        raise ConfigError("cluster=spark came with -H; Spark chooses the hosts: give -np alone")
    if settings.master != "yarn" and not re.fullmatch(r"spark://\S+|local\S*", settings.master):
        raise ConfigError(f"cluster.master={settings.master} is not a master; give yarn or spark://HOST:7077")
    if settings.deploy_mode == "cluster":
        if settings.master != "yarn":
            raise ConfigError(f"cluster.deploy_mode=cluster needs YARN and not {settings.master}; choose client")
        if not any(word.startswith("run.dir=/") for word in job.command):
            raise ConfigError(
                "cluster.deploy_mode=cluster starts the driver on any host; give run.dir=/a/folder/that/all/hosts/see"
            )
    if settings.gpus_per_rank > 1:
        raise ConfigError(f"cluster.gpus_per_rank={settings.gpus_per_rank}: a rank uses one GPU; give 0 or 1")
