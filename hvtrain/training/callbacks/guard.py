"""Stops training when weights differ between ranks or values are not finite; proves that ranks trained together."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.errors import DataError, TrainingError
from hvtrain.keras.gradients import NOT_FINITE
from hvtrain.keras.optimizer import num_reductions, ranks_at_fault
from hvtrain.training.callbacks.position import Position, RunCallback
from hvtrain.training.run import Run

ADVICE = (
    "the last checkpoint is from before; lower optimizer.learning_rate, clip gradients "
    "(+optimizer.global_clipnorm=1), or look at that data"
)
NAMES_LAYER = "; the same command with debug=nan names the layer"


class Guard(RunCallback):
    """Compares trained weights and slots after every guard.every steps, and checks the epoch's loss (every rank).

    Checkpointing compares everything once more before it writes. Put it after EpochMetrics, so that all ranks see
    the same loss.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.position.is_multiple_of(self.run.config.guard.every):
            self.weights(f"after step {self.position.step:,}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        # A dynamic loss scale skips steps that overflow; their loss is not an error.
        if math.isfinite(logs.get("loss", 0.0)) or hasattr(self.model.optimizer, "dynamic_scale"):
            return
        own = float(self.model.get_metrics_result()["loss"])
        ranks = [rank for rank, finite in enumerate(self.comm.gather(math.isfinite(own))) if not finite]
        raise TrainingError(
            f"the loss of epoch {epoch + 1} is not finite (step {self.position.step:,}) on {named(ranks)}; "
            f"{ADVICE}{NAMES_LAYER}"
        )


@contextmanager
def explain_errors(
    run: Run, model: keras.Model, position: Position, search: Callable[[int], str] | None = None
) -> Iterator[None]:
    """Explains TensorFlow's errors about unreadable data and gradients that are not finite.

    search: says of a step which value was the first that is not finite; all ranks call it.
    """
    strategy = run.strategy
    steps_before = strategy.marks()[3]
    try:
        yield
    except tf.errors.OpError as error:
        if NOT_FINITE in str(error) and (ranks := ranks_at_fault(model.optimizer)):
            # Not position.step: a call of the graph that failed may have done some steps.
            step = position.start_step + strategy.marks()[3] - steps_before + 1
            found = search(step) if search else ""
            raise TrainingError(
                f"the gradient of step {step:,} is not finite on {named(ranks)}{found}; "
                f"nothing of it reached the weights; {ADVICE}{'' if search else NAMES_LAYER}"
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


def named(ranks: list[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Proof(RunCallback):
    """Counts the examples that went through the steps of each epoch, over all ranks (every rank)."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.examples: list[int] = []
        self._arrived_before = 0
        self._is_whole = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._arrived_before = self.run.strategy.marks.num_examples
        self._is_whole = not self.position.in_epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if type(self.model).train_step is keras.Model.train_step:
            # Keras's mean of the loss counts the examples that it was computed on, also before a resume.
            own, is_whole = next(metric for metric in self.model.metrics if metric.name == "loss").count, True
        else:
            own, is_whole = self.run.strategy.marks.num_examples - self._arrived_before, self._is_whole
        count = int(self.comm.sum_arrays([np.asarray(own)])[0])
        is_whole = is_whole and not self.run.config.data.one_batch
        if is_whole and self.position.plan.position(self.position.step)[1] == 0:
            self.examples.append(count)

    def numbers(self, optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
        """The proof in result.json; reductions are those of this process."""
        accumulate = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps or 1
        return {
            "reductions": num_reductions(optimizer),
            "steps": (self.position.step - self.position.start_step) // accumulate,
            "ranks": self.position.plan.size,
            "weight_checks": self.weights.num_checks,
            "steps_by_worker": list(self.run.strategy.steps_by_worker),
            "examples_each_epoch": self.examples,
            "examples": self.position.plan.num_examples,
        }
