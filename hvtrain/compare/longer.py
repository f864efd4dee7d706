"""Extends the measured step to more ranks with hvtrain plan: from how many ranks on does it pay?"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hvtrain.system.secrets import without_secrets

PLANNED = "horovod"  # The strategy whose ring the plan describes.
PAYS = 1.05  # times the speed of one rank


def plan_line(found: Mapping[str, Any], num_ranks: int) -> list[str] | None:
    """The arguments of hvtrain plan for the comparison's horovod, from a rank's own work in a step; None if unknown."""
    one = next((one for one in found["strategies"] if one["name"].partition("@")[0] == PLANNED), None)
    splits = [run["split"] for run in one["rounds"] if run["split"]] if one else []
    if one is None or not splits:
        return None
    seconds = median(split["data_seconds"] + split["compute_seconds"] for split in splits)
    here = found["num_ranks"]
    options = ["-np", str(num_ranks), "--ranks-per-host", str(here), "--step-seconds", f"{seconds:.4g}"]
    return [*options, *one["words"]]


def extend(line: Sequence[str], folder: Path) -> list[str]:
    """Runs hvtrain plan, which writes into the folder; returns its conclusion and the command that repeats it."""
    done = subprocess.run(
        [sys.executable, "-m", "hvtrain", "plan", "--output", str(folder), *line],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("hvtrain: ")
        return [f"More ranks: hvtrain plan cannot say ({why})."]
    costs = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["costs"]
    again = shlex.join(["python", "-m", "hvtrain", "plan", *without_secrets(line)])
    return [pays_from(costs), f"This assumes cores or a GPU for each rank, and the links of this command: {again}"]


def pays_from(costs: Sequence[Mapping[str, Any]]) -> str:
    """From how many ranks on a plan's costs beat one rank, and what the last of them gives.

    >>> costs = [{"num_ranks": 1, "efficiency": 1.0}, {"num_ranks": 2, "efficiency": 0.5}]
    >>> pays_from([*costs, {"num_ranks": 4, "efficiency": 0.4}])
    'Planned for more ranks: horovod pays from 4 ranks on, and 4 ranks are 1.6 times as fast as one.'
    """
    speedups = {cost["num_ranks"]: cost["num_ranks"] * cost["efficiency"] for cost in costs}
    most = max(speedups)
    first = next((number for number, times in sorted(speedups.items()) if number > 1 and times > PAYS), None)
    pays = f"pays from {first} ranks on, and" if first else "does not pay:"
    return f"Planned for more ranks: {PLANNED} {pays} {most} ranks are {speedups[most]:.1f} times as fast as one."
