"""Ends a process for the watchdog, after a last message and Python stacks that may not delay the end for long."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hvtrain.core import checkpoint_notes as notes
from hvtrain.system import console

T = TypeVar("T")

STACKS_FOLDER = "stacks"
# A hanging disk may be the reason to end, so file access is abandoned after this time.
SECONDS_FOR_FILES = 5.0


def within(seconds: float, action: Callable[[], T], otherwise: T) -> T:
    """Returns the action's result, or `otherwise` if it fails or takes longer.

    A slow action is left to its thread.
    """
    result = [otherwise]

    def act() -> None:
        with suppress(Exception):
            result[0] = action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0]


def resume_advice(folder: Path | None) -> str:
    """Returns advice to close a message with: the command to run, and the checkpoint from which it resumes."""
    if folder is None:
        return "run the same command again"
    checkpoint = within(SECONDS_FOR_FILES, lambda: _newest_checkpoint(folder), "the newest checkpoint")
    return f"run the same command with run.dir={folder} to resume from {checkpoint}"


def _newest_checkpoint(folder: Path) -> str:
    step = notes.newest_step(folder)
    note = notes.read(folder)
    if note and note.step > (step or 0):
        return f"{notes.folder_name(note.step)} on {note.host}, or a newer one"
    if step is not None:
        return notes.folder_name(step)
    # Only rank 0 writes checkpoints, and it may be on another host.
    is_here = (folder / "checkpoints").is_dir()
    return "the beginning (there is no checkpoint yet)" if is_here else "the newest checkpoint"


def write_stacks(folder: Path | None, stacks: dict[int, str]) -> str:
    """Writes stacks, a file per rank, if the run folder is on this host.

    Returns where, as part of a message; or "".
    """
    if folder is None or not stacks:
        return ""
    return within(SECONDS_FOR_FILES, lambda: _write_stacks(folder, stacks), "")


def _write_stacks(folder: Path, stacks: dict[int, str]) -> str:
    if not folder.is_dir():
        return ""
    stacks_folder = folder / STACKS_FOLDER
    stacks_folder.mkdir(exist_ok=True)
    # A link may point outside the run folder. So may a linked file, which is replaced below.
    if stacks_folder.is_symlink():
        return ""

    for rank, text in stacks.items():
        path = stacks_folder / f"rank-{rank:04d}.txt"
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
    return f"Python stacks are in {stacks_folder}; "


def say(text: str, rank: int, culprit: int | None, wait_seconds: float = 0.0) -> None:
    """Writes one line to this rank's log and, after wait_seconds or a signal, to stderr. culprit: the rank at fault."""
    within(
        wait_seconds + SECONDS_FOR_FILES,
        lambda: console.say_error(text, rank, wait_seconds, culprit=culprit),
        None,
    )


def end(code: int) -> None:
    """Ends the process at once: its main thread may be blocked forever."""
    within(1.0, sys.stdout.flush, None)
    os._exit(code)
