"""Collectives: what ranks tell each other. `strategy.comm` offers them; with one process each is an identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras
import numpy as np

from hvtrain.core.topology import Topology
from hvtrain.errors import UserError
from hvtrain.watchdog import Watch
from hvtrain.watchdog.progress import CHECKPOINT

T = TypeVar("T")


class Comm:
    """Collectives of one process. Every rank must enter each of them.

    Args:
        topology: this rank's place.
        watchdog: is told while this rank waits for others.
    """

    def __init__(self, topology: Topology | None = None, watchdog: Watch | None = None) -> None:
        self.topology = topology or Topology()
        self.watchdog = watchdog or Watch()

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The root's value, on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, by rank, on every rank."""
        return [value]

    def sum_arrays(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Element-wise sums over the ranks, as float64."""
        return [np.asarray(array, np.float64) for array in arrays]

    def broadcast_model(self, model: keras.Model) -> None:
        """Sets weights and optimizer state on all ranks to the chief's."""

    def on_chief(self, action: Callable[[], T]) -> T:
        """Runs the action on the chief and returns its result on all ranks; if it raises a UserError, all ranks do."""
        return self.on_rank(0, action)

    def on_rank(self, root: int, action: Callable[[], T]) -> T:
        """Does the same on another rank, which the error then names."""
        outcome: tuple[Any, UserError | None] = (None, None)
        if self.topology.rank == root:
            with self.watchdog.phase(CHECKPOINT):
                outcome = _attempt(action)
        value, error, host = self.broadcast((*outcome, self.topology.host), root)
        if error is not None:
            raise type(error)(f"rank {root} on {host}: {error}") if root else error
        return value

    def all_or_raise(self, action: Callable[[], T]) -> T:
        """Runs the action on every rank and returns its own result; if it fails on one rank, all raise that error."""
        value, error = _attempt(action)
        errors = self.gather(error and (error, self.topology.host))
        failed = [rank for rank, found in enumerate(errors) if found]
        if failed:
            first, host = errors[failed[0]]
            where = "" if len(failed) == len(errors) else f"rank {failed[0]} on {host}: "
            raise type(first)(f"{where}{first}")
        return value


def _attempt(action: Callable[[], T]) -> tuple[Any, UserError | None]:
    try:
        return action(), None
    except UserError as error:
        return None, error
