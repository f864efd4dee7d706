"""`python -m hvtrain report` and `runs`: pages about runs, and a list of the runs in a folder.

report rewrites the page of one run, or compares several runs on one page: a sortable table, charts
with a curve for each run, and the settings that differ. Everything comes from files in the run
folders, so neither TensorFlow nor the data set is needed.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvtrain.errors import ConfigError, UserError
from hvtrain.report.charts import SERIES, comparison_charts, svg
from hvtrain.report.page import FOLDER, REPORT_FILE, render, write_page, yaml_text
from hvtrain.report.run_files import RunFiles, is_run_folder, read_run
from hvtrain.system.command import Parser
from hvtrain.system.files import is_remote, json_text, page_path, write_atomic
from hvtrain.system.storage.cache import path_of
from hvtrain.system.text import aligned, flatten, format_known

COMPARISON_FILE = "comparison.html"
# Settings that differ between any two runs, or say nothing about the training.
_NOT_COMPARED = ("run.dir", "run.name", "run.report")

DEFAULT_FOLDER = "runs"
# Number of folder levels below DIR that are searched.
DEPTH = 3

# A run as --json prints it; keys are COLUMNS. Unknown values are None; an unknown date is empty.
Row = dict[str, Any]
COLUMNS = (
    "run",
    "state",
    "resumable",
    "metric",
    "score",
    "sign",
    "examples_per_second",
    "num_ranks",
    "progress",
    "began",
    "error",
)


def report_runs() -> int:
    """Writes the page of one run, or a comparison of several, and prints the paths of the files."""
    parser = Parser(
        "python -m hvtrain report",
        description="""\
Rewrites the report of a run, report.html and curves.png, from the files in its folder, even if the run is unfinished or
has failed. Several runs are compared on one page: a sortable table of figures, charts with a curve for each run, and
the settings that differ.""",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder; python -m hvtrain runs lists them"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"the page; default: RUN/{REPORT_FILE}, or {COMPARISON_FILE} in the current folder for several runs",
    )
    options = parser.parse_args()
    # run=RUN is accepted too, as in the commands for finished runs.
    folders = [folder.removeprefix("run=") for folder in options.runs]
    runs = [read_run(path_of(folder)) for folder in folders]

    if len(runs) > 1:
        path = page_path(options.output or COMPARISON_FILE)
        write_atomic(path, comparison_html(runs))
        print(path)
        return 0

    # A single run gets a page with all its figures. The page of a run in object storage goes to the
    # current folder, so that the local copy of the run stays unchanged.
    folder = Path() if is_remote(folders[0]) else runs[0].folder
    written = write_page(runs[0], page_path(options.output or folder / REPORT_FILE))
    print(" and ".join(map(str, written)))
    return 0


def comparison_html(runs: Sequence[RunFiles]) -> str:
    """Returns the HTML page that compares several runs."""
    # A run is labeled with its folder's path, relative to the innermost folder that contains all runs.
    common = os.path.commonpath([run.folder.parent for run in runs])
    labels = [str(run.folder.relative_to(common)) for run in runs]

    return render(
        "report/comparison.html.j2",
        runs=list(zip(labels, runs)),
        # Runs of different tasks have different metrics, each in its own column.
        metrics=dict.fromkeys(name for run in runs for name in run.result.get("metrics", {})),
        # Runs may also choose their best checkpoints by different metrics.
        bests=dict.fromkeys(run.result["best"]["metric"] for run in runs if run.result.get("best")),
        num_colors=len(SERIES),
        drawn=[(chart.title, svg(chart)) for chart in comparison_charts(runs)],
        settings=differing_settings([run.config for run in runs]),
        script=(FOLDER / "sort.js").read_text("utf-8"),
    )


def differing_settings(configs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Returns the settings that differ between runs, with each run's value.

    The value is "" for a run that lacks the setting. Settings that all runs have come first; the
    others only reflect a different model or data set.

    >>> differing_settings([{"new": True, "train": {"epochs": 2}}, {"seed": 1, "train": {"epochs": None}}])
    [('train.epochs', ['2', 'null']), ('new', ['true', '']), ('seed', ['', '1'])]
    """
    # Compared as displayed text: 1 and 1.0 differ, and text is hashable, unlike lists.
    runs_settings = [
        {name: yaml_text(value) for name, value in flatten(config).items()} for config in configs
    ]
    names = dict.fromkeys(
        name for settings in runs_settings for name in settings if name not in _NOT_COMPARED
    )
    rows = [(name, [settings.get(name, "") for settings in runs_settings]) for name in names]
    rows.sort(key=lambda row: "" in row[1])
    return [(name, values) for name, values in rows if len(set(values)) > 1]


# Scores and speeds are negated, to sort the best run first. A key of None (unknown) comes last.
SORT_KEYS: dict[str, Callable[[Row], Any]] = {
    "date": lambda row: row["began"] or None,
    # Scores of different metrics cannot be compared, so runs are grouped by metric.
    "score": lambda row: row["metric"] and (row["metric"], -row["sign"] * row["score"]),
    "speed": lambda row: row["examples_per_second"] and -row["examples_per_second"],
    "state": lambda row: row["state"],
    "name": lambda row: row["run"],
}


def list_runs() -> int:
    """Lists the runs in a folder as a table, or as JSON."""
    parser = Parser(
        "python -m hvtrain runs",
        description="""\
Lists the runs in a folder. Each is running, finished, stopped (on request), failed or damaged. The score is the task's
metric on the test data, or else the best value so far; the speed is in examples per second over all ranks.""",
        epilog="python -m hvtrain report RUN... makes a page about one run, or compares several.",
    )
    parser.add_argument(
        "dir",
        nargs="?",
        default=DEFAULT_FOLDER,
        metavar="DIR",
        help=f"folder to search; default: {DEFAULT_FOLDER}",
    )
    parser.add_argument(
        "--sort", choices=SORT_KEYS, default="date", help="order of the runs; default: date"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all digits")
    options = parser.parse_args()
    folder = Path(options.dir)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder that holds the runs")

    rows = [run_row(path, folder) for path in find_runs(folder)]
    key = SORT_KEYS[options.sort]
    # None cannot be compared with a number, so the first element alone puts such rows last.
    rows.sort(key=lambda row: (key(row) is None, key(row)))

    if options.json:
        print(json_text(rows))
    elif rows:
        print("\n".join(table(rows)))
    else:
        print(f"no runs in {folder}")

    return 0


def find_runs(folder: Path) -> Iterator[Path]:
    """Yields the run folders down to DEPTH levels below a folder, which may itself be one."""
    # os.walk skips folders that this user may not read, and does not follow symbolic links, which
    # may lead back to a parent. It descends only into what is left in `folders`.
    for root, folders, _ in os.walk(folder):
        path = Path(root)
        is_run = is_run_folder(path)
        if is_run:
            yield path
        if is_run or len(path.relative_to(folder).parts) == DEPTH:
            folders.clear()
        # Sorted, and without hidden folders, such as those of editors and version control.
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def run_row(path: Path, folder: Path) -> Row:
    """Returns the row of the run in `path`; `folder` is the folder that is listed.

    A damaged run gets the state "damaged" and an error.
    """
    name = str(path.relative_to(folder))
    if path == folder:
        name = path.absolute().name  # absolute(), because "." has no name.

    row: Row = dict.fromkeys(COLUMNS)
    row.update(run=name, state="damaged", resumable=False, began="")
    # One damaged run must not hide the others.
    try:
        run = read_run(path)
    except UserError as error:
        row["error"] = str(error)
        return row

    for column in ("state", "sign", "examples_per_second", "num_ranks", "progress", "began"):
        row[column] = getattr(run, column)
    row["resumable"] = run.is_resumable
    # A score that is not finite can be neither sorted nor written as JSON.
    if run.score and math.isfinite(run.score[1]):
        row["metric"], row["score"] = run.score

    return row


def table(rows: list[Row]) -> list[str]:
    """Formats the runs as the lines of a table. The run's name, which may be long, comes last."""
    header = ("began", "state", "ranks", "ex/s", "score", "metric", "run")
    # Text is aligned to the left, numbers to the right.
    lines = aligned([header, *map(_cells, rows)], "<<>>><<")
    if any(row["resumable"] for row in rows):
        lines += ["", "* to resume such a run, repeat its command with run.dir=RUN"]

    return lines


def _cells(row: Row) -> tuple[str, ...]:
    """Returns a run's cells in the columns of table(); a cell is empty if its value is unknown."""
    state = row["state"]
    if row["progress"] is not None and state != "finished":
        state += f" {row['progress']:.0%}"
    if row["resumable"]:
        state += "*"
    return (
        row["began"],
        state,
        str(row["num_ranks"] or ""),
        format_known(row["examples_per_second"], ",.0f", missing=""),
        # "#" keeps trailing zeros, so that all scores have four significant digits.
        format_known(row["score"], "#.4g", missing=""),
        row["metric"] or "",
        row["run"],
    )
