"""Draws the conclusions of a comparison, as sentences, and those of `hvtrain plan` for more ranks."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hvtrain.launch.child import failure
from hvtrain.report.ratios import Ratio, ratio
from hvtrain.search.compare.contest import SINGLE
from hvtrain.system.secrets import command_line
from hvtrain.system.text import counted

# The coverage of the interval for 2 rounds. At this coverage or less, the interval says nothing.
NO_CONFIDENCE = 0.5
# The strategy whose ring all-reduce `hvtrain plan` models.
PLANNED_STRATEGY = "horovod"
# More ranks pay off if they are faster than one by more than this factor.
MIN_WORTHWHILE_SPEEDUP = 1.05

# Examples/s by contestant and round.
Speeds = Mapping[str, Mapping[int, float]]


def compare_speeds(
    numerators: Mapping[int, float], denominators: Mapping[int, float]
) -> Ratio | None:
    """Returns the ratio of two speeds over the rounds that both have; None without such rounds.

    >>> compare_speeds({1: 3.0, 2: 5.0}, {1: 2.0})
    Ratio(median=1.5, low=1.5, high=1.5, coverage=0.0)
    """
    common = sorted(numerators.keys() & denominators.keys())
    if not common:
        return None

    # A strategy that failed or was interrupted has fewer rounds; each of them is compared only with
    # the same round of the other strategy.
    return ratio([numerators[n] for n in common], [denominators[n] for n in common])


def ratio_text(speed_ratio: Ratio) -> str:
    """Returns a ratio as text, with its interval if there are enough rounds for one.

    >>> ratio_text(Ratio(1.344, 1.2, 1.41, 0.969))
    '1.34 times (1.20 to 1.41 with 97% confidence)'
    >>> ratio_text(Ratio(1.344, 1.2, 1.41, 0.5))
    '1.34 times'
    """
    times = f"{speed_ratio.median:.2f} times"
    if speed_ratio.coverage <= NO_CONFIDENCE:
        return times
    interval = f"{speed_ratio.low:.2f} to {speed_ratio.high:.2f}"

    return f"{times} ({interval} with {speed_ratio.coverage:.0%} confidence)"


def speed_conclusions(speeds: Speeds) -> list[str]:
    """States which contestant is the fastest, and how the others compare with it."""
    # Sorted by median; whether a difference is real is decided by the ratios within rounds.
    medians = {name: median(rounds.values()) for name, rounds in speeds.items() if rounds}
    if len(medians) < 2:
        return ["Fewer than two strategies were timed, so nothing can be compared."]
    first, *others = sorted(medians, key=lambda name: -medians[name])

    groups = defaultdict(list)
    without_common_round = []
    for name in others:
        speed_ratio = compare_speeds(speeds[name], speeds[first])
        if speed_ratio is None:
            without_common_round.append(name)
            continue
        title = "Not distinguishable from it"
        if speed_ratio.coverage <= NO_CONFIDENCE:
            title = "Too few rounds to say"
        elif speed_ratio.high < 1:
            title = "Slower"
        groups[title].append(f"{name} {ratio_text(speed_ratio)}")

    # "Fastest" claims a difference from all others.
    is_fastest = list(groups) == ["Slower"] and not without_common_round
    verdict = "Fastest" if is_fastest else "Most examples/s"
    lines = [f"{verdict} here: {first}, with {medians[first]:,.0f} examples/s."]
    lines += [f"{title}: {'; '.join(group)} as fast as {first}." for title, group in groups.items()]
    if without_common_round:
        names = ", ".join(without_common_round)
        lines.append(f"No round in common with {first}, so not compared: {names}.")
    return lines


def scaling_conclusions(speeds: Speeds, num_ranks: int) -> list[str]:
    """States whether num_ranks ranks are worthwhile: each contestant against one process."""
    ranks = counted(num_ranks, "rank")
    lines = []
    undecided = []
    for name in speeds:
        # Without a run of `single`, there is nothing to compare with.
        speed_ratio = compare_speeds(speeds[name], speeds.get(SINGLE, {}))
        if name.partition("@")[0] == SINGLE or speed_ratio is None:
            continue
        times = f"{ratio_text(speed_ratio)} as fast as one process"
        if speed_ratio.coverage <= NO_CONFIDENCE:
            undecided.append(f"{name} {ratio_text(speed_ratio)}")
        elif speed_ratio.low <= 1 <= speed_ratio.high:
            lines.append(f"{name} on {ranks}: {times}; not distinguishable from it.")
        elif speed_ratio.low > 1:
            lines.append(
                f"{name} pays off here on {ranks}: {times}, "
                f"an efficiency of {speed_ratio.median / num_ranks:.0%}."
            )
        else:
            lines.append(f"{name} does not pay off on {ranks} here: {times}.")

    if undecided:
        lines.append(
            f"Too few rounds to say whether {ranks} would pay off: {', '.join(undecided)} as fast as one process."
        )
    return lines


def target_conclusion(
    metric: str, value: float, reached: Mapping[str, tuple[int, float] | None]
) -> str:
    """States when each contestant reached the target: after how many seconds of training, and in which epoch.

    >>> target_conclusion("val_accuracy", 0.97, {"single": (3, 12.5), "horovod": (2, 8.0), "mirrored": None})
    'val_accuracy 0.97: horovod after 8.0 s (epoch 2), single after 12.5 s (epoch 3); not reached: mirrored.'
    """
    missing = [name for name, time in reached.items() if time is None]
    times = sorted((time[1], name, time[0]) for name, time in reached.items() if time)
    parts = [f"{name} after {seconds:.1f} s (epoch {epoch})" for seconds, name, epoch in times]
    text = f"{metric} {value:.4g}: {', '.join(parts) or 'no strategy'}"
    if missing:
        text += f"; not reached: {', '.join(missing)}"
    return f"{text}."


def spread_conclusion(metric: str, values: Mapping[str, float]) -> str:
    """States the spread of the final test metric.

    >>> spread_conclusion("test_accuracy", {"single": 0.9722, "horovod": 0.975})
    'test_accuracy from 0.9722 (single) to 0.9750 (horovod); one run each, so another seed may rank them differently.'
    """
    # No claim about which is better: one run of each says little about small differences.
    low = min(values, key=values.__getitem__)
    high = max(values, key=values.__getitem__)
    spread = f"{metric} from {values[low]:.4f} ({low}) to {values[high]:.4f} ({high})"

    return f"{spread}; one run each, so another seed may rank them differently."


def examples_warning(examples: Mapping[str, int]) -> list[str]:
    """Warns if the whole runs trained on different numbers of examples.

    A difference of 10% is tolerated: incomplete batches are dropped, and batch sizes differ between strategies.

    >>> examples_warning({"single": 1000, "horovod": 990})
    []
    >>> examples_warning({"single": 1000, "horovod": 2000})[0]
    'Not comparable: the runs trained on different numbers of examples (single 1,000, horovod 2,000); set train.epochs.'
    """
    if not examples or max(examples.values()) <= 1.1 * min(examples.values()):
        return []
    # Strategies count train.steps differently; an epoch is the same for all.
    counts = ", ".join(f"{name} {count:,}" for name, count in examples.items())
    return [
        f"Not comparable: the runs trained on different numbers of examples ({counts}); set train.epochs."
    ]


def plan_arguments(comparison: Mapping[str, Any], num_ranks: int) -> list[str] | None:
    """Returns the arguments of `hvtrain plan` that extend the comparison to num_ranks ranks.

    They include the time of a rank's own work in a step, from the first entry of strategy=horovod whose
    rounds were measured. Returns None if there is no such entry, or if the comparison already had
    num_ranks ranks or more.
    """
    if num_ranks <= comparison["num_ranks"]:
        return None
    for entry in comparison["strategies"]:
        splits = [run["split"] for run in entry["rounds"] if run["split"]]
        if splits and entry["name"].partition("@")[0] == PLANNED_STRATEGY:
            # Without communication, which the plan computes from the links and the number of ranks.
            seconds = median(split["data_seconds"] + split["compute_seconds"] for split in splits)
            return [
                "-np",
                str(num_ranks),
                # The measured ranks count as one host, to which identical hosts are added.
                "--ranks-per-host",
                str(comparison["num_ranks"]),
                "--step-seconds",
                f"{seconds:.4g}",
                *entry["overrides"],
            ]
    return None


def plan_conclusions(arguments: Sequence[str], folder: Path) -> list[str]:
    """Runs `hvtrain plan`, which writes into the folder; states its result and the command that repeats it."""
    completed = subprocess.run(
        [sys.executable, "-m", "hvtrain", "plan", "--output", str(folder), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    # The comparison itself has succeeded, so an error of the plan is only one more line.
    if completed.returncode:
        reason = failure(completed.stderr, completed.returncode)
        return [f"No forecast for more ranks: hvtrain plan failed: {reason}."]

    costs = json.loads((folder / "plan.json").read_text("utf-8"))["costs"]
    return [
        plan_verdict(costs),
        "This assumes cores or a GPU for each rank, and the links of this command: "
        f"{command_line('plan', arguments)}",
    ]


def plan_verdict(costs: Sequence[Mapping[str, Any]]) -> str:
    """States the smallest number of ranks that pays off in the plan, and the speedup with the most ranks.

    >>> costs = [{"num_ranks": 1, "efficiency": 1.0}, {"num_ranks": 2, "efficiency": 0.5}]
    >>> plan_verdict([*costs, {"num_ranks": 4, "efficiency": 0.4}])
    'Planned for more ranks: horovod pays off from 4 ranks; 4 ranks are 1.6 times as fast as one.'
    """
    speedups = {cost["num_ranks"]: cost["num_ranks"] * cost["efficiency"] for cost in costs}
    most = max(speedups)
    paying = [number for number, speedup in speedups.items() if speedup > MIN_WORTHWHILE_SPEEDUP]
    verdict = f"pays off from {min(paying)} ranks;" if paying else "does not pay off:"
    speedup = f"{most} ranks are {speedups[most]:.1f} times as fast as one"

    return f"Planned for more ranks: {PLANNED_STRATEGY} {verdict} {speedup}."
