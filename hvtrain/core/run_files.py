"""The small files of a run folder, which rank 0 writes: result.json, history.csv, ranks.csv and the like. Pure."""

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hvtrain.core.files import append_text, csv_text, is_own_file, read_file, whole_lines, write_atomic
from hvtrain.errors import StorageError

RESULT_FILE = "result.json"
HISTORY_FILE = "history.csv"
RANKS_FILE = "ranks.csv"
STARTS_FILE = "starts.json"
TRACKERS_FILE = "trackers.json"
REVIEW_FILE = "review.json"


@dataclass(frozen=True)
class EpochRecord:
    """One row of history.csv. metrics are means over all ranks, weighted by the number of examples."""

    epoch: int
    step: int
    learning_rate: float
    seconds: float
    examples_per_second: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """The final numbers of a run, in result.json.

    examples_per_second counts all ranks and leaves out the warm-up; step_seconds is the mean time of one
    step over the same steps; both are None if every step was warm-up. num_steps counts the whole run. The metrics are
    those of the last step.
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
    split: dict[str, Any] | None = None
    """Seconds of a step by purpose, and the slowest rank (step/step_timing.py)."""
    skipped_examples: int = 0
    """Over all ranks, with data.on_error=skip; since this start of the run."""
    best: dict[str, Any] | None = None
    """Of the best checkpoint: its step, the metric and value that made it the best, and the test metrics."""
    per_second: dict[str, float] = field(default_factory=dict)
    """What examples consist of, such as tokens, in the time of examples_per_second."""
    sample: str | None = None
    """Something that the model made of data, such as a text that it continued."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Settings that changed when the run was resumed (training/resume.py); config has the last ones."""
    differences: list[str] = field(default_factory=list)
    """How the run differs from the same run under another strategy, such as by stale gradients."""
    num_replicas: int | None = None
    """How many computed gradients at the same time: ranks, replicas of one process, or workers of parameter servers."""


def write_result(folder: Path, record: RunRecord) -> None:
    write_atomic(folder / RESULT_FILE, json.dumps(asdict(record), indent=2) + "\n")


def write_history(folder: Path, records: list[EpochRecord]) -> None:
    """Writes history.csv: the columns of EpochRecord, then one for each metric in any record."""
    metrics = _metric_names(records)
    header = [item.name for item in fields(EpochRecord) if item.name != "metrics"]
    rows = [[*header, *metrics], *(_row(record, metrics) for record in records)]
    write_atomic(folder / HISTORY_FILE, csv_text(rows))


def append_history(folder: Path, records: list[EpochRecord]) -> None:
    """Adds the last of these records to history.csv, which has the others; it is written anew for a new metric, or if
    somebody has moved it away.

    Raises StorageError. The file may then end in the middle of a row, so write it anew the next time.
    """
    *earlier, last = records
    metrics = _metric_names(earlier)
    path = folder / HISTORY_FILE
    if is_own_file(path) and last.metrics.keys() <= set(metrics):
        append_text(path, csv_text([_row(last, metrics)]))
    else:
        write_history(folder, records)


def read_history(folder: Path) -> list[EpochRecord]:
    """Reads the rows of history.csv; none if there is no such file.

    A last line without its end is a row that was being written, and is left out. Raises StorageError
    if the file is damaged.
    """
    path = folder / HISTORY_FILE
    if not path.exists():
        return []
    records = []
    try:
        for row in csv.DictReader(io.StringIO(whole_lines(read_file(path)), newline="")):
            epoch = int(row.pop("epoch"))
            step = int(row.pop("step"))
            figures = {name: float(row.pop(name)) for name in ("learning_rate", "seconds", "examples_per_second")}
            metrics = {name: float(cell) for name, cell in row.items() if cell}
            records.append(EpochRecord(epoch, step, metrics=metrics, **figures))
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as error:
        raise StorageError(f"{path} is damaged ({error}); fix it or move it away, then start again") from error
    return records


def _metric_names(records: list[EpochRecord]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.metrics))


def _row(record: EpochRecord, metrics: list[str]) -> list[Any]:
    own = [getattr(record, item.name) for item in fields(EpochRecord) if item.name != "metrics"]
    return [*own, *map(record.metrics.get, metrics)]


def write_rank_seconds(folder: Path, rows: dict[int, list[float]]) -> None:
    """Writes the rows by epoch. They may differ in length, since a run may resume on another number of ranks."""
    header = ["epoch", *(f"rank_{rank}" for rank in range(_most_ranks(rows.values())))]
    write_atomic(folder / RANKS_FILE, csv_text([header, *(_rank_row(epoch, rows[epoch]) for epoch in rows)]))


def append_rank_seconds(folder: Path, rows: dict[int, list[float]]) -> None:
    """Adds the last of these rows to ranks.csv, which has the others; it is written anew for more ranks, or if somebody
    has moved it away.

    Raises StorageError. The file may then end in the middle of a row, so write it anew the next time.
    """
    *earlier, last = rows
    path = folder / RANKS_FILE
    if is_own_file(path) and len(rows[last]) <= _most_ranks(rows[epoch] for epoch in earlier):
        append_text(path, csv_text([_rank_row(last, rows[last])]))
    else:
        write_rank_seconds(folder, rows)


def _most_ranks(rows: Iterable[list[float]]) -> int:
    return max(map(len, rows), default=0)


def _rank_row(epoch: int, seconds: list[float]) -> list[str]:
    return [str(epoch), *(f"{value:.6g}" for value in seconds)]


def read_rank_seconds(folder: Path) -> dict[int, list[float]]:
    """Reads the rows by epoch; none if the file is missing or damaged, since only a curve depends on it."""
    try:
        _, *rows = csv.reader(whole_lines(read_file(folder / RANKS_FILE)).splitlines())
        return {int(epoch): [float(cell) for cell in cells if cell] for epoch, *cells in rows}
    except (OSError, ValueError, csv.Error):
        return {}


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Reads the starts of a run, in order; none if the file is missing or damaged."""
    try:
        starts = json.loads(read_file(folder / STARTS_FILE))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(starts, list):
        return []
    return [start for start in starts if isinstance(start, dict)]


def write_starts(folder: Path, starts: list[dict[str, Any]]) -> None:
    write_atomic(folder / STARTS_FILE, json.dumps(starts, indent=1) + "\n")


def read_tracked(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads the run's id in each tracker and the last step that was sent there, {tracker: {"id": ..., "step": ...}}.

    The result is empty if there is no such file, or if it is damaged.
    """
    try:
        entries = json.loads(read_file(folder / TRACKERS_FILE))
        return {name: {"id": str(entry["id"]), "step": int(entry["step"])} for name, entry in entries.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def write_tracked(folder: Path, tracked: dict[str, dict[str, Any]]) -> None:
    write_atomic(folder / TRACKERS_FILE, json.dumps(tracked, indent=1) + "\n")


def proof_in_words(numbers: dict[str, Any]) -> str:
    """Writes the proof of a run in one line.

    >>> proof_in_words({"reductions": 264, "steps": 264, "ranks": 2, "weight_checks": 14,
    ...                 "examples_each_epoch": [1408, 1408], "examples": 1437})
    'reductions 264 of 264 steps; weights equal on 2/2 ranks (14 checks); 1,408 of 1,437 samples seen once per epoch'
    """
    ranks = numbers["ranks"]
    steps = numbers["steps"]
    parts = []
    if ranks > 1:
        parts.append(f"reductions {numbers['reductions']:,} of {steps:,} steps")
        checks = numbers["weight_checks"]
        if checks:
            parts.append(f"weights equal on {ranks}/{ranks} ranks ({checks:,} check{'s' * (checks != 1)})")
        else:
            parts.append("weights not compared")

    steps_by_worker = numbers.get("steps_by_worker")
    if steps_by_worker:
        shares = ", ".join(f"{number:,}" for number in steps_by_worker)
        parts.append(f"gradients of {len(steps_by_worker)} workers: {shares}, for {steps:,} steps")

    counts = sorted(set(numbers["examples_each_epoch"]))
    if counts:
        seen = f"{counts[0]:,}"
        if len(counts) > 1:
            seen += f" to {counts[-1]:,}"
        skipped = numbers.get("skipped")
        left_out = f", but for {skipped:,} that cannot be read" if skipped else ""
        parts.append(f"{seen} of {numbers['examples']:,} samples seen once per epoch{left_out}")
    return "; ".join(parts) or "one rank, less than an epoch: nothing to prove"
