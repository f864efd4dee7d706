"""Settings and checks of the batch file for Slurm (conf/cluster/hvtrain.sbatch.j2). Pure.

The file starts `python -m hvtrain launch` on the first host of the allocation. Shortly before the time limit Slurm
signals the batch shell; the launcher has all ranks save and ends with RESTART_HELPS; the file then requeues the job,
without a newer checkpoint only a few times. Slurm keeps the job's number, so the run folder is the same.
"""

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hvtrain.config.validate import setting
from hvtrain.errors import RESTART_HELPS, ConfigError
from hvtrain.launch.clusters import check_texts
from hvtrain.launch.job import Job


@dataclass
class Settings:
    """What Slurm is asked for. Every null is left to the cluster's defaults."""

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


def values(job: Job, settings: Settings) -> dict[str, Any]:
    """What the template needs. Raises ConfigError for what no allocation of whole hosts can hold."""
    # The same number of ranks on all hosts, as sbatch asks for them.
    nodes = settings.nodes or max(1, job.num_ranks // (settings.ranks_per_node or job.num_ranks))
    ranks_per_node = settings.ranks_per_node or job.num_ranks // nodes
    if nodes * ranks_per_node != job.num_ranks:
        asked = {"nodes": settings.nodes, "ranks_per_node": settings.ranks_per_node}
        given = " ".join(f"cluster.{name}={value}" for name, value in asked.items() if value)
        why = "Slurm gives each host the same number of ranks"
        raise ConfigError(f"-np {job.num_ranks} does not divide over {given}; {why}")
    if settings.time is None:
        raise ConfigError("cluster.time is not set; Slurm needs a time limit: cluster.time=12:00:00")
    last_signal = settings.signal_seconds + 60  # Slurm may send it up to a minute early
    if seconds(settings.time) <= last_signal:
        found = f"leaves no time to train: the run is told to save up to {last_signal} s before it"
        fix = f"raise it, or lower cluster.signal_seconds={settings.signal_seconds}"
        raise ConfigError(f"cluster.time={settings.time} {found}; {fix}")
    names = "what #SBATCH can take; use a name of letters, digits and ./%+@:,=~-_ without blanks"
    check_texts(settings, ("name", "partition", "account", "qos", "output"), r"[\w./%+@:,=~-]+", names)
    # The launcher checks the settings of a run once more; it takes any other command as it is.
    is_run = job.command[:3] == ("python", "-m", "hvtrain")
    trains = ("-m", "hvtrain") in pairwise(job.command)
    named = next((m[1] for word in job.command if (m := re.match(r"\+{0,2}run\.dir=(.+)", word))), None)
    return {
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "words": job.command[3:] if is_run else job.command,
        # A training that names no run folder would not find at its next start what it saved.
        "needs_run_folder": trains and not named,
        "run_folder": (shlex.quote(named) if named else '"runs/slurm-$SLURM_JOB_ID"') if trains else None,
        "resumes": is_run and not any(word.startswith("resume=") for word in job.command),
        "restart_code": RESTART_HELPS,
    }


def seconds(limit: str) -> int:
    """Seconds of a time limit as Slurm writes it. Raises ConfigError."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)):
        raise ConfigError(f"cluster.time={limit} is not a time limit; write 12:00:00, 90 (minutes) or 2-12:30")
    days, first, second, third = (int(part) if part else 0 for part in found.groups())
    if found[1] is None and found[4] is None:  # minutes, or minutes:seconds
        return first * 60 + second
    return days * 86400 + first * 3600 + second * 60 + third
