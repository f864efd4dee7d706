"""Notes about where the newest checkpoint is, for hosts that have none.

Without a shared disk only rank 0's host has checkpoints, and a start without that host would silently
begin at step 0. hvtrain.training.find_checkpoint therefore reads the notes, and refuses such a start.
The launcher passes its own note in the environment variable VARIABLE.
"""

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvtrain.errors import StorageError
from hvtrain.system.files import is_own_file, read_json, write_json

log = logging.getLogger(__name__)

NOTE_FILE = "newest-checkpoint.json"
VARIABLE = "HVTRAIN_NEWEST_CHECKPOINT"

# A note is not trusted: anyone who can write to a run folder can write one.
_MAX_BYTES = 10_000
_HOST = re.compile(r"[\w.-]{1,253}")
_RUN_ID = re.compile(r"[0-9a-f]{8,32}")


@dataclass(frozen=True)
class Note:
    """A host that writes checkpoints of a run, and the step of its newest complete one."""

    # 0: no checkpoint is complete yet.
    step: int
    host: str
    # None: the run is unknown, as in the launcher's note.
    run_id: str | None = None


def checked_run_id(value: object) -> str | None:
    """Returns the value, read from a file, if it is a valid run ID; None for anything else."""
    return value if isinstance(value, str) and _RUN_ID.fullmatch(value) else None


def read(folder: Path) -> Note | None:
    """Returns the note in a run folder; None if there is none, or if the file is not a note."""
    path = folder / NOTE_FILE
    try:
        # Refuses links, which may lead anywhere; pipes, on which a read may never
        # end; and files too long for a note.
        is_note = is_own_file(path) and path.stat().st_size <= _MAX_BYTES
    except OSError:
        return None
    content = read_json(path, dict) if is_note else {}
    step: Any = content.get("step")
    host: Any = content.get("host")
    run_id = checked_run_id(content.get("run_id"))
    is_step = type(step) is int and step >= 0  # A bool is an int to isinstance.
    is_host = isinstance(host, str) and _HOST.fullmatch(host)
    return Note(step, host, run_id) if is_step and is_host and run_id else None


def folder_name(step: int) -> str:
    """Returns the folder name of a step's checkpoint.

    >>> folder_name(44)
    'step-00000044'
    """
    return f"step-{step:08d}"


def newest_step(folder: Path) -> int | None:
    """Returns the step of the newest checkpoint in a run folder on this host; None if there is none."""
    matches = (
        re.fullmatch("step-([0-9]{8,18})", path.name) for path in folder.glob("checkpoints/step-*")
    )
    return max((int(match[1]) for match in matches if match), default=None)


def forget(folder: Path, run_id: str | None) -> None:
    """Removes the note in a run folder if it belongs to a run other than run_id; with None, any note."""
    note = read(folder)
    # With None the file is removed without looking at `note`: a damaged one reads as None.
    if run_id is None or (note and note.run_id != run_id):
        with suppress(OSError):
            (folder / NOTE_FILE).unlink()


def from_environment(environ: Mapping[str, str]) -> Note | None:
    """Returns the note that the launcher passed with to_environment(); None without a valid one.

    >>> from_environment({"HVTRAIN_NEWEST_CHECKPOINT": "28@s1"})
    Note(step=28, host='s1', run_id=None)
    """
    # The variable is checked like a file, since anything may have set it.
    step, _, host = environ.get(VARIABLE, "").partition("@")
    is_valid = re.fullmatch("[0-9]{1,18}", step) and _HOST.fullmatch(host)
    return Note(int(step), host) if is_valid else None


def to_environment(step: int, host: str) -> dict[str, str]:
    """Returns the environment variable, {name: value}, that passes the launcher's note to the ranks."""
    return {VARIABLE: f"{step}@{host}"}


@dataclass
class NoteKeeper:
    """Keeps this host's note up to date.

    Warns once and gives up if a note cannot be written, since notes matter only after another failure.
    """

    # The run folder; None: this rank writes no note.
    folder: Path | None = None
    host: str = ""
    run_id: str | None = None

    def note(self, complete_step: int) -> None:
        """Records that this host writes checkpoints, and the step of its newest complete one; 0: none yet."""
        if self.folder is None:
            return
        note = Note(complete_step, self.host, self.run_id)
        before = read(self.folder)
        # When a run starts again, its earlier note of a complete step says more than "none yet".
        knows_more = before and before.run_id == note.run_id and before.step and not complete_step
        if before == note or knows_more:
            return
        try:
            write_json(self.folder / NOTE_FILE, asdict(note))
        except StorageError as error:
            log.warning(
                "%s; a start without host %s would not know of its checkpoints", error, self.host
            )
            self.folder = None
