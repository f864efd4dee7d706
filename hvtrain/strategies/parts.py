"""Parts of a strategy besides its collectives. Each class here is the null object of a single process."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import keras

T = TypeVar("T")


class WeightCheck:
    """Comparison of weights between ranks; num_checks counts them."""

    num_checks = 0

    def __call__(self, when: str, everything: bool = False) -> None:
        """Raises RankError if trained weights (or everything) differ between ranks (every rank)."""

    def average_untrained(self) -> None:
        """Sets weights without a gradient to their mean over the ranks (every rank)."""


class Guards:
    """`strategy.guards`: proof that the ranks train together. Nothing here is collective."""

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Callbacks that come before all others in every training of this strategy."""
        return []

    def stop_callbacks(self) -> list[keras.callbacks.Callback]:
        """Callbacks that propagate one rank's stop request to all ranks; they come after those that may request it."""
        return []

    def weight_check(self, model: keras.Model, enabled: bool = True) -> WeightCheck:
        """Returns the check of a model, which compares nothing unless enabled."""
        return WeightCheck()

    def num_reductions(self, optimizer: keras.optimizers.Optimizer) -> int:
        """Number of reductions that this process has run."""
        return 0

    def ranks_at_fault(self, error: Exception, optimizer: keras.optimizers.Optimizer) -> list[int]:
        """Ranks whose gradient was not finite, if a step failed for that reason."""
        return []


class Timeline:
    """`strategy.timeline`: a trace of the reductions (every rank)."""

    def start(self, path: Path) -> None:
        """Starts tracing; the chief writes the file, which chrome://tracing shows."""

    def stop(self) -> None:
        """Stops tracing and completes the file."""


class Membership:
    """`strategy.membership`: ranks that leave and join during a run. Here none does."""

    commit_steps = 0
    """Steps between commits of the state to every rank's memory; 0: never."""

    def run_with_restarts(self, attempt: Callable[[], T]) -> T:
        """Runs the attempt, again after ranks leave or join, and returns its result. Not collective."""
        return attempt()

    def check(self) -> None:
        """Restarts the attempt if ranks are joining or leaving (every rank)."""
