"""starts.json: each start of a run, with its command, hosts, software and the user's checkout, for the report."""

import logging
import os
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hvtrain.core.starts import STARTS_FILE, read_starts, write_starts
from hvtrain.errors import in_one_line
from hvtrain.system.checkout import checkout
from hvtrain.system.secrets import without_secrets
from hvtrain.training.run import Run, versions

log = logging.getLogger(__name__)

MOST_STARTS = 100


def note_start(run: Run, hosts: Sequence[str], described: dict[str, str], step: int) -> None:
    """Adds this start, from a step on, to the file (chief only). An error is only a warning.

    hosts: of the ranks, by rank. described: the summary's lines.
    """
    try:
        earlier = read_starts(run.folder)
        for start in earlier:
            if start.get("git"):
                start["git"]["diff"] = ""  # The newest start's is enough.
        starts = [*earlier[1 - MOST_STARTS :], _facts(run, hosts, described, step)]
        write_starts(run.folder, starts)
    except Exception as error:
        log.warning("%s is not written: %s", STARTS_FILE, in_one_line(error))


def _facts(run: Run, hosts: Sequence[str], described: dict[str, str], step: int) -> dict[str, Any]:
    plan, here = run.plan, Path.cwd()
    return {
        "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command(sys.argv, hosts),
        "folder": str(here),
        "num_ranks": plan.size,
        "num_replicas": run.strategy.num_computing,
        "hosts": dict(Counter(hosts)),
        "first_step": step,
        "num_steps": plan.num_steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "best": run.best,
        "sign": run.task.sign(run.best),
        "described": described,
        "versions": versions(),
        "system": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        "git": checkout(here),
    }


def command(argv: Sequence[str], hosts: Sequence[str]) -> str:
    """The command that starts the same ranks again, without secrets.

    >>> command(["/x/hvtrain/__main__.py", "model=cnn", "dataset.api_key=hunter2"], ["s1", "s1", "s2"])
    "horovodrun -np 3 -H s1:2,s2:1 python -m hvtrain model=cnn 'dataset.api_key=***'"
    >>> command(["train.py"], ["s1"])
    'python train.py'
    """
    is_runner = Path(argv[0]).parent.name == "hvtrain" or Path(argv[0]).name == "hvtrain"
    program = ["python", "-m", "hvtrain"] if is_runner else ["python", argv[0]]
    counts = Counter(hosts)
    several = ["-H", ",".join(f"{host}:{number}" for host, number in counts.items())] if len(counts) > 1 else []
    launcher = ["horovodrun", "-np", str(len(hosts)), *several] if len(hosts) > 1 else []
    return shlex.join([*launcher, *program, *without_secrets(argv[1:])])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
