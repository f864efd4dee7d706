"""Failure of a rank: reports it to the other ranks, and explains errors that come from TensorFlow."""

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


def report_failure(strategy: Strategy, error: BaseException) -> None:
    """Tells the other ranks why this one fails, so that none waits for it; gives up after two seconds."""
    strategy.watchdog.fail(error)
    stopping = threading.Thread(target=strategy.stop, daemon=True)
    stopping.start()
    stopping.join(timeout=2.0)


@contextmanager
def explain_errors(run: Run, model: keras.Model, position: Position) -> Iterator[None]:
    """Explains TensorFlow's errors about unreadable data and gradients that are not finite."""
    strategy = run.strategy
    steps_before = strategy.marks()[3]
    try:
        yield
    except tf.errors.OpError as error:
        ranks = strategy.guards.ranks_at_fault(error, model.optimizer)
        if ranks:
            # Not position.step: a call of the graph that failed may have done some steps.
            step = position.start_step + strategy.marks()[3] - steps_before + 1
            raise TrainingError(
                f"the gradient of step {step:,} is not finite on {named(ranks)}; "
                f"nothing of it reached the weights; {ADVICE}"
            ) from error
        # Horovod's errors are OpErrors too; searching all files for damage would find nothing.
        cause = error if "orovod" in str(error) else run.source.explain(error)
        if cause is error:
            raise
        place = strategy.topology
        where = f"rank {place.rank} on {place.host}: " if place.size > 1 else ""
        unreadable = DataError(f"{where}{cause}")
        unreadable.spokesman = place.rank  # No other rank reads this file.
        raise unreadable from error
