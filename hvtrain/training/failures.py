"""When a run fails on a rank: the others are told why, and an error out of TensorFlow becomes one that helps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from hvtrain.errors import DataError, TrainingError
from hvtrain.strategies.base import Strategy
from hvtrain.training.callbacks.guard import ADVICE, named
from hvtrain.training.callbacks.position import Position
from hvtrain.training.run import Run


def leave(strategy: Strategy, error: BaseException) -> None:
    """Tells the other ranks why this one fails, so that none waits for it; gives up after two seconds."""
    strategy.watchdog.fail(error)
    farewell = threading.Thread(target=strategy.stop, daemon=True)
    farewell.start()
    farewell.join(timeout=2.0)


@contextmanager
def explained(run: Run, model: keras.Model, position: Position) -> Iterator[None]:
    """Turns TensorFlow's error about unreadable data, or a gradient that is not finite, into one that helps."""
    strategy = run.strategy
    before = strategy.marks()[3]
    try:
        yield
    except tf.errors.OpError as error:
        ranks = strategy.guards.ranks_at_fault(error, model.optimizer)
        if ranks:
            # Not position.step: that was before a call of several steps.
            step = position.start_step + strategy.marks()[3] - before + 1
            raise TrainingError(
                f"the gradient of step {step:,} is not finite on {named(ranks)}; "
                f"nothing of it reached the weights; {ADVICE}"
            ) from error
        # Horovod's errors come as OpErrors too; a search through all files would find nothing.
        cause = error if "orovod" in str(error) else run.source.explain(error)
        if cause is error:
            raise
        place = strategy.topology
        where = f"rank {place.rank} on {place.host}: " if place.size > 1 else ""
        unreadable = DataError(f"{where}{cause}")
        unreadable.spokesman = place.rank  # No other rank reads this.
        raise unreadable from error
