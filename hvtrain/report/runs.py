"""`python -m hvtrain runs [DIR]`: lists the runs below a folder, with their state, score and speed."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvtrain.errors import ConfigError, UserError
from hvtrain.report.run_files import is_run_folder, read_run
from hvtrain.system.command import Parser
from hvtrain.system.text import format_known

DEFAULT_FOLDER = "runs"
# Levels of folders below DIR that are searched.
DEPTH = 3
# Characters of a line, unless names need more.
WIDTH = 80
MIN_SCORE_WIDTH = 16
MIN_NAME_WIDTH = 12

COLUMNS = (
    *("run", "state", "resumable", "metric", "score", "sign"),
    *("examples_per_second", "num_ranks", "progress", "began", "error"),
)
# A run as --json prints it. Unknown values are None, an unknown date is empty.
Row = dict[str, Any]


def _score_key(row: Row) -> Any:
    # Scores of different metrics cannot be compared, so they stand together by metric.
    return None if row["score"] is None else (row["metric"], -row["sign"] * row["score"])


def _speed_key(row: Row) -> Any:
    speed = row["examples_per_second"]
    return None if speed is None else -speed


# Scores and speeds are sorted best first. None stands for unknown, which comes last.
SORT_KEYS: dict[str, Callable[[Row], Any]] = {
    "date": lambda row: row["began"] or None,
    "score": _score_key,
    "speed": _speed_key,
    "state": lambda row: row["state"],
    "name": lambda row: row["run"],
}


def main() -> int:
    """Prints the table, or JSON."""
    options = _parser().parse_args(sys.argv[1:])
    folder = Path(options.dir)
    # The default may be missing: nothing has been trained here yet.
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder that holds the runs")

    rows = [run_row(path, folder) for path in find_runs(folder)]
    key = SORT_KEYS[options.sort]
    # None cannot be compared with a number, so all of them come last.
    rows.sort(key=lambda row: (key(row) is None, key(row)))

    if options.json:
        print(json.dumps(rows, indent=1))
    elif rows:
        print("\n".join(table(rows)))
    else:
        print(f"no runs in {folder}")

    return 0


def find_runs(folder: Path, depth: int = DEPTH) -> list[Path]:
    """Returns the run folders in a folder and the levels below it; it may be one itself."""
    try:
        if is_run_folder(folder):
            return [folder]
        if depth == 0:
            return []
        # Links may lead back to a folder above.
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:  # A folder that another user keeps private.
        return []

    # Hidden folders are those of editors and version control.
    return [run for path in below if not path.name.startswith(".") for run in find_runs(path, depth - 1)]


def run_row(path: Path, folder: Path) -> Row:
    """Describes the run in `path`, below the listed folder. A damaged run has that state, and the error."""
    # DIR may be a run itself, and "." has no name.
    name = path.absolute().name
    if path != folder:
        name = str(path.relative_to(folder))

    row: Row = dict.fromkeys(COLUMNS)
    # One damaged run is no reason to hide the others.
    row.update(run=name, state="damaged", resumable=False, began="")
    try:
        run = read_run(path)
    except UserError as error:
        row["error"] = str(error)
        return row

    row.update(
        state=run.state,
        resumable=run.is_resumable,
        sign=run.sign,
        examples_per_second=run.examples_per_second,
        num_ranks=run.num_ranks,
        progress=run.progress,
        began=run.began,
    )
    if run.score and math.isfinite(run.score[1]):  # Another one can be neither sorted nor written as JSON.
        row["metric"], row["score"] = run.score

    return row


def table(rows: list[Row]) -> list[str]:
    """Returns lines of at most WIDTH characters, unless names need more."""
    cells = [("began", "state", "ranks", "ex/s", "score", "run"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]

    # The name of the metric is cut first, then the beginning of the run's name, which is often a date.
    left = WIDTH - sum(widths[:4]) - 2 * 5
    score_width = min(widths[4], max(MIN_SCORE_WIDTH, left - widths[5]))
    name_width = min(widths[5], max(MIN_NAME_WIDTH, left - score_width))

    lines = []
    for began, state, ranks, rate, score, name in cells:
        if len(score) > score_width:
            score = f"{score[: score_width - 1]}…"
        if len(name) > name_width:
            name = f"…{name[1 - name_width :]}"
        columns = [
            began.ljust(widths[0]),
            state.ljust(widths[1]),
            ranks.rjust(widths[2]),
            rate.rjust(widths[3]),
            score.ljust(score_width),
            name,
        ]
        lines.append("  ".join(columns).rstrip())

    if any(row["resumable"] for row in rows):
        lines += ["", "* the same command with run.dir=RUN resumes from its newest checkpoint"]

    return lines


def _cells(row: Row) -> tuple[str, ...]:
    state = row["state"]
    if row["progress"] is not None and state != "finished":
        state += f" {row['progress']:.0%}"
    if row["resumable"]:
        state += "*"
    rate = row["examples_per_second"]

    return (
        row["began"],
        state,
        str(row["num_ranks"] or ""),
        format_known(rate, ",.0f", missing=""),
        "" if row["score"] is None else f"{row['score']:.4g} {row['metric']}",
        row["run"],
    )


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain runs",
        description="""\
Lists the runs in a folder. Each is running, finished, stopped (it was asked to) or failed. The score is the task's
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
    parser.add_argument("--sort", choices=SORT_KEYS, default="date", help="order of the runs; default: date")
    parser.add_argument("--json", action="store_true", help="print JSON, with all digits")

    return parser
