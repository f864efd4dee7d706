"""`python -m hvtrain report RUN...`: writes the report of a run again, or compares several runs on one page.

A comparison has a sortable table, curves in common charts, and the settings that differ. Everything
on a page comes from the files of the run folders, so neither TensorFlow nor the data are needed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvtrain.config.validate import flatten
from hvtrain.core.files import write_atomic
from hvtrain.errors import ConfigError
from hvtrain.report.charts import SERIES, charts_of_several, svg
from hvtrain.report.page import FOLDER, REPORT_FILE, render, state_text, write_page, yaml_text
from hvtrain.report.run_files import RunFiles, read_run
from hvtrain.system.command import Parser
from hvtrain.system.text import duration, format_known

# The value to sort by, None if it is unknown, and the text.
Cell = tuple[Any, str]

COMPARISON_FILE = "comparison.html"
# They differ between any two runs, or say nothing about the training.
_NOT_COMPARED = ("run.dir", "run.name", "run.report")
_LAST_COLUMNS = ("ranks", "examples/s", "of each rank", "efficiency", "time", "began")


def main() -> int:
    """Reads the run folders, writes the page, and prints which files it wrote."""
    options = _parser().parse_args(sys.argv[1:])
    runs = [read_run(Path(folder)) for folder in options.runs]
    # One run has a page of its own kind, with all its figures.
    is_comparison = len(runs) > 1

    default = Path(COMPARISON_FILE) if is_comparison else runs[0].folder / REPORT_FILE
    path = Path(options.output or default)
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}; make it, or choose another file")

    if is_comparison:
        write_atomic(path, comparison_html(runs))
        print(path)
    else:
        written = write_page(runs[0], path)
        print(" and ".join(map(str, written)))

    return 0


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain report",
        description="""\
Writes the report of a run again, report.html and curves.png, from the files in its folder; also of a run that is still
going or has failed. Several runs are compared on one page: a sortable table of figures, curves in common charts, and
the settings that differ.""",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run folder; python -m hvtrain runs lists them",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"the page; default: RUN/{REPORT_FILE}, for several runs {COMPARISON_FILE} in this folder",
    )
    return parser


def comparison_html(runs: Sequence[RunFiles]) -> str:
    """Returns the page that compares runs."""
    labels = folder_labels(runs)
    # Runs of different tasks have different ones; each has a column.
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
    # It compares runs on different numbers of ranks.
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
