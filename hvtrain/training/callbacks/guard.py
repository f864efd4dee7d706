"""Stops runs whose ranks differ or whose values are not finite, and counts the examples for the proof.

With data.one_batch=true a run also fails if its model has not memorized its only batch.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.errors import NOT_FINITE_ADVICE, DataError, TrainingError
from hvtrain.keras.gradients import NOT_FINITE
from hvtrain.keras.optimizer import ranks_at_fault
from hvtrain.keras.process import is_lost_rank_error
from hvtrain.keras.sharded_embedding import wrong_ids
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.comm import Comm
from hvtrain.system.text import counted
from hvtrain.training.callbacks.run_context import Logs, RunCallback, RunContext

log = logging.getLogger(__name__)

# The loss of a model that has learned its one batch, relative to the loss before training.
LEARNED_LOSS = 0.05
# The value that the task's metric may reach instead, if larger values are better, as for accuracy.
LEARNED_SCORE = 0.99
# Keras counts in float32, which has no odd numbers from here on.
FIRST_INEXACT_COUNT = 2**24


class Guard(RunCallback):
    """Compares the ranks' weights every guard.every steps, and checks the epoch's loss (every rank).

    It compares trained weights and slots; Checkpointing compares all variables before it writes. Put
    this callback after EpochMetrics, so that all ranks see the same loss.

    Raises:
        RankError: Weights differ between ranks.
        TrainingError: The loss of an epoch is not finite. The message names the ranks at fault.
    """

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        # With local steps, weights are equal only at synchronizations.
        if self.position.is_multiple_of(
            math.lcm(self.run.config.guard.every, self.strategy.sync_every)
        ):
            self.weights(f"after step {self.step:,}")

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # With a dynamic loss scale, steps that overflow are skipped; their loss is not an error.
        if math.isfinite(logs.get("loss", 0.0)) or hasattr(self.model.optimizer, "dynamic_scale"):
            return

        # The logs have the loss over all ranks; each rank's own loss shows where it went wrong.
        own_loss = float(self.model.get_metrics_result()["loss"])
        ranks = ranks_not_finite(self.comm, own_loss)
        # Finite losses can have a sum over the ranks that is not.
        where = f"on {ranks_in_words(ranks)}" if ranks else "in its sum over the ranks"
        raise TrainingError(
            f"the loss of epoch {epoch + 1} is not finite (step {self.step:,}) {where}; "
            f"{NOT_FINITE_ADVICE}{layer_hint(self.strategy)}"
        )


def layer_hint(strategy: Strategy) -> str:
    """Returns how to find the layer of a non-finite value; empty if debug=nan would refuse the strategy."""
    return "; the same command with debug=nan names the layer" if strategy.is_plain else ""


@contextmanager
def explain_errors(
    context: RunContext,
    search: Callable[[int], str] | None = None,
) -> Iterator[None]:
    """Replaces TensorFlow's errors about unreadable data and non-finite gradients with errors that explain them.

    Args:
        context: The run's context.
        search: Collective function that describes a step's first non-finite value; None: do not search.

    Raises:
        TrainingError: A gradient is not finite.
        DataError: This rank cannot read its data, or an id is out of an embedding table's range.
    """
    strategy = context.run.strategy
    steps_before = strategy.marks().arrived
    try:
        yield
    except tf.errors.OpError as error:
        if NOT_FINITE in str(error):
            ranks = ranks_at_fault(context.model.optimizer)
            # The ranks' own gradients may be finite, and their sum not.
            where = "in the mean over the ranks (strategy.compression=fp16 overflows above 65504)"
            if ranks:
                where = f"on {ranks_in_words(ranks)}"
            # Counts arrived batches, because position.step omits the steps that the failed call of the
            # graph has completed, and the number of ended steps plus one is wrong if local steps
            # synchronize between two steps.
            step = context.position.start_step + strategy.marks().arrived - steps_before
            if strategy.sync_every > 1:
                # The ranks compare weights, and only at synchronizations.
                raise TrainingError(
                    f"the weights are not finite {where} at the synchronization of step {step:,}, after a step since "
                    f"the one before it; {NOT_FINITE_ADVICE}"
                ) from error
            origin = ""
            hint = layer_hint(strategy)
            if search and ranks:
                origin = search(step)
                hint = ""
            raise TrainingError(
                f"the gradient of step {step:,} is not finite {where}; "
                f"it did not reach the weights{origin}; {NOT_FINITE_ADVICE}{hint}"
            ) from error

        if is_lost_rank_error(error):
            # Horovod's errors are OpErrors too, and searching all files
            # for damage would be pointless.
            raise
        cause = wrong_ids(error) or context.run.source.explain(error)
        if cause is error:
            raise
        topology = strategy.topology
        where = f"rank {topology.rank} on {topology.host}: " if topology.size > 1 else ""
        unreadable = DataError(f"{where}{cause}")
        unreadable.reporting_rank = topology.rank  # No other rank reads this file.
        raise unreadable from error


def ranks_not_finite(comm: Comm, value: float) -> list[int]:
    """Returns the ranks on which a value is not finite (every rank)."""
    is_finite = comm.gather(math.isfinite(value))
    return [rank for rank, finite in enumerate(is_finite) if not finite]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Formats ranks: "rank 1", "ranks 0, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Proof(RunCallback):
    """Counts the examples that went through the steps of each epoch, over all ranks (every rank).

    The counts come from the steps themselves, not from the plan, so they would reveal lost examples.
    """

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self._arrived_before = self.strategy.marks.num_examples
        self._saw_begin = not self.position.in_epoch

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        own_count = self.strategy.marks.num_examples - self._arrived_before
        is_whole = self._saw_begin
        if type(self.model).train_step is keras.Model.train_step:
            # The count in Keras's loss metric includes the examples before a resume within the epoch.
            loss = next(metric for metric in self.model.metrics if metric.name == "loss")
            counted_by_loss = int(loss.count)
            if counted_by_loss < FIRST_INEXACT_COUNT:
                own_count = counted_by_loss
                is_whole = True

        count = int(self.comm.sum_arrays([np.asarray(own_count)])[0])
        has_ended = self.plan.position(self.step)[1] == 0
        if is_whole and has_ended and not self.run.config.data.one_batch:
            self.report.examples_each_epoch.append(count)


class OneBatch(RunCallback):
    """Evaluates on the global batch before and after the training (every rank).

    Raises TrainingError if the model has not memorized the batch. An evaluation has no dropout, and uses
    the moving statistics of batch normalization, so the training loss of the last epoch counts too. A
    resumed run is not judged, because its metrics before the first step are unknown. Put this callback
    after SameLogs, so that all ranks make the same decision.
    """

    def on_train_begin(self, logs: Any) -> None:
        self.before = self._evaluate()

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self.training = logs

    def on_train_end(self, logs: Any) -> None:
        if not self.position.is_last:
            return  # Stopped by a signal or a time limit.
        if self.position.start_step:
            log.info(
                "cannot tell whether the batch was memorized, since this run was resumed; start again in a new run.dir"
            )
            return

        after = self._evaluate()
        changes = ", ".join(
            f"{name} {self.before[name]:.4g} -> {value:.4g}" for name, value in after.items()
        )
        if "loss" in self.training:
            changes += f"; in training, with dropout if there is any: {self.training['loss']:.4g}"
        batch = f"one batch of {counted(self.plan.global_batch, 'example')}"
        best = self.run.task.best
        if is_learned(self.before, after, self.training, best, self.run.task.sign(best)):
            log.info("%s was memorized: %s", batch, changes)
            return
        raise TrainingError(
            f"{batch} was not memorized in {self.step:,} step{'s' * (self.step != 1)}: {changes}; look for a fault "
            "in the last layer, the loss, the targets, frozen layers or the learning rate, or raise train.steps"
        )

    def _evaluate(self) -> dict[str, float]:
        run = self.run
        batch = run.stream_from(self.plan.shift).take(1)
        if run.source.raw_batches:
            # In training, prepare_step does this.
            batch = batch.map(lambda inputs, *others: (run.source.finish(inputs), *others))
        batch = batch.apply(tf.data.experimental.assert_cardinality(1))
        return run.task.results(run.strategy.evaluate(self.model, batch))


def is_learned(
    before: dict[str, float],
    after: dict[str, float],
    training: dict[str, float],
    best: str,
    sign: int,
) -> bool:
    """True if the loss has fallen to LEARNED_LOSS times its first value, or the score has reached LEARNED_SCORE.

    Args:
        before: The metrics of an evaluation before the first step.
        after: The metrics of an evaluation after the last step.
        training: The logs of the last epoch.
        best: The metric by which the task chooses the best model.
        sign: 1 if a larger value is better, -1 if a smaller one is.

    >>> is_learned({"loss": 2.3}, {"loss": 0.6, "accuracy": 1.0}, {}, "accuracy", 1)
    True
    >>> is_learned({"loss": 2.3}, {"loss": 0.6, "accuracy": 0.8}, {"loss": 0.5}, "accuracy", 1)
    False
    >>> is_learned({}, {"accuracy": 0.8}, {"loss": 0.5}, "accuracy", 1)
    False
    """
    losses = [logs["loss"] for logs in (after, training) if "loss" in logs]
    # A model's own test_step may log no loss.
    if losses and min(losses) <= LEARNED_LOSS * before.get("loss", 0.0):
        return True
    return sign > 0 and after.get(best, 0.0) >= LEARNED_SCORE
