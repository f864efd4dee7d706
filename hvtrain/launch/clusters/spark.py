"""Training on the executors of a Spark cluster, YARN or standalone, by spark-submit.

Pure: the script that spark-submit takes, and its line. Each rank is one Spark task with cores of its own, all of
them at once; hvtrain/spark.py is the driver's side.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from hvtrain.config.validate import setting
from hvtrain.errors import ConfigError
from hvtrain.launch.job import Job

SCRIPT = "hvtrain_on_spark.py"
# Not hvtrain/spark.py itself: spark-submit would put that file's folder before all others in sys.path.
_TEXT = '"""Given to spark-submit, which wants a file."""\n\nfrom hvtrain.spark import main\n\nmain()\n'


@dataclass
class Settings:
    """Executors of a Spark cluster on whose hosts the same environment lies at the same path."""

    master: str = setting("yarn", "yarn, or spark://HOST:7077 for a standalone cluster")
    deploy_mode: str = setting("client", "where the driver runs: here, or (YARN alone)", choices=("client", "cluster"))
    name: str = setting("hvtrain", "the application's name in Spark's pages")
    queue: str | None = setting(None, "YARN's queue")
    executors: int | None = setting(None, "executors; null: one for each rank", low=1)
    cores_per_rank: int = setting(4, "cores of a rank", low=1)
    memory_per_rank: str = setting("8g", "memory of a rank; YARN ends an executor that takes more: 8g, 512m")
    executor_memory: str = setting("1g", "memory of an executor's Java part, which holds no data of ours")
    gpus_per_rank: int = setting(0, "GPUs of a rank: 0 or 1", low=0)
    gpu_discovery_script: str | None = setting(None, "path on all hosts; lists an executor's GPUs to Spark")
    python: str | None = setting(None, "the interpreter on all hosts; null: the path of this one")


def files(job: Job, settings: Settings) -> dict[str, str]:
    """The script. Raises ConfigError for what cannot start."""
    commands(job, settings, "")
    return {SCRIPT: _TEXT}


def commands(job: Job, settings: Settings, folder: str) -> list[list[str]]:
    """The spark-submit line. Raises ConfigError for what cannot start."""
    words = _checked_words(job, settings)
    line = ["spark-submit", "--master", settings.master, "--deploy-mode", settings.deploy_mode, "--name", settings.name]
    line += ["--queue", settings.queue] if settings.queue else []
    for name, value in {**_resources(job, settings), **_environment(job, settings)}.items():
        line += ["--conf", f"{name}={value}"]
    line += [f"{folder}/{SCRIPT}", "--np", str(job.num_ranks), f"--{job.controller}"]
    return [[*line, *words]]


def _checked_words(job: Job, settings: Settings) -> list[str]:
    """The words of the run."""
    if job.command[1:3] != ("-m", "hvtrain"):
        raise ConfigError(
            f"cluster=spark runs python -m hvtrain alone and {' '.join(job.command[:3])} came; give words of a run"
        )
    if job.is_elastic:
        raise ConfigError("cluster=spark came with --min-np; its ranks are fixed: leave --min-np out")
    if job.hosts:
        raise ConfigError("cluster=spark came with -H; Spark chooses the hosts: give -np alone")
    if settings.master != "yarn" and not re.fullmatch(r"spark://\S+|local\S*", settings.master):
        raise ConfigError(f"cluster.master={settings.master} is no master; give yarn or spark://HOST:7077")
    if settings.deploy_mode == "cluster":
        if settings.master != "yarn":
            raise ConfigError(f"cluster.deploy_mode=cluster needs YARN and not {settings.master}; choose client")
        if not any(word.startswith("run.dir=/") for word in job.command):
            raise ConfigError(
                "cluster.deploy_mode=cluster starts the driver on any host; give run.dir=/a/folder/that/all/hosts/see"
            )
    if settings.gpus_per_rank > 1:
        raise ConfigError(f"cluster.gpus_per_rank={settings.gpus_per_rank}: a rank uses one GPU; give 0 or 1")
    return list(job.command[3:])


def _resources(job: Job, settings: Settings) -> dict[str, str]:
    executors = settings.executors or job.num_ranks
    if job.num_ranks % executors:
        raise ConfigError(
            f"cluster.executors={executors} does not divide {job.num_ranks} ranks; all executors take as many"
        )
    ranks = job.num_ranks // executors
    cores = ranks * settings.cores_per_rank
    found = {
        "spark.task.cpus": str(settings.cores_per_rank),
        "spark.executor.cores": str(cores),
        "spark.executor.memory": settings.executor_memory,
        "spark.executor.memoryOverhead": _times(settings.memory_per_rank, ranks),
        "spark.dynamicAllocation.enabled": "false",
    }
    if settings.master == "yarn":
        found["spark.executor.instances"] = str(executors)
    else:
        found["spark.cores.max"] = str(executors * cores)
    if settings.gpus_per_rank:
        found["spark.task.resource.gpu.amount"] = "1"
        found["spark.executor.resource.gpu.amount"] = str(ranks)
        if settings.gpu_discovery_script:
            found["spark.executor.resource.gpu.discoveryScript"] = settings.gpu_discovery_script
    return found


def _environment(job: Job, settings: Settings) -> dict[str, str]:
    python = settings.python or sys.executable
    found = {"spark.pyspark.python": python, "spark.pyspark.driver.python": python}
    for name, value in job.environment.items():
        found[f"spark.executorEnv.{name}"] = value
        if settings.deploy_mode == "cluster":
            found[f"spark.yarn.appMasterEnv.{name}"] = value
    return found


def _times(memory: str, ranks: int) -> str:
    """Spark's text for so many times this memory.

    >>> _times("8g", 4)
    '32g'
    """
    found = re.fullmatch(r"([1-9]\d*)([mg])", memory)
    if not found:
        raise ConfigError(f"cluster.memory_per_rank={memory} is no amount of memory; write 8g or 512m")
    return f"{int(found[1]) * ranks}{found[2]}"
