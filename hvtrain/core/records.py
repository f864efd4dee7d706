"""Records of a run: result.json and history.csv, written by rank 0. Pure."""

import csv
import errno
import io
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hvtrain.errors import StorageError, UserError

RESULT_FILE = "result.json"
HISTORY_FILE = "history.csv"
REVIEW_FILE = "review.json"
# Prefix of files that are incomplete or about to be deleted, by which leftovers of a killed process are found.
TEMPORARY = ".tmp-"


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
    """Seconds of a step by purpose, and the slowest rank (callbacks/speed.py)."""
    skipped_examples: int = 0
    """Over all ranks, with data.on_error=skip; since this start of the run."""
    best: dict[str, Any] | None = None
    """Of the best checkpoint: its step, the metric and value that made it the best, and the test metrics."""
    per_second: dict[str, float] = field(default_factory=dict)
    """What examples consist of, such as tokens, in the time of examples_per_second."""
    sample: str | None = None
    """Something that the model made of data, such as a text that it continued."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Settings that changed when the run was resumed (training/changed_settings.py); config has the last ones."""
    differences: list[str] = field(default_factory=list)
    """How the run differs from the same run under another strategy, such as by stale gradients."""
    num_replicas: int | None = None
    """How many computed gradients at the same time: ranks, replicas of one process, or workers of parameter servers."""


@contextmanager
def writing(
    path: Path, temporary: Path, needed_bytes: int, kind: type[UserError] = StorageError, name: str | None = None
) -> Iterator[None]:
    """Around the writing of `path` as `temporary`, a file or a folder, which no failure leaves behind.

    An OSError becomes an error of that kind with the space that was needed and the space that is free.
    """
    try:
        remove(temporary)
        yield
    except OSError as error:
        with suppress(OSError):
            remove(temporary)
        raise kind(_why_not_written(name or str(path), path.parent, error, needed_bytes)) from error


def _why_not_written(name: str, folder: Path, error: OSError, needed_bytes: int) -> str:
    room = None
    with suppress(OSError):  # A lost mount does not even report its free space.
        while not folder.exists():
            folder = folder.parent
        room = os.statvfs(folder)
    free = f", {room.f_bavail * room.f_frsize:,} free" if room else ""
    free += ", no free inode" if room and room.f_files and not room.f_favail else ""
    why = error.strerror or error
    return f"{name} was not written: {why} ({needed_bytes:,} bytes needed{free} at {folder}); make room there"


def refuse_link(path: Path, kind: type[UserError], advice: str) -> None:
    """Raises an error of that kind if a part of a run folder is a symbolic link."""
    if path.is_symlink():
        raise kind(f"{path} is a symbolic link, and may lead out of the run folder; {advice}")


def remove(path: Path) -> None:
    """Removes a file, a link (not its target) or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces a file, or raises StorageError: readers see the old content or the new one, even after a crash."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with writing(path, temporary, len(data)):
        with temporary.open("xb") as file:  # Not into what a link leads to.
            file.write(data)
        flush(temporary)
        temporary.replace(path)


def is_own_file(path: Path) -> bool:
    """True for a regular file that is no link to another one."""
    return path.is_file() and not path.is_symlink()


def append_text(path: Path, text: str) -> None:
    """Adds to the end of a file that exists. Raises StorageError, after which a part of the text may be there."""
    data = text.encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        with os.fdopen(handle, "ab") as file:
            file.write(data)
        flush(path)
    except OSError as error:
        raise StorageError(_why_not_written(str(path), path.parent, error, len(data))) from error


def whole_lines(text: str) -> str:
    """The text without what follows its last line break: a process may have ended while it added a line."""
    return text[: text.rfind("\n") + 1]


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The rows as CSV, with a line break after each."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. Raises OSError for anything else: a reader would wait for a pipe forever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def read_file(path: Path) -> str:
    """As read_bytes, the text of the file."""
    return read_bytes(path).decode("utf-8")


def flush(path: Path) -> None:
    """Waits until a file, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def _metric_names(records: list[EpochRecord]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.metrics))


def _row(record: EpochRecord, metrics: list[str]) -> list[Any]:
    own = [getattr(record, item.name) for item in fields(EpochRecord) if item.name != "metrics"]
    return [*own, *map(record.metrics.get, metrics)]


def read_history(folder: Path) -> list[EpochRecord]:
    """The rows of history.csv, or none if there is no such file. Raises StorageError if it is damaged.

    A last line without its end is a row that was being written, and is left out.
    """
    path = folder / HISTORY_FILE
    if not path.exists():
        return []
    records = []
    try:
        for row in csv.DictReader(io.StringIO(whole_lines(read_file(path)), newline="")):
            numbers = {name: float(row.pop(name)) for name in ("learning_rate", "seconds", "examples_per_second")}
            epoch, step = int(row.pop("epoch")), int(row.pop("step"))
            metrics = {name: float(cell) for name, cell in row.items() if cell}
            records.append(EpochRecord(epoch, step, metrics=metrics, **numbers))
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as error:
        raise StorageError(f"{path} is damaged ({error}); fix it or move it away, then start again") from error
    return records
