"""The goals for hvtrain's speed, and whether a session of `benchmarks steps` or `hvtrain allreduce` meets them.

python -m benchmarks.goals bench/.../bench.json            the ratios for the goals' table in docs/bench.md
python -m benchmarks.goals allreduce/.../allreduce.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvtrain.report.ratios import Ratio, ratio

EACH = ("tiny", "cnn", "wide", "separable", "resnet20")


@dataclass(frozen=True)
class Goal:
    """A limit on a ratio.

    Attributes:
        figure: What is compared: a field of benchmarks.measure.Measured.
        ours: The contender of hvtrain.
        other: The contender it is compared with.
        limits: By workload, the most that ours / other may be; the least of examples_per_second.
    """

    figure: str
    ours: str
    other: str
    limits: dict[str, float]

    @property
    def smaller_is_better(self) -> bool:
        return self.figure != "examples_per_second"


# What a tracker or the live display may cost.
COSTS = {"tiny": 1.02, "cnn": 1.02}
# Against a loop written by hand. docs/bench.md has all goals and the ratios found.
LOOPS = {"tiny": 0.90, "cnn": 0.95, "wide": 0.95, "separable": 0.95, "resnet20": 0.95}
GOALS = (
    Goal("step_seconds", "hvtrain-mpi", "loop-mpi", LOOPS),
    Goal("step_seconds", "hvtrain-gloo", "loop-gloo", LOOPS),
    Goal(
        "examples_per_second", "hvtrain-mpi", "multi-worker", {"tiny": 6.0, "cnn": 1.4, "wide": 2.0}
    ),
    Goal("examples_per_second", "hvtrain-mpi", "parameter-server", {"cnn": 2.0, "wide": 4.0}),
    Goal("examples_per_second", "hvtrain-mpi", "independent", {"cnn": 0.95, "wide": 0.80}),
    Goal("step_seconds", "hvtrain-1", "keras", dict.fromkeys(EACH, 1.0)),
    Goal("step_seconds", "hvtrain-mpi@tracker=tensorboard", "hvtrain-mpi", COSTS),
    Goal("step_seconds", "hvtrain-mpi@output=terminal", "hvtrain-mpi", COSTS),
    Goal("first_step_seconds", "hvtrain-mpi", "loop-mpi", dict.fromkeys(EACH, 1.10)),
    Goal("peak_bytes", "hvtrain-mpi", "loop-mpi", dict.fromkeys(EACH, 1.0)),
)


def verdict(measured: Ratio, limit: float, smaller_is_better: bool = True) -> str:
    """Whether the goal holds: by the whole interval, or else by the median."""
    if smaller_is_better:
        best, middle, worst = measured.low, measured.median, measured.high
    else:
        # Mirrored, so that smaller is better again.
        best, middle, worst = -measured.high, -measured.median, -measured.low
        limit = -limit

    if worst <= limit:
        return "holds"
    if best > limit:
        return "fails"
    return "holds by its median" if middle <= limit else "fails by its median"


def judge(name: str, measured: Ratio, limit: float, smaller_is_better: bool = True) -> str:
    sign = "<=" if smaller_is_better else ">="
    return f"{name} {sign} {limit:.2f}: {measured}, {verdict(measured, limit, smaller_is_better)}"


def of_steps(session: dict[str, Any]) -> list[str]:
    """The goals that a bench.json can judge, one line each."""
    # Rows of bench.json, one for each run.
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for row in session["runs"]:
        runs[row["contender"]].append(row)

    workload = session["workload"]["name"]

    lines = []
    for goal in GOALS:
        if workload in goal.limits and {goal.ours, goal.other} <= set(runs):
            ours = [run[goal.figure] for run in runs[goal.ours]]
            others = [run[goal.figure] for run in runs[goal.other]]
            name = f"{goal.figure} of {goal.ours} / {goal.other}"
            lines.append(
                judge(name, ratio(ours, others), goal.limits[workload], goal.smaller_is_better)
            )

    return lines


def of_allreduce(session: dict[str, Any]) -> list[str]:
    """The goals that an allreduce.json can judge, one line each."""
    ours = session["seconds"]["hvtrain"]
    mpi = session["seconds"].get("mpi4py", {})

    lines = []
    for mib in (4, 16, 64, 128):
        size = str(mib << 20)
        if size in mpi:
            name = f"bus bandwidth at {mib} MiB / mpi4py's"
            lines.append(judge(name, ratio(mpi[size], ours[size]), 0.95, smaller_is_better=False))

    if "4096" in mpi:
        lines.append(judge("latency at 4 KiB / mpi4py's", ratio(ours["4096"], mpi["4096"]), 3.0))
    if "4096" in ours:
        millis = [1000 * seconds for seconds in ours["4096"]]
        lines.append(judge("latency at 4 KiB in ms", ratio(millis, [1.0] * len(millis)), 0.3))

    # The same bytes, so the ratio of times is that of bandwidths.
    many_small = ratio(ours["whole"], ours["small"])
    lines.append(
        judge("bandwidth of 160 small tensors / one", many_small, 0.85, smaller_is_better=False)
    )
    return lines


if __name__ == "__main__":
    content = json.loads(Path(sys.argv[1]).read_text())
    judge_all = of_steps if "runs" in content else of_allreduce
    print("\n".join(judge_all(content)))
