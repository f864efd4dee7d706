"""How the watchdog ends its process: last messages and stacks, none of which may delay the end."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hvtrain.checkpoint import notes
from hvtrain.system import console

T = TypeVar("T")

STACKS_FOLDER = "stacks"
# A hanging disk is a reason to end, so whatever touches one gets no more time.
SECONDS_FOR_FILES = 5.0


def within(seconds: float, action: Callable[[], T], otherwise: T) -> T:
    """The action's result, or `otherwise` if it fails or takes longer; it is abandoned then."""
    found = [otherwise]

    def act() -> None:
        with suppress(Exception):
            found[0] = action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0]


def how_to_go_on(folder: Path | None) -> str:
    """The advice at the end of a message."""
    if folder is None:
        return "run the same command again"

    def newest() -> str:
        place = folder / "checkpoints"
        # The folder lies on rank 0's host, which may be another one.
        none = "the beginning, for there is no checkpoint yet" if place.is_dir() else "the newest checkpoint"
        here = max((path.name for path in place.glob("step-*")), default="")
        note = notes.read(folder)
        there = f"step-{note.step:08d}" if note else ""
        return f"{there} on {note.host}, or a newer one" if note and note.step and there > here else here or none

    where = within(SECONDS_FOR_FILES, newest, "the newest checkpoint")
    return f"run the same command with run.dir={folder} to resume from {where}"


def write_stacks(folder: Path | None, stacks: dict[int, str]) -> str:
    """Writes one file per rank if the run folder is on this host. Returns where, for a message, or nothing."""
    if folder is None or not stacks:
        return ""

    def write() -> str:
        if not folder.is_dir():
            return ""
        place = folder / STACKS_FOLDER
        place.mkdir(exist_ok=True)
        if place.is_symlink():
            return ""  # It may lead out of the run folder, as a link in it may.
        for rank, text in stacks.items():
            path = place / f"rank-{rank:04d}.txt"
            path.unlink(missing_ok=True)
            path.write_text(text, encoding="utf-8")
        return f"Python stacks are in {place}; "

    return within(SECONDS_FOR_FILES, write, "")


def say(text: str, rank: int, culprit: int | None, wait_seconds: float = 0.0) -> None:
    """Writes one line to this rank's log and, after that time, to the error output."""
    within(wait_seconds + SECONDS_FOR_FILES, lambda: console.say_error(text, rank, wait_seconds, culprit=culprit), None)


def end(code: int) -> None:
    """Ends the process at once: its main thread may be blocked forever."""
    within(1.0, sys.stdout.flush, None)
    os._exit(code)
