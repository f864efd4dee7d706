"""A comparison as plain values: the content of compare.json, which table, page and picture show. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from hvtrain.compare.conclusion import against, on_examples, on_scaling, on_speed, on_target, on_test
from hvtrain.compare.contestants import SINGLE, Contestant
from hvtrain.compare.one_run import Training
from hvtrain.compare.rounds import Ratio
from hvtrain.core.run_files import EpochRecord

_LOWER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse")
# Of a default target, the first that all runs have. Metrics in validation say more than those in training.
_TARGET_METRICS = ("val_accuracy", "accuracy", "val_loss", "loss")


def summary(
    contestants: Sequence[Contestant],
    rounds: Mapping[str, Mapping[int, Training]],
    whole: Mapping[str, Training],
    errors: Mapping[str, str],
    num_ranks: int,
    target: tuple[str, float] | None,
) -> dict[str, Any]:
    """Joins all runs of a comparison.

    Args:
        contestants: the strategies.
        rounds: short runs by contestant and round.
        whole: whole runs by contestant.
        errors: of contestants that failed.
        num_ranks: of all strategies but `single`.
        target: metric and value; None: the best value that all whole runs reached.
    """
    names = [contestant.name for contestant in contestants]
    speeds = {name: speeds_of(rounds.get(name, {})) for name in names}
    target = target or best_of_all([training.epochs for training in whole.values()])
    reached = {}
    if target:
        reached = {name: reached_at(training.epochs, *target) for name, training in whole.items()}

    entries = []
    for contestant in contestants:
        name = contestant.name
        epoch, seconds = reached.get(name) or (None, None)
        entries.append(
            {
                **_entry(contestant, speeds, rounds.get(name, {}), whole.get(name)),
                "error": errors.get(name),
                "target_epoch": epoch,
                "target_seconds": seconds,
            }
        )
    return {
        "num_ranks": num_ranks,
        "target": {"metric": target[0], "value": target[1]} if target else None,
        "strategies": entries,
        "conclusion": [
            *on_speed(speeds),
            *on_scaling(speeds, num_ranks),
            *_on_whole_runs(whole, target, reached),
            *(f"{name} failed: {error}" for name, error in errors.items()),
        ],
    }


def _on_whole_runs(
    whole: Mapping[str, Training],
    target: tuple[str, float] | None,
    reached: Mapping[str, tuple[int, float] | None],
) -> list[str]:
    """States what the whole runs say: time to the target, test metric, numbers of examples."""
    lines = []
    if target and whole:
        metric, value = target
        known = _metric_names(training.epochs for training in whole.values())
        if metric in known:
            lines.append(on_target(metric, value, reached))
        else:
            lines.append(f"{metric} is not a metric of these runs; they have {', '.join(known)}.")

    tests = {name: _test_metrics(training) for name, training in whole.items()}
    tests = {name: metrics for name, metrics in tests.items() if metrics}
    if len(tests) > 1:
        first, *_ = tests.values()
        accuracies = [name for name in first if "accuracy" in name]
        if accuracies:
            metric = accuracies[0]
            lines.append(on_test(metric, {name: metrics[metric] for name, metrics in tests.items()}))

    examples = {
        name: training.result["num_steps"] * training.result["global_batch"] for name, training in whole.items()
    }
    return lines + on_examples(examples)


def _entry(
    contestant: Contestant,
    speeds: Mapping[str, Mapping[int, float]],
    rounds: Mapping[int, Training],
    whole: Training | None,
) -> dict[str, Any]:
    """One strategy in compare.json. What whole runs measure is None or empty without one."""
    speed = speeds[contestant.name]
    comparison = None
    if not contestant.is_single:
        comparison = against(speed, speeds.get(SINGLE, {}))

    runs = [*rounds.values()]
    if whole:
        runs.append(whole)
    record = runs[-1].result if runs else {}
    differences = dict.fromkeys([*contestant.differences, *record.get("differences", ())])
    return {
        "name": contestant.name,
        "words": list(contestant.overrides),
        "differences": list(differences),
        "examples_per_second": median(speed.values()) if speed else None,
        "rounds": [_round_entry(number, run) for number, run in sorted(rounds.items())],
        "against_single": asdict(comparison[0]) if comparison else None,
        "peak_bytes": max((run.peak_bytes for run in runs if run.peak_bytes), default=None),
        "gpu_bytes": max((run.gpu_bytes for run in runs if run.gpu_bytes), default=None),
        "global_batch": record.get("global_batch"),
        "num_parameters": record.get("num_parameters"),
        "versions": record.get("versions"),
        "num_steps": whole.result.get("num_steps") if whole else None,
        "seconds": whole.seconds if whole else None,
        "cpu_seconds": whole.cpu_seconds if whole else None,
        "tests": _test_metrics(whole) if whole else {},
        "curve": curve(whole) if whole else [],
    }


def _round_entry(number: int, run: Training) -> dict[str, Any]:
    return {
        "round": number,
        "examples_per_second": run.result.get("examples_per_second"),
        "step_seconds": run.result.get("step_seconds"),
        "split": run.result.get("split"),
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "peak_bytes": run.peak_bytes,
        "gpu_bytes": run.gpu_bytes,
    }


def speeds_of(rounds: Mapping[int, Training]) -> dict[int, float]:
    """Returns examples/s over all ranks by round, without rounds that were too short to be timed."""
    speeds = {number: training.result.get("examples_per_second") for number, training in rounds.items()}
    return {number: rate for number, rate in speeds.items() if rate}


def curve(training: Training) -> list[dict[str, Any]]:
    """Returns one point for each epoch, without metrics that are not finite.

    Seconds are those of training alone, without start, validation and checkpoints.
    """
    batch = training.result.get("global_batch") or 0
    seconds = 0.0
    points = []
    for record in training.epochs:
        seconds += record.seconds
        metrics = {name: value for name, value in record.metrics.items() if math.isfinite(value)}
        points.append({"epoch": record.epoch, "seconds": seconds, "examples": record.step * batch, **metrics})
    return points


def lower_is_better(metric: str) -> bool:
    """Judges by the metric's name.

    >>> lower_is_better("val_loss"), lower_is_better("val_accuracy")
    (True, False)
    """
    return any(part in _LOWER_IS_BETTER for part in metric.split("_"))


def reached_at(epochs: Sequence[EpochRecord], metric: str, value: float) -> tuple[int, float] | None:
    """Returns the first epoch whose metric reaches the value, and the seconds of training up to its end."""
    sign = -1 if lower_is_better(metric) else 1
    seconds = 0.0
    for record in epochs:
        seconds += record.seconds
        # A NaN, here a missing metric, is never greater or equal.
        if sign * record.metrics.get(metric, math.nan) >= sign * value:
            return record.epoch, seconds
    return None


def best_of_all(runs: Sequence[Sequence[EpochRecord]]) -> tuple[str, float] | None:
    """Returns the metric to compare, in validation if there is any, and the best value that every run reached."""
    metrics = [set(_metric_names([epochs])) for epochs in runs]
    shared = set.intersection(*metrics) if metrics else set()
    metric = next((name for name in _TARGET_METRICS if name in shared), None)
    if metric is None:
        return None
    sign = -1 if lower_is_better(metric) else 1
    bests = [max(sign * record.metrics[metric] for record in epochs if metric in record.metrics) for epochs in runs]
    return metric, sign * min(bests)


def _metric_names(runs: Iterable[Sequence[EpochRecord]]) -> list[str]:
    return list(dict.fromkeys(name for epochs in runs for record in epochs for name in record.metrics))


def _test_metrics(training: Training) -> dict[str, float]:
    metrics = training.result.get("metrics", {})
    return {name: value for name, value in metrics.items() if name.startswith("test_")}


def table(comparison: Mapping[str, Any]) -> list[list[str]]:
    """Returns the table, header first; a strategy that failed has what is known."""
    strategies = comparison["strategies"]
    target = comparison["target"]
    tests = list(dict.fromkeys(name for entry in strategies for name in entry["tests"]))
    has_gpus = any(entry["gpu_bytes"] for entry in strategies)

    header = ["strategy", "examples/s", "against single"]
    header.append(f"s to {target['metric']} {target['value']:.4g}" if target else "s to target")
    header += [*tests, "memory MB"]
    if has_gpus:
        header.append("GPU MB")
    return [[*header, "CPU s", "s in all"], *(_table_row(entry, tests, has_gpus) for entry in strategies)]


def _table_row(entry: Mapping[str, Any], tests: Sequence[str], has_gpus: bool) -> list[str]:
    against_single = "-"
    if entry["against_single"]:
        ratio = Ratio(**entry["against_single"])
        against_single = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    target = "-"
    if entry["target_epoch"]:
        target = f"{entry['target_seconds']:.1f} (epoch {entry['target_epoch']})"

    row = [entry["name"], _number(entry["examples_per_second"]), against_single, target]
    row += [_number(entry["tests"].get(name), ".4f") for name in tests]
    row.append(_megabytes(entry["peak_bytes"]))
    if has_gpus:
        row.append(_megabytes(entry["gpu_bytes"]))
    row.append(_number(entry["cpu_seconds"]))
    row.append("failed" if entry["error"] else _number(entry["seconds"]))
    return row


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)


def _megabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:,.0f}"
