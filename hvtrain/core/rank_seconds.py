"""ranks.csv: seconds of each rank's own work in a step, data and compute, with a row for each epoch. Pure."""

import csv
from collections.abc import Iterable
from pathlib import Path

from hvtrain.core.records import append_text, csv_text, is_own_file, read_file, whole_lines, write_atomic

RANKS_FILE = "ranks.csv"


def write_rank_seconds(folder: Path, rows: dict[int, list[float]]) -> None:
    """Writes the rows by epoch. They may differ in length, since a run may resume on another number of ranks."""
    header = ["epoch", *(f"rank_{rank}" for rank in range(_most_ranks(rows.values())))]
    write_atomic(folder / RANKS_FILE, csv_text([header, *(_row(epoch, rows[epoch]) for epoch in rows)]))


def append_rank_seconds(folder: Path, rows: dict[int, list[float]]) -> None:
    """Adds the last of these rows to ranks.csv, which has the others; it is written anew for more ranks, or if somebody
    has moved it away.

    Raises StorageError. The file may then end in the middle of a row, so write it anew the next time.
    """
    *earlier, last = rows
    path = folder / RANKS_FILE
    if is_own_file(path) and len(rows[last]) <= _most_ranks(rows[epoch] for epoch in earlier):
        append_text(path, csv_text([_row(last, rows[last])]))
    else:
        write_rank_seconds(folder, rows)


def _most_ranks(rows: Iterable[list[float]]) -> int:
    return max(map(len, rows), default=0)


def _row(epoch: int, seconds: list[float]) -> list[str]:
    return [str(epoch), *(f"{value:.6g}" for value in seconds)]


def read_rank_seconds(folder: Path) -> dict[int, list[float]]:
    """The rows by epoch; none if the file is missing or damaged, since only a curve depends on it."""
    try:
        _, *rows = csv.reader(whole_lines(read_file(folder / RANKS_FILE)).splitlines())
        return {int(epoch): [float(cell) for cell in cells if cell] for epoch, *cells in rows}
    except (OSError, ValueError, csv.Error):
        return {}
