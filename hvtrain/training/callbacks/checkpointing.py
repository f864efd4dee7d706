"""Writes checkpoints when they are due."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

from hvtrain.checkpoint import store
from hvtrain.checkpoint.writer import Writer
from hvtrain.strategies.parts import WeightCheck
from hvtrain.training.callbacks.callback_state import CallbackState
from hvtrain.training.callbacks.interruption import Interruption
from hvtrain.training.callbacks.position import Position
from hvtrain.training.callbacks.validation import Validation
from hvtrain.training.run import Run

# Minutes are counted by the chief's clock. Asking it is a broadcast, which is too slow for every step.
STEPS_BETWEEN_CLOCK_CHECKS = 20


class Checkpointing(keras.callbacks.Callback):
    """Writes a checkpoint when one is due and at the end (state of all ranks gathered, written by the chief;
    other hosts note where it lies).

    Training waits while the state is copied; the writer does the rest in the background, and the end waits for it.
    """

    def __init__(
        self,
        run: Run,
        writer: Writer,
        position: Position,
        validation: Validation | None,
        weights: WeightCheck,
        callback_state: CallbackState,
        interruption: Interruption,
    ) -> None:
        super().__init__()
        self.writer = writer
        self.config = run.config.checkpoint
        self.meta = run.meta
        self.comm = run.strategy.comm
        self.noting = run.state.noting
        self.position = position
        self.validation = validation
        self.weights = weights
        self.callback_state = callback_state
        self.interruption = interruption
        self._last_seconds = time.monotonic()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Only rank 0 knows that a background write failed. It requests the stop here, so that all ranks agree on it
        # after this step; then on_epoch_end raises the error on all of them.
        if self.writer.failed:
            self.model.stop_training = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The last step of an epoch is left to on_epoch_end, when its metrics are known.
        if self.position.ends_epoch:
            return
        every_steps = self.config.every_steps
        if (every_steps and self.position.step % every_steps == 0) or self._minutes_due():
            self._save(self.validation.latest if self._validated_now() and self.validation else {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        config, step = self.config, self.position.step
        if self.model.stop_training:
            self.interruption.settle()
        last = step == self.position.plan.num_steps
        by_epochs = config.every_epochs and (epoch + 1) % config.every_epochs == 0
        by_steps = config.every_steps and step % config.every_steps == 0
        if last or by_epochs or by_steps or self.model.stop_training or self._minutes_due():
            metrics = {name: float(value) for name, value in (logs or {}).items()}
            if not self._validated_now():
                metrics = {name: value for name, value in metrics.items() if not name.startswith("val_")}
            self._save(metrics)
        if last or self.model.stop_training:
            self.noting.note(self.comm.on_chief(self._finish))

    def _finish(self) -> int:
        self.writer.finish()
        return self.writer.whole_step

    def _validated_now(self) -> bool:
        return self.validation is not None and self.validation.latest_step == self.position.step

    def _minutes_due(self) -> bool:
        """The chief's answer, for all (every rank)."""
        minutes = self.config.every_minutes
        steps = STEPS_BETWEEN_CLOCK_CHECKS * self.position.plan.accumulate
        if not minutes or (self.position.step % steps and not self.position.ends_epoch):
            return False
        return self.comm.broadcast(time.monotonic() - self._last_seconds >= 60 * minutes)

    def _save(self, metrics: dict[str, float]) -> None:
        self.weights.average_untrained()
        self.weights(f"before the checkpoint of step {self.position.step:,}", everything=True)
        # One exchange for both: the state of all ranks, and how the chief's write before this one ended.
        outcome = self.writer.outcome()
        found = self.comm.gather((store.rank_state(self.model), outcome, self.writer.whole_step))
        for _, error, _ in found:
            if error:
                raise error
        self.noting.note(found[0][2])
        if self.comm.topology.is_chief:
            self._begin_to_write([state for state, *_ in found], metrics)
        self._last_seconds = time.monotonic()

    def _begin_to_write(self, states: list[dict[str, np.ndarray]], metrics: dict[str, float]) -> None:
        step = self.position.step
        epoch, step_in_epoch = self.position.plan.position(step)
        meta = {**self.meta, "epoch": epoch, "step_in_epoch": step_in_epoch, "metrics": metrics}
        meta["callbacks"] = self.callback_state.numbers()
        meta["ended"] = self.model.stop_training and not self.interruption.reason
        self.writer.submit(step, store.snapshot(self.model, states, self.callback_state.arrays()), meta)
