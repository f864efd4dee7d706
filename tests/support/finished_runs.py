"""Work on finished runs in one start of two ranks, see workers/finished.py."""

import json
from collections.abc import Sequence
from pathlib import Path

from launching import WORKERS, run


def on_two_ranks(folder: Path, *tasks: Sequence[str]) -> dict[str, dict[str, str]]:
    """What rank 0 printed, and the error if there was one, by the name of the task."""
    (folder / "tasks.json").write_text(json.dumps(tasks))
    command = [
        "python",
        str(WORKERS / "finished.py"),
        str(folder / "tasks.json"),
        str(folder / "found.json"),
    ]
    code, output = run("mpirun", 2, *command, cwd=folder, timeout=560)
    assert code == 0, output
    return json.loads((folder / "found.json").read_text())
