"""Compares several runs on one page: a sortable table, curves in common charts, and settings that differ."""

from collections.abc import Sequence
from typing import Any

from hvtrain.config.validate import flatten
from hvtrain.report.charts import SERIES
from hvtrain.report.curves import charts_of_several, svg
from hvtrain.report.page import FOLDER, render, state_text, yaml_text
from hvtrain.report.run_files import RunFiles
from hvtrain.system.text import duration, format_known

# They differ between any two runs, or say nothing about the training.
_NOT_COMPARED = ("run.dir", "run.name", "run.report")
_LAST_COLUMNS = ("ranks", "examples/s", "of each rank", "efficiency", "time", "began")

# The value to sort by, None if it is unknown, and the text.
Cell = tuple[Any, str]


def html(runs: Sequence[RunFiles]) -> str:
    """Returns the page that compares runs."""
    labels = folder_labels(runs)
    metrics = list(dict.fromkeys(name for run in runs for name in run.result.get("metrics", {})))
    bests = [run.result["best"] for run in runs if run.result.get("best")]
    best_columns = list(dict.fromkeys(f"best {best['metric']}" for best in bests))
    charts = charts_of_several(runs, labels)

    return render(
        "comparison.html.j2",
        title=f"{len(runs)} runs",
        columns=["run", "state", *metrics, *best_columns, *_LAST_COLUMNS],
        rows=[_row(run, label, metrics, best_columns) for run, label in zip(runs, labels)],
        labels=labels,
        num_colors=len(SERIES),
        drawn=[(chart.title, svg(chart, has_legend=False)) for chart in charts],
        settings=differing([run.config for run in runs]),
        script=(FOLDER / "sort.js").read_text(encoding="utf-8"),
    )


def folder_labels(runs: Sequence[RunFiles]) -> list[str]:
    """Names of the run folders, with as many parent folders as it takes to tell them apart."""
    # The same folder may be given twice; no depth tells those apart.
    paths = [run.folder.parts for run in runs]
    for depth in range(1, max(map(len, paths), default=1) + 1):
        labels = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(labels)) == len(set(paths)):
            return labels

    return [str(run.folder) for run in runs]


def differing(configs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Returns the settings that are not the same in all runs, with each run's value; "" where it is missing.

    >>> differing([{"seed": 1, "train": {"epochs": 2}}, {"seed": 1, "train": {"epochs": None}, "new": True}])
    [('train.epochs', ['2', 'null']), ('new', ['', 'true'])]
    """
    # Compared as texts, as they are shown: 1 and 1.0 differ, and lists can be elements of a set.
    runs = [{name: yaml_text(value) for name, value in flatten(config).items()} for config in configs]
    names = dict.fromkeys(name for settings in runs for name in settings)
    rows = [(name, [settings.get(name, "") for settings in runs]) for name in names]

    return [(name, values) for name, values in rows if len(set(values)) > 1 and name not in _NOT_COMPARED]


def _row(run: RunFiles, label: str, metrics: Sequence[str], best_columns: Sequence[str]) -> list[Cell]:
    result = run.result
    values = result.get("metrics", {})
    # The metric of the best checkpoint is a setting, so runs may have different ones, each in a column.
    best = result.get("best") or {}
    bests = {f"best {best.get('metric')}": best.get("value")}

    # A run that is going has a speed, but neither a time nor an efficiency.
    rate = run.examples_per_second
    ranks = run.num_ranks
    rate_of_each = rate / ranks if rate and ranks else None
    split = result.get("split") or {}
    seconds = result.get("seconds")

    return [
        (label, label),
        (run.state, state_text(run)),
        *(_cell(values.get(name), ".4g") for name in metrics),
        *(_cell(bests.get(name), ".4g") for name in best_columns),
        (ranks, str(ranks or "")),
        _cell(rate, ",.0f"),
        _cell(rate_of_each, ",.0f"),
        _cell(split.get("efficiency"), ".0%"),
        (seconds, "" if seconds is None else duration(seconds)),
        (run.began, run.began),
    ]


def _cell(value: float | None, form: str) -> Cell:
    return value, format_known(value, form, missing="")
