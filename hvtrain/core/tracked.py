"""trackers.json in a run folder: the run's id in each tracker, and the last step that was sent there. Pure."""

import json
from pathlib import Path
from typing import Any

from hvtrain.core.records import read_file, write_atomic

TRACKERS_FILE = "trackers.json"


def read_tracked(folder: Path) -> dict[str, dict[str, Any]]:
    """{tracker: {"id": ..., "step": ...}}; empty if there is no such file, or if it is damaged."""
    try:
        found = json.loads(read_file(folder / TRACKERS_FILE))
        return {name: {"id": str(own["id"]), "step": int(own["step"])} for name, own in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def write_tracked(folder: Path, tracked: dict[str, dict[str, Any]]) -> None:
    write_atomic(folder / TRACKERS_FILE, json.dumps(tracked, indent=1) + "\n")
