"""Records of a run: result.json and history.csv, written by rank 0. Pure."""

import csv
import errno
import io
import json
import os
import shutil
import stat
from collections.abc import Iterator
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
    """Settings that changed when the run was resumed (restore/changed_settings.py); config has the last ones."""
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
        folder, room = path.parent, None
        with suppress(OSError):  # A lost mount does not even report its free space.
            while not folder.exists():
                folder = folder.parent
            room = os.statvfs(folder)
        free = f", {room.f_bavail * room.f_frsize:,} free" if room else ""
        free += ", no free inode" if room and room.f_files and not room.f_favail else ""
        raise kind(
            f"{name or path} was not written: {error.strerror or error} ({needed_bytes:,} bytes needed{free} at "
            f"{folder}); make room there"
        ) from error


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
    own = [item.name for item in fields(EpochRecord) if item.name != "metrics"]
    metrics = list(dict.fromkeys(name for record in records for name in record.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*own, *metrics])
    for record in records:
        writer.writerow([*(getattr(record, name) for name in own), *map(record.metrics.get, metrics)])
    write_atomic(folder / HISTORY_FILE, text.getvalue())


def read_history(folder: Path) -> list[EpochRecord]:
    """The rows of history.csv, or none if there is no such file. Raises StorageError if it is damaged."""
    path = folder / HISTORY_FILE
    if not path.exists():
        return []
    records = []
    try:
        for row in csv.DictReader(io.StringIO(read_file(path), newline="")):
            row.setdefault("examples_per_second", row.pop("images_per_second", None))  # its name in older files
            numbers = {name: float(row.pop(name)) for name in ("learning_rate", "seconds", "examples_per_second")}
            epoch, step = int(row.pop("epoch")), int(row.pop("step"))
            metrics = {name: float(cell) for name, cell in row.items() if cell}
            records.append(EpochRecord(epoch, step, metrics=metrics, **numbers))
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as error:
        raise StorageError(f"{path} is damaged ({error}); fix it or move it away, then start again") from error
    return records
