"""ranks.csv: seconds of each rank's own work in a step, data and compute, with a row for each epoch. Pure."""

import csv
import io
from pathlib import Path

from hvtrain.core.records import read_file, write_atomic

RANKS_FILE = "ranks.csv"


def write_rank_seconds(folder: Path, rows: dict[int, list[float]]) -> None:
    """Writes the rows by epoch. They may differ in length, since a run may resume on another number of ranks."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["epoch", *(f"rank_{rank}" for rank in range(max(map(len, rows.values()), default=0)))])
    for epoch, seconds in rows.items():
        writer.writerow([epoch, *(f"{value:.6g}" for value in seconds)])
    write_atomic(folder / RANKS_FILE, text.getvalue())


def read_rank_seconds(folder: Path) -> dict[int, list[float]]:
    """The rows by epoch; none if the file is missing or damaged, since only a curve depends on it."""
    try:
        _, *rows = csv.reader(read_file(folder / RANKS_FILE).splitlines())
        return {int(epoch): [float(cell) for cell in cells if cell] for epoch, *cells in rows}
    except (OSError, ValueError, csv.Error):
        return {}
