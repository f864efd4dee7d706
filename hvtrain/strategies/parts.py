"""Parts of a strategy besides its collectives. Each class here is the null object, which a single process has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import keras

T = TypeVar("T")


class WeightCheck(Protocol):
    """Compares weights between ranks."""

    num_checks: int
    """Comparisons so far."""

    def __call__(self, when: str, everything: bool = False) -> None:
        """Raises RankError when trained weights (or everything) differ between ranks (every rank)."""

    def average_untrained(self) -> None:
        """Sets weights that no gradient touches to their mean over the ranks (every rank)."""


class NoWeightCheck:
    """The weights of one process are equal."""

    num_checks = 0

    def __call__(self, when: str, everything: bool = False) -> None:
        pass

    def average_untrained(self) -> None:
        pass


class Guards:
    """`strategy.guards`: proof that the ranks train together. Nothing here is collective."""

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Callbacks that must come before all others in every training of this strategy."""
        return []

    def stop_callbacks(self) -> list[keras.callbacks.Callback]:
        """Callbacks that propagate one rank's stop request to all ranks; they come after those that may request it."""
        return []

    def weight_check(self, model: keras.Model, enabled: bool = True) -> WeightCheck:
        """Compares the model between ranks where enabled."""
        return NoWeightCheck()

    def num_reductions(self, optimizer: keras.optimizers.Optimizer) -> int:
        """Reductions that this process has run."""
        return 0

    def ranks_at_fault(self, error: Exception, optimizer: keras.optimizers.Optimizer) -> list[int]:
        """Ranks whose gradient was not finite, if that is why a step failed."""
        return []


class Timeline:
    """`strategy.timeline`: a trace of what the ranks exchange (every rank)."""

    def start(self, path: Path) -> None:
        """Begins to write it there, on the chief, for chrome://tracing."""

    def stop(self) -> None:
        """Completes the file."""


class Membership:
    """`strategy.membership`: whether ranks may leave and join while a run goes on. Here they may not."""

    commit_steps = 0
    """Steps between commits, after which every rank holds the state in memory; 0: never."""

    def run_with_restarts(self, attempt: Callable[[], T]) -> T:
        """Result of the attempt, which is repeated when ranks leave or join. Not collective."""
        return attempt()

    def check(self) -> None:
        """Restarts the attempt if ranks are joining or leaving (every rank)."""
