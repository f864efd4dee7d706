"""starts.json in a run folder: the starts of a run, in order; training/note_start.py writes it. Pure."""

import json
from pathlib import Path
from typing import Any

from hvtrain.core.records import read_file, write_atomic

STARTS_FILE = "starts.json"


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts so far; none if the file is missing or damaged."""
    try:
        found = json.loads(read_file(folder / STARTS_FILE))
    except (OSError, ValueError, RecursionError):
        return []
    return [start for start in found if isinstance(start, dict)] if isinstance(found, list) else []


def write_starts(folder: Path, starts: list[dict[str, Any]]) -> None:
    write_atomic(folder / STARTS_FILE, json.dumps(starts, indent=1) + "\n")
