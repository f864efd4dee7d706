"""Horovod's elastic loop for a program that keeps its state itself, and does everything anew after a reset."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import horovod.tensorflow as hvd
from horovod.common.elastic import State

from hvtrain.keras.elastic import run
from hvtrain.keras.reduction import number_anew

T = TypeVar("T")


class Resets(State):
    """Calls a function again whenever ranks were lost or have joined, until it returns (every rank).

    All ranks, those too that have just joined, then do the same from its beginning, so that no rank waits for a
    message that another does not send. It may make optimizers, and check_host_updates within it (every rank)
    begins it anew where ranks are about to join or to go.
    """

    def __init__(self) -> None:
        super().__init__(bcast_object=partial(hvd.broadcast_object, name="hvtrain.resets"), get_rank=hvd.rank)

    def run_with_restarts(self, func: Callable[[], T]) -> T:
        """The result of func. Errors of Horovod's operations call it again; every other error is raised as it is."""
        result: T = run(lambda _: func())(self)
        return result

    def reset(self) -> None:
        number_anew()

    def save(self) -> Any:
        """Nothing is kept here."""

    restore = sync = save
