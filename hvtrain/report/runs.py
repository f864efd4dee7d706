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

DEFAULT_FOLDER = "runs"
SORTED_BY: dict[str, Callable[[dict[str, Any]], Any]] = {
    "date": lambda row: row["began"],
    "score": lambda row: None if row["score"] is None else (row["metric"], -row["sign"] * row["score"]),
    "speed": lambda row: None if row["examples_per_second"] is None else -row["examples_per_second"],
    "state": lambda row: row["state"],
    "name": lambda row: row["run"],
}
DEPTH = 3  # How many levels below DIR are searched.
WIDTH = 80


def main() -> int:
    """Prints the table, or JSON."""
    options = _parser().parse_args(sys.argv[1:])
    folder = Path(options.dir)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder that holds the runs")
    rows = [described(path, folder) for path in find_runs(folder)]
    key = SORTED_BY[options.sort]
    # Scores (by metric) and speeds are sorted best first. Unknown values come last.
    known, unknown = ([row for row in rows if (key(row) in (None, "")) is missing] for missing in (False, True))
    rows = [*sorted(known, key=key), *unknown]
    if options.json:
        print(json.dumps(rows, indent=1))
    elif rows:
        print("\n".join(table(rows)))
    else:
        print(f"no runs in {folder}")
    return 0


def find_runs(folder: Path, depth: int = DEPTH) -> list[Path]:
    """Run folders in a folder and those below it; it may be one itself."""
    try:
        if is_run_folder(folder):
            return [folder]
        if depth == 0:
            return []
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:  # Another user's.
        return []
    return [run for path in below if not path.name.startswith(".") for run in find_runs(path, depth - 1)]


def described(path: Path, folder: Path) -> dict[str, Any]:
    """A run as a row; a damaged one has the state "damaged" and the error."""
    name = str(path.relative_to(folder)) if path != folder else path.absolute().name
    empty: dict[str, Any] = dict.fromkeys(("metric", "score", "sign", "examples_per_second", "num_ranks", "progress"))
    row = {"run": name, "state": "damaged", "resumable": False, **empty, "began": "", "error": None}
    try:
        run = read_run(path)
    except UserError as error:
        return {**row, "error": str(error)}
    metric, score = run.score or (None, None)
    if score is not None and not math.isfinite(score):  # It has no place in an order, nor in JSON.
        metric = score = None
    found = {"metric": metric, "score": score, "sign": run.sign, "examples_per_second": run.examples_per_second}
    more = {"num_ranks": run.num_ranks, "progress": run.progress, "began": run.began}
    return {**row, "state": run.state, "resumable": run.is_resumable, **found, **more}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of at most WIDTH characters, unless names need more."""
    lines = [["began", "state", "ranks", "ex/s", "score", "run"]]
    for row in rows:
        part = f" {row['progress']:.0%}" if row["progress"] is not None and row["state"] != "finished" else ""
        rate, score = row["examples_per_second"], row["score"]
        lines.append(
            [
                row["began"],
                f"{row['state']}{part}{'*' * row['resumable']}",
                str(row["num_ranks"] or ""),
                f"{rate:,.0f}" if rate else "",
                f"{score:.4g} {row['metric']}" if score is not None else "",
                row["run"],
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines)]
    # The name of the metric is cut first, then the beginning of the run's name, which is often a date.
    room = WIDTH - sum(widths[:4]) - 2 * 5
    widths[4] = min(widths[4], max(16, room - widths[5]))
    widths[5] = min(widths[5], max(12, room - widths[4]))
    text = []
    for began, state, ranks, rate, score, run in lines:
        numbers = f"{ranks:>{widths[2]}}  {rate:>{widths[3]}}"
        short = f"{began:<{widths[0]}}  {state:<{widths[1]}}  {numbers}  {_cut(score, widths[4]):<{widths[4]}}"
        text.append(f"{short}  {run if len(run) <= widths[5] else '…' + run[1 - widths[5] :]}".rstrip())
    if any(row["resumable"] for row in rows):
        text += ["", "* the same command with run.dir=RUN resumes from its newest checkpoint"]
    return text


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain runs",
        description="""\
Lists the runs in a folder. Each is running, finished, stopped (it was asked to) or failed. The score is the task's
metric on the test data, or else the best value so far; the speed is in examples per second over all ranks.""",
        epilog="python -m hvtrain report RUN... makes a page about one run, or compares several.",
    )
    parser.add_argument(
        "dir", nargs="?", default=DEFAULT_FOLDER, metavar="DIR", help=f"folder to search; default: {DEFAULT_FOLDER}"
    )
    parser.add_argument("--sort", choices=SORTED_BY, default="date", help="order of the runs; default: date")
    parser.add_argument("--json", action="store_true", help="print JSON, with all digits")
    return parser
