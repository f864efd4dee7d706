"""What a strategy is, and the single process: every verb's default.

The runner calls these verbs and never asks which strategy it has. A verb is collective (every rank) unless
its docstring says otherwise; with one process each of them is an identity.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import keras
import numpy as np

from hvtrain.core.topology import Topology
from hvtrain.errors import UserError
from hvtrain.step_timing import StepMarks
from hvtrain.watchdog import Watch
from hvtrain.watchdog.progress import CHECKPOINT

T = TypeVar("T")


class WeightCheck(Protocol):
    """Compares weights over the ranks; num_checks says how often it did."""

    num_checks: int

    def __call__(self, when: str, everything: bool = False) -> None:
        """Raises RankError when trained weights (or everything) differ between ranks (every rank)."""

    def average_untrained(self) -> None:
        """Gives weights that no gradient touches one value on all ranks (every rank)."""


class NoWeightCheck:
    """One process's weights are equal."""

    num_checks = 0

    def __call__(self, when: str, everything: bool = False) -> None:
        pass

    def average_untrained(self) -> None:
        pass


class Strategy:
    """One process on its own: no exchange, no other rank."""

    topology = Topology()
    watchdog = Watch()
    marks: StepMarks
    """Made by start: how far this process's steps came, and what they spent their time on."""
    commit_steps = 0
    """Steps after which all ranks hold the state in memory, for an attempt that is begun anew; 0: none is."""

    def start(self) -> Topology:
        """Joins the other ranks, and pins this rank's device before TensorFlow touches one."""
        self.marks = StepMarks()
        return Topology()

    def expect_restart(self) -> None:
        """Before start, where restart will be called. Not collective."""

    def restart(self, environment: dict[str, str], bucket_mib: float) -> None:
        """Leaves the other ranks and joins them anew, with these variables and settings of the reduction."""

    def watch_over(self, abort_seconds: float) -> None:
        """Has the ranks watch each other from now on; again: anew, over those that there are now. 0: not."""

    def cause_of(self, error: BaseException) -> UserError | None:
        """What became of another rank, when that is what this error came of. Not collective."""
        return None

    def devices(self) -> list[str]:
        """The device of each rank, by rank. After start; not collective."""
        return []

    def description(self) -> str:
        """How the ranks talk, in a few words, for the header. Not collective."""
        return "one process"

    def scope(self) -> AbstractContextManager[Any]:
        """The context in which the model is built. Not collective."""
        return nullcontext()

    def distribute(
        self, optimizer: keras.optimizers.Optimizer, check_finite: bool = False, divide_losses: bool = False
    ) -> keras.optimizers.Optimizer:
        """The optimizer that steps on the mean of all ranks' gradients, if wished on finite ones only. Not collective.

        divide_losses: the step passes its loss through the optimizer's scale_loss, where the mean may be taken.
        """
        return optimizer

    def ranks_at_fault(self, error: Exception, optimizer: keras.optimizers.Optimizer) -> list[int]:
        """The ranks whose gradient was not finite, when that is what a step failed for. Not collective."""
        return []

    def weight_check(self, model: keras.Model, enabled: bool = True) -> WeightCheck:
        """What compares the model over the ranks, where enabled. Not collective."""
        return NoWeightCheck()

    def num_reductions(self, optimizer: keras.optimizers.Optimizer) -> int:
        """Reductions that ran so far. Not collective."""
        return 0

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """What must run in every training of this strategy, before all other callbacks. Not collective."""
        return []

    def stop_callbacks(self) -> list[keras.callbacks.Callback]:
        """What makes a wish to stop of one rank everyone's, after all callbacks that may wish it. Not collective."""
        return []

    def run_with_restarts(self, attempt: Callable[[], T]) -> T:
        """Result of an attempt at the run, which is repeated when ranks leave or join. Not collective."""
        return attempt()

    def check_membership(self) -> None:
        """Raises what begins the attempt anew where ranks are about to join or to go."""

    def broadcast_model(self, model: keras.Model) -> None:
        """Sets weights and optimizer state of all ranks to those of the chief."""

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The value of one rank, else the chief's, on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, by rank."""
        return [value]

    def on_chief(self, action: Callable[[], T]) -> T:
        """The result of an action that the chief alone does; what it raises for the user is raised on all ranks."""
        return self.on_rank(0, action)

    def on_rank(self, root: int, action: Callable[[], T]) -> T:
        """The same of another rank, which an error names."""
        outcome: tuple[Any, UserError | None] = (None, None)
        if self.topology.rank == root:
            with self.watchdog.phase(CHECKPOINT):
                outcome = _attempt(action)
        value, error, host = self.broadcast((*outcome, self.topology.host), root)
        if error is not None:
            raise type(error)(f"rank {root} on {host}: {error}") if root else error
        return value

    def all_or_raise(self, action: Callable[[], T]) -> T:
        """The result of an action that every rank does; if it fails on one, all raise that error, with its rank."""
        value, error = _attempt(action)
        errors = self.gather(error and (error, self.topology.host))
        failed = [rank for rank, found in enumerate(errors) if found]
        if failed:
            first, host = errors[failed[0]]
            where = "" if len(failed) == len(errors) else f"rank {failed[0]} on {host}: "
            raise type(first)(f"{where}{first}")
        return value

    def sum_arrays(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Element-wise sums over the ranks, as float64."""
        return [np.asarray(array, np.float64) for array in arrays]

    def start_timeline(self, path: Path) -> None:
        """Has what the ranks exchange written there from now on, by the chief, for chrome://tracing."""

    def stop_timeline(self) -> None:
        """The file is whole then."""

    def stop(self) -> None:
        """Leaves the other ranks. Not collective."""


def _attempt(action: Callable[[], T]) -> tuple[Any, UserError | None]:
    try:
        return action(), None
    except UserError as error:
        return None, error
