"""Compares several runs: figures in a sortable table, curves in common charts, and the settings that differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvtrain.config.validate import flatten
from hvtrain.report.curves import NUM_COLORS, charts_of_several, svg
from hvtrain.report.page import duration, in_words, render, text_of
from hvtrain.report.run_files import RunFiles

_PLACES = ("run.dir", "run.name", "run.report")  # Different in any two runs, or of no interest.


def html(runs: Sequence[RunFiles]) -> str:
    """The page that compares runs."""
    labels = labelled(runs)
    metrics = list(dict.fromkeys(name for run in runs for name in run.result.get("metrics", {})))
    best = list(dict.fromkeys(f"best {one['metric']}" for run in runs if (one := run.result.get("best"))))
    speeds = ["examples/s", "of each rank", "efficiency"]
    return render(
        "comparison.html.j2",
        title=f"{len(runs)} runs",
        columns=["run", "state", *metrics, *best, "ranks", *speeds, "time", "began"],
        rows=[_row(run, label, metrics, best) for run, label in zip(runs, labels)],
        labels=labels,
        num_colors=NUM_COLORS,
        drawn=[(chart.title, svg(chart, has_legend=False)) for chart in charts_of_several(runs, labels)],
        settings=differing([run.config for run in runs]),
        script=(Path(__file__).parent / "sort.js").read_text(encoding="utf-8"),
    )


def labelled(runs: Sequence[RunFiles]) -> list[str]:
    """Names of the folders, with as many parent folders as it takes to tell them apart."""
    parts = [run.folder.parts for run in runs]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(run.folder) for run in runs]


def differing(configs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same in all runs, with each run's value; "" where a run has no such setting.

    >>> differing([{"seed": 1, "train": {"epochs": 2}}, {"seed": 1, "train": {"epochs": None}, "new": True}])
    [('train.epochs', ['2', 'null']), ('new', ['', 'true'])]
    """
    flat = [{name: text_of(value) for name, value in flatten(config).items()} for config in configs]
    names = dict.fromkeys(name for one in flat for name in one)
    found = [(name, [one.get(name, "") for one in flat]) for name in names if name not in _PLACES]
    return [(name, values) for name, values in found if len(set(values)) > 1]


def _row(run: RunFiles, label: str, metrics: Sequence[str], best: Sequence[str]) -> list[tuple[Any, str]]:
    """Cells: the value to sort by, None if it is not known, and the text."""
    result = run.result
    own, found = result.get("metrics", {}), result.get("best") or {}
    split = result.get("split") or {}
    rate, ranks, efficiency, seconds = (
        run.examples_per_second,
        run.num_ranks,
        split.get("efficiency"),
        result.get("seconds"),
    )
    return [
        (label, label),
        (run.state, in_words(run)),
        *((own.get(name), f"{own[name]:.4g}" if name in own else "") for name in metrics),
        *(
            (found["value"], f"{found['value']:.4g}") if name == f"best {found.get('metric')}" else (None, "")
            for name in best
        ),
        (ranks, str(ranks or "")),
        (rate, f"{rate:,.0f}" if rate else ""),
        (rate / ranks if rate and ranks else None, f"{rate / ranks:,.0f}" if rate and ranks else ""),
        (efficiency, f"{efficiency:.0%}" if efficiency is not None else ""),
        (seconds, duration(seconds) if seconds is not None else ""),
        (run.began, run.began),
    ]
