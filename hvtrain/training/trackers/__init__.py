"""The interface of a tracker. Each service that shows runs has a module here, chosen by tracker=NAME.

training/callbacks/tracking.py drives all trackers of a run.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvtrain.errors import ConfigError

INSTALL = "./scripts/run uv pip install --no-deps -r scripts/lock/trackers.txt"


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it at its start: settings without secrets, and the changes that resumes made to them."""

    name: str
    folder: Path
    settings: dict[str, Any]
    changes: list[Any]


class Tracker(ABC):
    """Keeps the numbers of a run (chief only).

    Any method may raise: the run continues without the tracker.
    """

    # Modules that it imports.
    needs: tuple[str, ...] = ()

    def check(self, name: str) -> None:
        """Raises ConfigError if a package is missing; `name` is the choice in tracker=name."""
        # All missing modules are named at once, so that one installation is enough. find_spec does
        # not import them, which would take seconds.
        missing = [module for module in self.needs if not find_spec(module)]
        if missing:
            raise ConfigError(
                f"tracker={name} needs modules that are not installed: {', '.join(missing)}; install: {INSTALL}"
            )

    @abstractmethod
    def start(self, run: TrackedRun, known: str | None) -> str:
        """Begins a tracked run, or continues the one with the ID `known` if it still exists; returns its ID."""

    @abstractmethod
    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Adds numbers, by name, at an optimizer step."""

    @abstractmethod
    def finish(self, state: str, files: Sequence[Path]) -> None:
        """Ends the tracked run as "finished", "stopped" (to be resumed) or "failed", with copies of the files."""


def plain_name(name: str) -> str:
    """Returns a metric's name in characters that every tracker accepts.

    >>> plain_name("val_top-3/recall@5")
    'val_top-3/recall_5'
    """
    return re.sub(r"[^\w\-. /]", "_", name)
