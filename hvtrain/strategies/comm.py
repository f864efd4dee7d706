"""Collectives on Python values, arrays and models, as the runner needs them; here those of one process."""

from collections.abc import Callable
from typing import Any, TypeVar

import keras
import numpy as np

from hvtrain.core.topology import Topology
from hvtrain.errors import UserError
from hvtrain.watchdog import Watchdog
from hvtrain.watchdog.progress import CHECKPOINT

T = TypeVar("T")


class Comm:
    """`strategy.comm`: collectives, here of one process. Every rank must enter each. The watchdog is told of waits."""

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = topology or Topology()
        self.watchdog = Watchdog()

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Returns the root's value on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Returns all ranks' values, by rank, on every rank."""
        return [value]

    def sum_arrays(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Returns element-wise sums over the ranks, as float64."""
        return [np.asarray(array, np.float64) for array in arrays]

    def broadcast_model(self, model: keras.Model) -> None:
        """Sets weights and optimizer state on all ranks to the chief's."""

    def on_chief(self, action: Callable[[], T]) -> T:
        """Runs the action on the chief and returns its result on all ranks. If it raises a UserError, all ranks do."""
        return self.on_rank(0, action)

    def on_rank(self, root: int, action: Callable[[], T]) -> T:
        """Like on_chief, but runs the action on rank `root`; the error names a root other than the chief."""
        outcome: tuple[Any, UserError | None] = (None, None)
        if self.topology.rank == root:
            with self.watchdog.phase(CHECKPOINT):
                outcome = _attempt(action)
        value, error, host = self.broadcast((*outcome, self.topology.host), root)
        if error is not None:
            raise type(error)(f"rank {root} on {host}: {error}") if root else error
        return value

    def all_or_raise(self, action: Callable[[], T]) -> T:
        """Runs the action on every rank; returns each its own result. If one raises a UserError, all ranks raise it."""
        value, error = _attempt(action)
        errors = self.gather(error and (error, self.topology.host))
        rank = next((rank for rank, failed in enumerate(errors) if failed), None)
        if rank is not None:
            first, host = errors[rank]
            where = "" if all(errors) else f"rank {rank} on {host}: "
            raise type(first)(f"{where}{first}") from error
        return value


def _attempt(action: Callable[[], T]) -> tuple[Any, UserError | None]:
    try:
        return action(), None
    except UserError as error:
        return None, error
