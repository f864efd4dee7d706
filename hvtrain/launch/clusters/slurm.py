"""A batch file for Slurm, which goes on by itself after the time limit.

Pure. The file starts `python -m hvtrain.launch` on the first host of the allocation. Shortly before the time limit
Slurm signals the batch shell; the launcher has the ranks save together and ends with RESTART_HELPS, and the file asks
for the same job again. Slurm keeps the job's id then, so the run folder is the same.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvtrain.config.validate import setting
from hvtrain.errors import RESTART_HELPS, ConfigError
from hvtrain.launch.job import Job

FILE = "hvtrain.sbatch"


@dataclass
class Settings:
    """What Slurm is asked for. Every null is left to the cluster's defaults."""

    time: str | None = setting(None, "time limit in Slurm's words (12:00:00, 2-12 for 2 days and 12 hours); required")
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
    signal_seconds: int = setting(120, "seconds before the time limit at which the run saves and asks to go on", low=1)


def files(job: Job, settings: Settings) -> dict[str, str]:
    """The batch file. Raises ConfigError for what no allocation of whole hosts can hold."""
    if job.hosts:
        raise ConfigError("cluster=slurm came with -H; Slurm chooses the hosts: leave -H out and set cluster.nodes")
    if job.is_elastic:
        raise ConfigError("cluster=slurm came with --min-np; an allocation keeps its size: leave --min-np out")
    nodes, ranks_per_node = _layout(job.num_ranks, settings)
    return {FILE: "\n".join([*_directives(settings, nodes, ranks_per_node), "", _body(job, settings, ranks_per_node)])}


def commands(job: Job, settings: Settings, folder: str) -> list[list[str]]:
    """What submits the file that was written to the folder."""
    return [["sbatch", f"{folder}/{FILE}"]]


def needs_run_folder(command: Sequence[str]) -> bool:
    """True for a training that names no run folder, so that its next start would not find what it saved.

    >>> needs_run_folder(["python", "-m", "hvtrain", "model=cnn"])
    True
    >>> needs_run_folder(["python", "-m", "hvtrain", "run.dir=runs/a"])
    False
    >>> needs_run_folder(["python", "-m", "hvtrain.verify"])
    False
    """
    trains = ("-m", "hvtrain") in pairwise(command)
    return trains and not any(re.match(r"\+{0,2}run\.dir=", word) for word in command)


def seconds(limit: str) -> int:
    """Seconds of a time limit as Slurm writes it. Raises ConfigError.

    >>> seconds("90"), seconds("1:30:00"), seconds("2-12")
    (5400, 5400, 216000)
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not found:
        raise ConfigError(f"cluster.time={limit} is no time limit of Slurm's; write 12:00:00, 90 (minutes) or 2-12:30")
    days, first, second, third = (int(part) if part else 0 for part in found.groups())
    if found[1] is None and found[4] is None:  # minutes, or minutes:seconds
        return first * 60 + second
    return days * 86400 + first * 3600 + second * 60 + third


def _layout(num_ranks: int, settings: Settings) -> tuple[int, int]:
    """Hosts, and ranks on each: the same on all, as sbatch asks for them."""
    nodes = settings.nodes or max(1, num_ranks // (settings.ranks_per_node or num_ranks))
    ranks_per_node = settings.ranks_per_node or num_ranks // nodes
    if nodes * ranks_per_node != num_ranks:
        given = [
            f"cluster.{name}={value}" for name in ("nodes", "ranks_per_node") if (value := getattr(settings, name))
        ]
        raise ConfigError(
            f"-np {num_ranks} does not divide over {' '.join(given)}; Slurm gives each host the same number of ranks"
        )
    return nodes, ranks_per_node


def _directives(settings: Settings, nodes: int, ranks_per_node: int) -> list[str]:
    if settings.time is None:
        raise ConfigError("cluster.time is not set; Slurm needs a time limit: cluster.time=12:00:00")
    last_signal = settings.signal_seconds + 60  # Slurm may send it up to a minute early
    if seconds(settings.time) <= last_signal:
        raise ConfigError(
            f"cluster.time={settings.time} leaves no time to train, for {last_signal} s before it the run is told to "
            f"save; raise it, or lower cluster.signal_seconds={settings.signal_seconds}"
        )
    options = {
        "job-name": settings.name,
        "nodes": nodes,
        "ntasks": nodes * ranks_per_node,
        "ntasks-per-node": ranks_per_node,
        "cpus-per-task": settings.cpus_per_rank,
        "gpus-per-node": ranks_per_node * settings.gpus_per_rank or None,
        "time": settings.time,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "output": settings.output,
        "open-mode": "append",  # what was said before a requeue stays
        "signal": f"B:USR1@{settings.signal_seconds}",
    }
    for name, value in options.items():
        if value is not None and not re.fullmatch(r"[\w./%+@:,=~-]+", str(value)):
            raise ConfigError(
                f"cluster: --{name}={value} holds a character that no #SBATCH line takes; use another name"
            )
    return [
        "#!/usr/bin/env bash",
        *(f"#SBATCH --{k}={v}" for k, v in options.items() if v is not None),
        "#SBATCH --requeue",
    ]


def _body(job: Job, settings: Settings, ranks_per_node: int) -> str:
    # The launcher checks the words of a run once more; a command of another kind it takes as it is.
    skipped = 3 if tuple(job.command[:3]) == ("python", "-m", "hvtrain") else 0
    words = [shlex.quote(word) for word in job.command[skipped:]]
    if needs_run_folder(job.command):
        words += ['run.dir="runs/slurm-$SLURM_JOB_ID"']
    if skipped and not any(word.startswith("resume=") for word in job.command):
        words += ["resume=auto"]
    environment = job.environment
    lines = ["set -euo pipefail", ""]
    if settings.workdir:
        lines += [f"cd -- {shlex.quote(settings.workdir)}"]
    if settings.setup:
        lines += ["set +u  # environments' own scripts read unset variables", settings.setup, "set -u"]
    if environment:
        lines += ["# Whoever may read this file reads these values: no secrets here."]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    given = "".join(f" --env {name}" for name in environment)
    return "\n".join(lines) + _LAUNCH.format(
        ranks=ranks_per_node, options=f"--{job.controller}{given}", words=" ".join(words), saved=RESTART_HELPS
    )


# A wait that a trap interrupts returns early, with the launcher still at work: then wait again.
_LAUNCH = """
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:{ranks}/' | paste -sd, -)"
echo "hvtrain: job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $hosts"

launcher=
asked=0
trap 'asked=1; kill -USR1 $launcher || true' USR1
python -m hvtrain.launch -np "$SLURM_NTASKS" -H "$hosts" {options} -- \\
  {words} &
launcher=$!
while true; do
  asked=0
  code=0
  wait "$launcher" || code=$?
  ((asked)) || break
done

if ((code == {saved})); then
  echo "hvtrain: saved before the time limit; job $SLURM_JOB_ID goes on when Slurm starts it again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
