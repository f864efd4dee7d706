"""Horovod's elastic loop for a program that keeps its own state and begins again after each reset."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import horovod.tensorflow as hvd
from horovod.common.elastic import State

from hvtrain.keras.elastic import run
from hvtrain.keras.reduction import restart_numbering

T = TypeVar("T")


class Resets(State):
    """Repeats a function after ranks were lost or joined, until it returns (every rank).

    All ranks, including new ones, start from the function's beginning, so that no rank waits in a collective that
    another does not enter. The function may create optimizers. It calls check_host_updates (every rank), which
    restarts it if ranks are joining or leaving.
    """

    def __init__(self) -> None:
        super().__init__(bcast_object=partial(hvd.broadcast_object, name="hvtrain.resets"), get_rank=hvd.rank)

    def run_with_restarts(self, func: Callable[[], T]) -> T:
        """Returns func's result. An error of Horovod's operations repeats func; other errors are raised unchanged."""
        result: T = run(lambda _: func())(self)
        return result

    def reset(self) -> None:
        restart_numbering()

    def save(self) -> Any:
        """Does nothing: the program keeps its own state."""

    restore = sync = save
