"""The records of a run's epochs and starts, for a host that continues the run and lacks them. Pure."""

from pathlib import Path
from typing import Any, NamedTuple

from hvtrain.core.rank_seconds import read_rank_seconds, write_rank_seconds
from hvtrain.core.records import EpochRecord, read_history, write_history
from hvtrain.core.starts import read_starts, write_starts
from hvtrain.core.tracked import read_tracked, write_tracked


class RunRecords(NamedTuple):
    """The contents of history.csv, ranks.csv, starts.json and trackers.json; empty if a file is missing."""

    history: list[EpochRecord]
    rank_seconds: dict[int, list[float]]
    starts: list[dict[str, Any]]
    tracked: dict[str, dict[str, Any]]


def read_records(folder: Path) -> RunRecords:
    """Raises StorageError if the history is damaged."""
    return RunRecords(read_history(folder), read_rank_seconds(folder), read_starts(folder), read_tracked(folder))


def write_records(folder: Path, records: RunRecords) -> None:
    """Writes the records that are not empty to the run folder."""
    for content, write in zip(records, (write_history, write_rank_seconds, write_starts, write_tracked)):
        if content:
            write(folder, content)  # type: ignore[operator]
