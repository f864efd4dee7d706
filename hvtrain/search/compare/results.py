"""Makes the results of a comparison: the plain values of compare.json, and from them the table, page and picture."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from hvtrain.launch.child import Training
from hvtrain.report.charts import GREY, SERIES, Panel, page_svg, write_panels
from hvtrain.report.page import render
from hvtrain.report.ratios import draw_rounds
from hvtrain.search.compare.conclusion import (
    compare_speeds,
    examples_warning,
    scaling_conclusions,
    speed_conclusions,
    spread_conclusion,
    target_conclusion,
)
from hvtrain.search.compare.contest import SINGLE, Contest, Contestant
from hvtrain.system.run_files import lower_is_better
from hvtrain.system.text import format_known

# One point per epoch of a whole run: epoch, seconds, examples, and metrics.
Curve = list[dict[str, Any]]
# The content of compare.json, or one strategy's entry in it.
Record = Mapping[str, Any]
# A metric and its value.
Target = tuple[str, float]
# The first epoch that reached the target, and the seconds of training up to its end.
TimeToTarget = tuple[int, float]

# The default target metric is the first of these that all runs have;
# validation says more than training.
_TARGET_METRICS = ("val_accuracy", "accuracy", "val_loss", "loss")

# (width, height) in inches. Charts on the page leave room for the names of the strategies.
_CHART_SIZE = (5.2, 3.3)
_PANEL_SIZE = (5.5, 4.0)


def summary(contest: Contest, target: Target | None) -> dict[str, Any]:
    """Returns a comparison's part of compare.json: the target, an entry for each strategy, and the conclusions.

    Args:
        contest: the comparison, with its runs so far.
        target: the metric and value to reach; None: the best value that all whole runs reached.
    """
    curves = {name: curve(training) for name, training in contest.whole.items()}
    # All runs reach the default target, so that all have a time.
    target = target or default_target(list(curves.values()))
    times = {}
    if target:
        times = {name: time_to_target(points, *target) for name, points in curves.items()}

    entries = [
        _entry(contestant, contest, curves.get(contestant.name, []), times.get(contestant.name))
        for contestant in contest.contestants
    ]
    speeds = {entry["name"]: speeds_by_round(entry) for entry in entries}
    for entry in entries:
        name = entry["name"]
        entry["examples_per_second"] = median(speeds[name].values()) if speeds[name] else None
        # A ratio of `single` to itself would say nothing.
        speed_ratio = (
            None if name == SINGLE else compare_speeds(speeds[name], speeds.get(SINGLE, {}))
        )
        entry["against_single"] = speed_ratio and asdict(speed_ratio)

    return {
        "num_ranks": contest.num_ranks,
        "target": {"metric": target[0], "value": target[1]} if target else None,
        "strategies": entries,
        "conclusion": [
            *speed_conclusions(speeds),
            *scaling_conclusions(speeds, contest.num_ranks),
            *_whole_run_conclusions(contest.whole, target, times),
            *(f"{name} failed: {error}" for name, error in contest.errors.items()),
        ],
    }


def _whole_run_conclusions(
    whole: Mapping[str, Training],
    target: Target | None,
    times: Mapping[str, TimeToTarget | None],
) -> Iterator[str]:
    """States the times to the target, the test accuracies, and whether the runs saw different numbers of examples."""
    # In the order of history.csv, which the user sees.
    metric_names = dict.fromkeys(
        name for training in whole.values() for row in training.epochs for name in row.metrics
    )
    if target and whole:
        metric, value = target
        if metric in metric_names:
            yield target_conclusion(metric, value, times)
        else:
            yield f"{metric} is not a metric of these runs; they have {', '.join(metric_names)}."

    # Data sets without test examples have no test metrics.
    values_by_metric: dict[str, dict[str, float]] = defaultdict(dict)
    for name, training in whole.items():
        for metric, value in _test_metrics(training).items():
            values_by_metric[metric][name] = value
    for metric, values in values_by_metric.items():
        if "accuracy" in metric and len(values) > 1:
            yield spread_conclusion(metric, values)

    examples = {
        name: training.result["num_steps"] * training.result["global_batch"]
        for name, training in whole.items()
    }
    yield from examples_warning(examples)


def _entry(
    contestant: Contestant, contest: Contest, points: Curve, time: TimeToTarget | None
) -> dict[str, Any]:
    """Returns a strategy's entry in compare.json, except for its speed.

    Without a whole run, the fields that only such a run fills are None or empty.
    """
    name = contestant.name
    rounds = contest.rounds.get(name, {})
    whole = contest.whole.get(name)
    runs = [*rounds.values(), *filter(None, [whole])]
    # Facts that are the same in all runs of a strategy are taken from its last run.
    record = runs[-1].result if runs else {}
    target_epoch, target_seconds = time or (None, None)

    return {
        "name": name,
        "overrides": contestant.overrides,
        "differences": [*contestant.differences, *record.get("differences", ())],
        "rounds": [_round_entry(round_number, run) for round_number, run in rounds.items()],
        # None if every run ended before its memory was sampled; gpu_bytes is also None without GPUs.
        "peak_bytes": max((run.peak_bytes for run in runs if run.peak_bytes), default=None),
        "gpu_bytes": max((run.gpu_bytes for run in runs if run.gpu_bytes), default=None),
        **{fact: record.get(fact) for fact in ("global_batch", "num_parameters", "versions")},
        "num_steps": whole and whole.result["num_steps"],
        "seconds": whole and whole.seconds,
        "cpu_seconds": whole and whole.cpu_seconds,
        "tests": _test_metrics(whole) if whole else {},
        "curve": points,
        "error": contest.errors.get(name),
        "target_epoch": target_epoch,
        "target_seconds": target_seconds,
    }


def _round_entry(round_number: int, run: Training) -> dict[str, Any]:
    return {
        "round": round_number,
        "examples_per_second": run.result.get("examples_per_second"),
        "step_seconds": run.result.get("step_seconds"),
        "split": run.result.get("split"),
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "peak_bytes": run.peak_bytes,
        "gpu_bytes": run.gpu_bytes,
    }


def speeds_by_round(entry: Record) -> dict[int, float]:
    """Returns a strategy's examples/s by round, without rounds that were too short to time."""
    return {
        run["round"]: run["examples_per_second"]
        for run in entry["rounds"]
        if run["examples_per_second"]
    }


def curve(training: Training) -> Curve:
    """Returns one point for each epoch, without metrics that are not finite.

    Seconds count steps alone, without start, validation and checkpoints.
    """
    seconds = 0.0
    examples = 0
    points = []
    for record in training.epochs:
        examples_before = examples
        examples = record.step * training.result["global_batch"]
        # The epoch's own seconds include validation and checkpoints between its steps. Its rate does
        # not, but history.csv rounds it, to 0 for very slow steps.
        if record.examples_per_second:
            seconds += (examples - examples_before) / record.examples_per_second
        else:
            seconds += record.seconds
        point = {"epoch": record.epoch, "seconds": seconds, "examples": examples}
        # JSON has neither NaN nor infinity.
        metrics = {name: value for name, value in record.metrics.items() if math.isfinite(value)}
        points.append(point | metrics)

    return points


def time_to_target(points: Curve, metric: str, value: float) -> TimeToTarget | None:
    """Returns the first epoch whose metric reaches the value, and the seconds of training up to its end.

    Returns None if no epoch reaches the value.
    """
    sign = _sign(metric)
    for point in points:
        if metric in point and sign * point[metric] >= sign * value:
            return point["epoch"], point["seconds"]

    return None


def default_target(curves: Sequence[Curve]) -> Target | None:
    """Returns the metric to compare by, a validation metric if possible, and the best value that every run reached.

    Returns None if the runs have no target metric in common.
    """
    for metric in _TARGET_METRICS:
        sign = _sign(metric)
        values = [
            [sign * point[metric] for point in points if metric in point] for points in curves
        ]
        # A target that a run does not measure would say nothing about that run.
        if values and all(values):
            # The worst of the runs' best values.
            return metric, sign * min(map(max, values))

    return None


def _sign(metric: str) -> int:
    return -1 if lower_is_better(metric) else 1


def _test_metrics(training: Training) -> dict[str, float]:
    metrics = training.result["metrics"]
    return {name: value for name, value in metrics.items() if name.startswith("test_")}


def table(comparison: Record) -> list[list[str]]:
    """Returns the rows of the table, header first; a failed strategy keeps what was measured."""
    strategies = comparison["strategies"]
    target = comparison["target"]
    tests = list(dict.fromkeys(name for entry in strategies for name in entry["tests"]))
    has_gpus = any(entry["gpu_bytes"] for entry in strategies)

    goal = f"{target['metric']} {target['value']:.4g}" if target else "target"
    rows = [_table_row(entry, goal, tests, has_gpus) for entry in strategies]
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def _table_row(entry: Record, goal: str, tests: Sequence[str], has_gpus: bool) -> dict[str, str]:
    """Returns a strategy's cells, by the header of their column."""
    against_single = "-"
    if entry["against_single"]:
        against_single = "{median:.2f} ({low:.2f} to {high:.2f})".format(**entry["against_single"])

    target = "-"
    if entry["target_epoch"]:
        target = f"{entry['target_seconds']:.1f} (epoch {entry['target_epoch']})"

    return {
        "strategy": entry["name"],
        "examples/s": format_known(entry["examples_per_second"], ",.0f"),
        "against single": against_single,
        f"s to {goal}": target,
        **{name: format_known(entry["tests"].get(name), ".4f") for name in tests},
        "memory MB": _megabytes(entry["peak_bytes"]),
        **({"GPU MB": _megabytes(entry["gpu_bytes"])} if has_gpus else {}),
        "CPU s": format_known(entry["cpu_seconds"], ",.0f"),
        # A failure shows in the last column, so that what was measured keeps its place.
        "total s": "failed" if entry["error"] else format_known(entry["seconds"], ",.0f"),
    }


def _megabytes(num_bytes: int | None) -> str:
    return format_known(num_bytes and num_bytes / 1e6, ",.0f")


def html(comparison: Record) -> str:
    """Returns the self-contained page of a comparison, given the content of compare.json."""
    return render(
        "search/compare/compare.html.j2",
        comparison=comparison,
        overview=table(comparison),
        drawn=[(title, page_svg(title, draw, _CHART_SIZE)) for title, draw in panels(comparison)],
    )


def write_png(comparison: Record, path: Path) -> None:
    """Draws all panels into one picture. Writes nothing if nothing was measured."""
    drawn = list(panels(comparison))
    if drawn:
        write_panels(drawn, path, 2, _PANEL_SIZE)


def panels(comparison: Record) -> Iterator[Panel]:
    """Yields the panels that have something to show."""
    strategies = comparison["strategies"]
    target = comparison["target"] or {"metric": "loss", "value": None}
    points = [point for entry in strategies for point in entry["curve"]]
    # The validation loss is preferred, since it shows better than the training loss what was learned.
    loss = "val_loss" if any("val_loss" in point for point in points) else "loss"

    # A comparison that failed early has nothing to draw.
    if any(entry["rounds"] for entry in strategies):
        speeds = {entry["name"]: list(speeds_by_round(entry).values()) for entry in strategies}
        yield (
            "examples/s (bar: median, dots: rounds)",
            partial(draw_rounds, values=speeds, colors=SERIES * len(strategies)),
        )
    if not points:
        return

    # Over seconds the faster strategy leads; over examples, the one that learns more from each.
    curves = dict.fromkeys([(loss, "seconds"), (loss, "examples"), (target["metric"], "seconds")])
    for metric, unit in curves:
        goal = target["value"] if metric == target["metric"] else None
        draw = partial(_draw_curves, strategies=strategies, metric=metric, unit=unit, goal=goal)
        yield f"{metric} over {unit}", draw


def _draw_curves(
    axes, strategies: list[Record], metric: str, unit: str, goal: float | None
) -> None:
    # A strategy has the same color in all panels.
    for row, (entry, color) in enumerate(zip(strategies, cycle(SERIES))):
        points = [(point[unit], point[metric]) for point in entry["curve"] if metric in point]
        if points:
            axes.plot(
                *zip(*points),
                "o-",
                label=entry["name"],
                color=color,
                # Widths differ so that curves that coincide stay visible.
                linewidth=max(0.5, 2.6 - 0.3 * row),
                markersize=3,
                alpha=0.9,
            )

    if goal is not None:
        axes.axhline(goal, color=GREY, linewidth=1, linestyle="--")
    axes.set_xlabel(unit)
    axes.legend(frameon=False, fontsize=8)
