"""The interface of collectives, and the null object of a single process."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np

from hvtrain.core.topology import Topology
from hvtrain.errors import UserError
from hvtrain.watchdog import Watchdog
from hvtrain.watchdog.progress import CHECKPOINT

T = TypeVar("T")


class Comm:
    """`strategy.comm`: collectives on Python values, arrays and models; every rank must enter each.

    Waits in them are reported to the watchdog, so that it does not blame this rank.
    """

    def __init__(self) -> None:
        self.topology = Topology()
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
        """Sets weights and optimizer state to the chief's; each rank gets only its own part of sharded variables."""

    def gather_parts(self, variables: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
        """Returns sharded variables as whole arrays on the chief, and an empty dict on the other ranks.

        Embedding tables are memory-mapped from files in the folder.
        """
        return {}

    def whole_tables(self, model: keras.Model, folder: Path) -> AbstractContextManager[None]:
        """Returns a context in which the chief alone can call and save the model: see hvtrain.keras.whole_tables."""
        return nullcontext()

    def on_chief(self, action: Callable[[], T]) -> T:
        """Runs the action on the chief; all ranks return its result, or raise its UserError."""
        return self.on_rank(0, action)

    def on_rank(self, root: int, action: Callable[[], T]) -> T:
        """Like on_chief, but on rank `root`; an error names that rank unless it is the chief."""
        outcome: Any = None
        if self.topology.rank == root:
            with self.watchdog.phase(CHECKPOINT):
                outcome = (*_attempt(action), self.topology.host)

        # The error is sent as a value: if the root raised before the broadcast, the others would wait
        # in it.
        value, error, host = self.broadcast(outcome, root)
        if error is None:
            return value
        if root:
            error = type(error)(f"rank {root} on {host}: {error}")
        error.culprit = root  # All ranks raise it, but the disk or file at fault is the root's.
        raise error

    def all_or_raise(self, action: Callable[[], T]) -> T:
        """Runs the action on every rank; if one raises a UserError, all ranks raise it."""
        value, error = _attempt(action)
        failures = self.gather((error, self.topology.host) if error else None)
        if not any(failures):
            return value

        # All ranks raise the error of the lowest rank that failed. Unless all ranks failed, the message
        # names that rank.
        culprit = next(rank for rank, failure in enumerate(failures) if failure)
        first_error, host = failures[culprit]
        if all(failures):
            raise type(first_error)(str(first_error)) from error
        joint_error = type(first_error)(f"rank {culprit} on {host}: {first_error}")
        joint_error.culprit = culprit
        raise joint_error from error


def _attempt(action: Callable[[], T]) -> tuple[Any, UserError | None]:
    try:
        return action(), None
    except UserError as error:
        return None, error
