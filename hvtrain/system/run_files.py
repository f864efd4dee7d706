"""Reads and writes the small files in a run folder: result.json, history.csv, ranks.csv and so on.

Nothing here checks the rank: callers make sure that only rank 0 writes.
"""

import csv
import io
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hvtrain.errors import StorageError
from hvtrain.system.files import (
    append_text,
    csv_text,
    is_own_file,
    read_file,
    read_json,
    whole_lines,
    write_atomic,
    write_json,
)
from hvtrain.system.run_lock import CLAIM_FILE, LOCK_FILE
from hvtrain.system.text import counted, human_bytes

CONFIG_FILE = "config.yaml"
README_FILE = "README.md"
RESULT_FILE = "result.json"
HISTORY_FILE = "history.csv"
RANKS_FILE = "ranks.csv"
RECEIPTS_FILE = "receipts.jsonl"
STARTS_FILE = "starts.json"
TRACKERS_FILE = "trackers.json"
REVIEW_FILE = "review.json"


@dataclass(frozen=True)
class EpochRecord:
    """One row of history.csv, written at the end of an epoch.

    epoch counts from 1, and step from the beginning of the run. Metrics are means over all ranks, weighted by the
    number of examples.
    """

    epoch: int
    step: int
    learning_rate: float
    seconds: float
    examples_per_second: float
    metrics: dict[str, float]


# No metric may have one of these names.
HISTORY_COLUMNS = ("loss", *(column.name for column in fields(EpochRecord)))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The final results of a run, saved in result.json.

    examples_per_second is over all ranks, without the warm-up, and step_seconds is the mean over the same steps; both
    are None if every step was warm-up. num_steps counts the whole run. The metrics are those of the last step.
    """

    test_accuracy: float | None
    test_loss: float | None
    examples_per_second: float | None
    step_seconds: float | None
    num_ranks: int
    num_parameters: int
    num_steps: int
    global_batch: int
    seconds: float
    reductions: int
    first_step: int
    proof: dict[str, Any]
    metrics: dict[str, float]
    versions: dict[str, str]
    config: dict[str, Any]
    # Seconds of a step by phase, and the slowest rank (step/step_timing.py).
    split: dict[str, Any] | None
    # Examples that data.on_error=skip left out on all ranks, since this start of the run.
    skipped_examples: int
    # The best checkpoint: its step, the metric that chose it with its value, and its test metrics.
    best: dict[str, Any] | None = None
    # Throughput in other units, such as tokens, over the same time as examples_per_second.
    per_second: dict[str, float]
    # A sample of the model's output, such as a text that it continued.
    sample: str | None = None
    # Settings that changed when the run was resumed (training/resume.py); config has the last ones.
    changes: list[dict[str, Any]]
    # How the strategy makes this run differ from the same run under other
    # strategies, for example by stale gradients.
    differences: list[str]
    # Number of ranks, replicas of one process, or workers of parameter servers that computed
    # gradients at the same time.
    num_replicas: int | None
    # Seconds of the run by purpose, over all its starts (training/callbacks/run_context.py).
    goodput: dict[str, float]
    # Description of the data set: phrases by label (data/description.py).
    data: dict[str, list[str]]


@dataclass
class EpochTable:
    """A CSV file with a row for each epoch, and a column for each name in any row.

    Rows are appended. The file is rewritten only for a new column, or if it has been moved away: rewriting it every
    time would write 10 GB in 10,000 epochs.

    Args:
        path: The file.
        row_of: A function that returns an item's cells by column name, in the order of the columns.
    """

    path: Path
    row_of: Callable[[Any], dict[str, Any]]
    _columns: list[str] = field(default_factory=list)
    _num_written: int = 0

    def save(self, items: Sequence[Any]) -> None:
        """Writes the items that are new since the last call.

        Raises StorageError if the disk is full, for example. The next call then writes these items too.

        Args:
            items: All items so far, in a list that only grows from one call to the next.
        """
        rows = [self.row_of(item) for item in items[self._num_written :]]
        columns = self._columns
        if is_own_file(self.path) and columns and all(row.keys() <= set(columns) for row in rows):
            append_text(self.path, csv_text(map(row.get, columns) for row in rows))
        else:
            rows = [self.row_of(item) for item in items]
            columns = list(dict.fromkeys(name for row in rows for name in row))
            write_atomic(self.path, csv_text([columns, *(map(row.get, columns) for row in rows)]))
            self._columns = columns
        self._num_written = len(items)


def write_result(folder: Path, record: RunRecord) -> None:
    """Writes the record to result.json, with null for numbers that are not finite."""
    write_json(folder / RESULT_FILE, asdict(record), indent=2)


def restore_nan(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of result.json with NaN for each metric that is null."""
    best = result.get("best") or {}
    for metrics in (result.get("metrics") or {}, best.get("metrics") or {}):
        metrics.update({name: math.nan for name, value in metrics.items() if value is None})
    return result


def history_table(folder: Path) -> EpochTable:
    """Returns the table history.csv. Its items are EpochRecords; each field and each metric is a column."""

    def row_of(record):
        cells = asdict(record)
        return cells | cells.pop("metrics")

    return EpochTable(folder / HISTORY_FILE, row_of)


def ranks_table(folder: Path) -> EpochTable:
    """Returns the table ranks.csv. Its items are (epoch, seconds by rank).

    Rows may differ in length, because a run may resume on another number of ranks.
    """

    def row_of(item):
        epoch, seconds = item
        return {
            "epoch": epoch,
            **{f"rank_{rank}": f"{value:.6g}" for rank, value in enumerate(seconds)},
        }

    return EpochTable(folder / RANKS_FILE, row_of)


def read_history(folder: Path) -> list[EpochRecord]:
    """Reads the rows of history.csv; empty if there is no such file.

    An unfinished last line, from a row that was being written, is left out. Raises StorageError if the
    file is damaged.
    """
    path = folder / HISTORY_FILE
    if not path.exists():
        return []
    records = []
    try:
        for row in csv.DictReader(io.StringIO(whole_lines(read_file(path)), newline="")):
            epoch = int(row.pop("epoch"))
            step = int(row.pop("step"))
            figures = {
                name: float(row.pop(name))
                for name in ("learning_rate", "seconds", "examples_per_second")
            }
            metrics = {name: float(cell) for name, cell in row.items() if cell}
            records.append(EpochRecord(epoch, step, metrics=metrics, **figures))
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as error:
        raise StorageError(
            f"{path} is damaged ({error}); fix it or move it away, then start again"
        ) from error
    return records


def read_rank_seconds(folder: Path) -> dict[int, list[float]]:
    """Reads ranks.csv; returns the seconds of all ranks, in rank order, for each epoch.

    Empty if the file is missing or damaged, since only a curve depends on it.
    """
    try:
        _, *rows = csv.reader(whole_lines(read_file(folder / RANKS_FILE)).splitlines())
        return {int(epoch): [float(cell) for cell in cells if cell] for epoch, *cells in rows}
    except (OSError, ValueError, csv.Error):
        return {}


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Reads starts.json, the starts of a run in order; empty if the file is missing or damaged."""
    return [start for start in read_json(folder / STARTS_FILE, list) if isinstance(start, dict)]


def note_step(folder: Path, at: float | None = None) -> None:
    """Records when the last step ended, as the modification time of starts.json.

    Args:
        at: The time, as time.time(); None: now.
    """
    with suppress(OSError):
        os.utime(folder / STARTS_FILE, None if at is None else (at, at))


def last_step_at(folder: Path) -> float:
    """Returns when the last noted step ended, as time.time(); 0 without starts.json.

    Before the first step it is the time at which the run started.
    """
    try:
        return (folder / STARTS_FILE).stat().st_mtime
    except OSError:
        return 0.0


def read_tracked(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads the run's ID in each tracker, and the last step sent there: {tracker: {"id": ..., "step": ...}}.

    Empty if the file is missing or damaged.
    """
    try:
        entries = read_json(folder / TRACKERS_FILE, dict)
        return {
            name: {"id": str(entry["id"]), "step": int(entry["step"])}
            for name, entry in entries.items()
        }
    except (ValueError, LookupError, TypeError):
        return {}


def proof_in_words(numbers: dict[str, Any]) -> str:
    """Formats the proof that the ranks of a run trained together, in one line.

    >>> proof_in_words({"reductions": 264, "steps": 264, "ranks": 2, "weight_checks": 14,
    ...                 "examples_each_epoch": [1408, 1408], "examples": 1437})
    'reductions 264 of 264 steps; weights equal on 2/2 ranks (14 checks); 1,408 of 1,437 samples seen once per epoch'
    """
    ranks = numbers["ranks"]
    steps = numbers["steps"]
    all_steps = f"{steps:,} step{'s' * (steps != 1)}"
    synchronizations = numbers.get("synchronizations")
    parts = []
    if ranks > 1:
        if synchronizations:
            times = f"{synchronizations:,} time{'s' * (synchronizations != 1)}"
            parts.append(f"weights synchronized {times} in {all_steps}")
        else:
            parts.append(f"reductions {numbers['reductions']:,} of {all_steps}")
        checks = numbers["weight_checks"]
        if checks:
            parts.append(
                f"weights equal on {ranks}/{ranks} ranks ({checks:,} check{'s' * (checks != 1)})"
            )
        else:
            parts.append("weights not compared")

    steps_by_worker = numbers.get("steps_by_worker")
    if steps_by_worker:
        shares = ", ".join(f"{number:,}" for number in steps_by_worker)
        workers = counted(len(steps_by_worker), "worker")
        parts.append(f"gradients of {workers}: {shares}, for {all_steps}")

    counts = sorted(set(numbers["examples_each_epoch"]))
    if counts:
        seen = f"{counts[0]:,}"
        if len(counts) > 1:
            seen += f" to {counts[-1]:,}"
        skipped = numbers.get("skipped")
        left_out = f", except for {skipped:,} that cannot be read" if skipped else ""
        parts.append(f"{seen} of {numbers['examples']:,} samples seen once per epoch{left_out}")
    sent_bytes = numbers.get("sent_bytes")
    if sent_bytes:
        moment = "each time" if synchronizations else "in a step"
        parts.append(f"{human_bytes(sent_bytes)} sent by each rank {moment}")
    return "; ".join(parts) or "one rank, less than an epoch: nothing to prove"


def remove_if_empty(folder: Path) -> None:
    """Removes a run folder that contains only files from before the first step (on the chief, or in the launcher)."""
    written_before = {CONFIG_FILE, README_FILE, LOCK_FILE, CLAIM_FILE, "kinds.json"}
    folders_before = {"logs", "launch", "preprocessing"}
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    if all(path.name in written_before or path.parts[0] in folders_before for path in files):
        shutil.rmtree(folder, ignore_errors=True)


# Words in the names of metrics for which lower is better; "false" is for counts of false positives
# and negatives. For all others, such as accuracy, higher is better.
_LOWER_IS_BETTER = re.compile(
    "loss|error|perplexity|mae|mse|rmse|mape|msle|nll|(cross)?entropy|divergence|huber|brier|wer|cer"
    "|hinge|(log)?cosh|poisson|false"
)


def lower_is_better(metric: str) -> bool:
    """True if lower values of a metric are better, judging by its name.

    >>> lower_is_better("val_RMSE"), lower_is_better("false_negatives"), lower_is_better("val_accuracy")
    (True, True, False)
    """
    return any(map(_LOWER_IS_BETTER.fullmatch, metric.lower().split("_")))
