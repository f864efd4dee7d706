"""Metrics of an epoch: over all its steps, over all ranks, the same in all logs; and validation."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.models.rates import averaged
from hvtrain.training.callbacks.run_context import RunCallback, RunContext

log = logging.getLogger(__name__)


class EpochMetrics(RunCallback):
    """Puts the training metrics of the whole epoch, over all ranks, into its logs (every rank).

    Args:
        context: The run's context.
        resumed: This rank's state from store.rank_state, after a resume within an epoch; else
            empty. The model's metrics must be built.
    """

    def __init__(self, context: RunContext, resumed: Mapping[str, np.ndarray]) -> None:
        super().__init__(context)
        # By their numbers, which is the order of model.metrics_variables.
        self._resumed = [value for name, value in sorted(resumed.items()) if name.startswith("metric/")]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Keras has just reset the metrics.
        for variable, value in zip(self.model.metrics_variables, self._resumed):
            variable.assign(value)
        self._resumed = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        metrics = self.run.strategy.metrics_over_ranks(self.model)
        # A train_step of the user's own may leave out some of Keras's metrics, such as a loss that
        # it never computes.
        left_out = metrics.keys() - logs.keys()
        for name, value in self.run.task.results(metrics).items():
            if name not in left_out:
                logs[name] = value


class SameLogs(RunCallback):
    """Replaces an epoch's logs by the chief's (every rank).

    Callbacks after it then decide alike on all ranks.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs.update(self.comm.broadcast({name: float(value) for name, value in logs.items()}))


class Validation(RunCallback):
    """Evaluates every N epochs, every N steps, or both (every rank).

    The logs of that epoch get val_*. latest holds the newest results, for callbacks that act within
    an epoch, and unlogged those that are in no epoch's logs yet. Logs of other epochs have no
    val_*: a callback that waits for an improvement would count a repeated one.

    Args:
        context: The run's context.
        dataset: This rank's shard; None: nothing is validated.
        resumed: Results that were unlogged where the run was interrupted.
    """

    def __init__(
        self,
        context: RunContext,
        dataset: tf.data.Dataset | None,
        resumed: Mapping[str, float],
    ) -> None:
        super().__init__(context)
        self.config = self.run.config.train
        self.dataset = dataset
        self.latest: dict[str, float] = {}
        self.latest_step = -1
        self.unlogged = dict(resumed)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.dataset is not None and self.position.is_multiple_of(
            self.config.validate_every_steps,
        ):
            self._validate()
            results = ", ".join(f"{name} {value:.4f}" for name, value in self.latest.items())
            log.info("step %s: %s", f"{self.position.step:,}", results)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self.dataset is None or self.position.in_epoch:
            return  # Stopped within the epoch.
        every = self.config.validate_every_epochs
        is_due = every and ((epoch + 1) % every == 0 or self.position.is_last)
        # validate_every_steps may have validated after this step already.
        if is_due and self.latest_step != self.position.step:
            self._validate()

        logs.update(self.unlogged)
        self.unlogged = {}

    def _validate(self) -> None:
        self.weights.average_untrained()  # Otherwise each rank would validate a different model.
        with averaged(self.model, self.config.ema):
            results = self.run.task.results(self.run.strategy.evaluate(self.model, self.dataset))
        self.latest = {f"val_{name}": value for name, value in results.items()}
        self.unlogged = self.latest
        self.latest_step = self.position.step
