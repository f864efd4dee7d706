"""A comparison as plain values: the content of compare.json, which table, page and picture show. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from hvtrain.compare.conclusion import against, on_examples, on_scaling, on_speed, on_target, on_test
from hvtrain.compare.contestants import SINGLE, Contestant
from hvtrain.compare.one_run import Training
from hvtrain.compare.rounds import Ratio
from hvtrain.core.records import EpochRecord

_LOWER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse")


def summary(
    contestants: Sequence[Contestant],
    rounds: Mapping[str, Mapping[int, Training]],
    whole: Mapping[str, Training],
    errors: Mapping[str, str],
    num_ranks: int,
    target: tuple[str, float] | None,
) -> dict[str, Any]:
    """All of it. target: metric and value; None: the best value that all whole runs reached."""
    speeds = {one.name: speeds_of(rounds.get(one.name, {})) for one in contestants}
    target = target or best_of_all([training.epochs for training in whole.values()])
    reached = {name: reached_at(one.epochs, *target) if target else None for name, one in whole.items()}
    lines = [*on_speed(speeds), *on_scaling(speeds, num_ranks)]
    known = dict.fromkeys(name for one in whole.values() for record in one.epochs for name in record.metrics)
    if target and whole:
        here = f"{target[0]} is not a metric of these runs; they have {', '.join(known)}."
        lines.append(on_target(*target, reached) if target[0] in known else here)
    tests = {name: tested for name, one in whole.items() if (tested := _tests(one.result))}
    if len(tests) > 1 and (shared := [key for key in next(iter(tests.values())) if "accuracy" in key]):
        lines.append(on_test(shared[0], {name: tested[shared[0]] for name, tested in tests.items()}))
    lines += on_examples({name: one.result["num_steps"] * one.result["global_batch"] for name, one in whole.items()})
    lines += [f"{name} failed: {error}" for name, error in errors.items()]
    return {
        "num_ranks": num_ranks,
        "target": {"metric": target[0], "value": target[1]} if target else None,
        "strategies": [
            {
                **_entry(one, speeds, rounds.get(one.name, {}), whole.get(one.name)),
                "error": errors.get(one.name),
                "target_epoch": (reached.get(one.name) or (None, None))[0],
                "target_seconds": (reached.get(one.name) or (None, None))[1],
            }
            for one in contestants
        ],
        "conclusion": lines,
    }


def _entry(
    one: Contestant, speeds: Mapping[str, Mapping[int, float]], rounds: Mapping[int, Training], whole: Training | None
) -> dict[str, Any]:
    own = speeds[one.name]
    found = against(own, speeds.get(SINGLE, {})) if not one.is_single else None
    runs = [*rounds.values(), *([whole] if whole else [])]
    record = runs[-1].result if runs else {}
    unequal = dict.fromkeys([*one.differences, *record.get("differences", ())])
    return {
        "name": one.name,
        "words": list(one.words),
        "differences": list(unequal),
        "examples_per_second": median(own.values()) if own else None,
        "rounds": [
            {
                "round": number,
                **{key: run.result.get(key) for key in ("examples_per_second", "step_seconds", "split")},
                **{key: getattr(run, key) for key in ("seconds", "cpu_seconds", "peak_bytes", "gpu_bytes")},
            }
            for number, run in sorted(rounds.items())
        ],
        "against_single": asdict(found[0]) if found else None,
        "peak_bytes": _most(run.peak_bytes for run in runs),
        "gpu_bytes": _most(run.gpu_bytes for run in runs),
        "global_batch": record.get("global_batch"),
        "num_parameters": record.get("num_parameters"),
        "versions": record.get("versions"),
        "num_steps": whole.result.get("num_steps") if whole else None,
        "seconds": whole.seconds if whole else None,
        "cpu_seconds": whole.cpu_seconds if whole else None,
        "tests": _tests(whole.result) if whole else {},
        "curve": curve(whole) if whole else [],
    }


def speeds_of(rounds: Mapping[int, Training]) -> dict[int, float]:
    """Examples per second over all ranks, by round."""
    found = {number: training.result.get("examples_per_second") for number, training in rounds.items()}
    return {number: rate for number, rate in found.items() if rate}


def curve(training: Training) -> list[dict[str, Any]]:
    """One point for each epoch; seconds are those of training alone, without start, validation and checkpoints."""
    seconds, points, batch = 0.0, [], training.result.get("global_batch") or 0
    for record in training.epochs:
        seconds += record.seconds
        finite = {name: value for name, value in record.metrics.items() if math.isfinite(value)}
        points.append({"epoch": record.epoch, "seconds": seconds, "examples": record.step * batch, **finite})
    return points


def lower_is_better(metric: str) -> bool:
    """By the metric's name.

    >>> lower_is_better("val_loss"), lower_is_better("val_accuracy")
    (True, False)
    """
    return any(word in metric.split("_") for word in _LOWER_IS_BETTER)


def reached_at(epochs: Sequence[EpochRecord], metric: str, value: float) -> tuple[int, float] | None:
    """Number of the first epoch whose metric reaches the value, and the seconds of training up to its end."""
    seconds = 0.0
    for record in epochs:
        seconds += record.seconds
        found = record.metrics.get(metric, math.nan)
        if found <= value if lower_is_better(metric) else found >= value:
            return record.epoch, seconds
    return None


def best_of_all(runs: Sequence[Sequence[EpochRecord]]) -> tuple[str, float] | None:
    """The metric to compare, in validation if there is any, and the best value that every run reached."""
    names = [{name for record in epochs for name in record.metrics} for epochs in runs]
    shared = set.intersection(*names) if names else set()
    metric = next((name for name in ("val_accuracy", "accuracy", "val_loss", "loss") if name in shared), None)
    if metric is None:
        return None
    values = [[record.metrics[metric] for record in epochs if metric in record.metrics] for epochs in runs]
    lower = lower_is_better(metric)
    return metric, (max if lower else min)((min if lower else max)(of_run) for of_run in values)


def _tests(result: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in result.get("metrics", {}).items() if name.startswith("test_")}


def _most(values: Any) -> int | None:
    return max((value for value in values if value), default=None)


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """The table, header first; a strategy that failed has what is known."""
    target = found["target"]
    tests = list(dict.fromkeys(name for one in found["strategies"] for name in one["tests"]))
    has_gpus = any(one["gpu_bytes"] for one in found["strategies"])
    until = f"s to {target['metric']} {target['value']:.4g}" if target else "s to target"
    head = ["strategy", "examples/s", "against single", until, *tests, "memory MB", *(["GPU MB"] if has_gpus else [])]
    table = [[*head, "CPU s", "s in all"]]
    for one in found["strategies"]:
        ratio = Ratio(**one["against_single"]) if one["against_single"] else None
        line = [
            one["name"],
            _number(one["examples_per_second"], ",.0f"),
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "-",
            f"{one['target_seconds']:.1f} (epoch {one['target_epoch']})" if one["target_epoch"] else "-",
            *(_number(one["tests"].get(name), ".4f") for name in tests),
            _number(one["peak_bytes"] and one["peak_bytes"] / 1e6, ",.0f"),
            *([_number(one["gpu_bytes"] and one["gpu_bytes"] / 1e6, ",.0f")] if has_gpus else []),
            _number(one["cpu_seconds"], ",.0f"),
            "failed" if one["error"] else _number(one["seconds"], ",.0f"),
        ]
        table.append(line)
    return table


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text, with all columns but the first right-aligned.

    >>> aligned([["a", "speed"], ["long", "7"]])
    ['a     speed', 'long      7']
    """
    widths = [max(map(len, column)) for column in zip(*table)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(zip(row, widths))
        )
        for row in table
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
