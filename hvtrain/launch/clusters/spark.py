"""Settings and checks of `spark-submit` on YARN or a standalone cluster (conf/cluster/spark-submit.sh.j2). Pure.

Each rank is one Spark task with cores of its own, and all run at once; hvtrain/spark.py is the driver's side.
"""

import sys
from dataclasses import dataclass
from typing import Any

from hvtrain.config.validate import setting
from hvtrain.errors import ConfigError
from hvtrain.launch.clusters import check_texts
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
    if job.command[1:3] != ("-m", "hvtrain"):
        found = f"cluster=spark can only run python -m hvtrain, and {' '.join(job.command[:3])} came"
        raise ConfigError(f"{found}; give settings of a run after --")
    check_texts(settings, ["master"], r"yarn|spark://\S+|local\S*", "a master; give yarn or spark://HOST:7077")
    check_texts(settings, ["memory_per_rank"], r"[1-9]\d*[mg]", "an amount of memory; write 8g or 512m")
    if settings.deploy_mode == "cluster" and settings.master != "yarn":
        raise ConfigError(f"cluster.deploy_mode=cluster needs YARN and not {settings.master}; choose client")
    if settings.deploy_mode == "cluster" and not any(word.startswith("run.dir=/") for word in job.command):
        fix = "give run.dir=/a/folder/that/all/hosts/see"
        raise ConfigError(f"cluster.deploy_mode=cluster starts the driver on any host; {fix}")
    if settings.gpus_per_rank > 1:
        raise ConfigError(f"cluster.gpus_per_rank={settings.gpus_per_rank}: a rank uses one GPU; give 0 or 1")
    executors = settings.executors or job.num_ranks
    ranks_per_executor, rest = divmod(job.num_ranks, executors)
    if rest:
        found = f"cluster.executors={executors} does not divide {job.num_ranks} ranks"
        raise ConfigError(f"{found}; all executors take as many")
    return {
        "words": job.command[3:],
        "executors": executors,
        "ranks_per_executor": ranks_per_executor,
        "overhead": f"{int(settings.memory_per_rank[:-1]) * ranks_per_executor}{settings.memory_per_rank[-1]}",
        "python": settings.python or sys.executable,
    }
