"""When checkpoints are written, and which is the best."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvtrain import checkpoint
from hvtrain.callbacks.callback_state import CallbackState
from hvtrain.callbacks.interruption import Interruption
from hvtrain.callbacks.position import Position
from hvtrain.callbacks.validation import Validation
from hvtrain.config import CheckpointConfig
from hvtrain.strategies.base import Strategy, WeightCheck

# The minutes are the chief's clock, so the ranks must ask it; not at each step.
STEPS_BETWEEN_CLOCK_LOOKS = 20


class Checkpointing(keras.callbacks.Callback):
    """Writes a checkpoint when one is due and at the end (state of all ranks gathered, written by the chief)."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        meta: dict[str, Any],
        strategy: Strategy,
        position: Position,
        validation: Validation | None,
        weights: WeightCheck,
        callback_state: CallbackState,
        interruption: Interruption,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.config = config
        self.meta = meta
        self.strategy = strategy
        self.position = position
        self.validation = validation
        self.weights = weights
        self.callback_state = callback_state
        self.interruption = interruption
        self._last_seconds = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The last step of an epoch is left to on_epoch_end, when its metrics are known.
        if self.position.ends_epoch:
            return
        every_steps = self.config.every_steps
        if (every_steps and self.position.step % every_steps == 0) or self._minutes_due():
            self._write(self.validation.latest if self._validated_now() and self.validation else {})

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
            self._write(metrics)

    def _validated_now(self) -> bool:
        return self.validation is not None and self.validation.latest_step == self.position.step

    def _minutes_due(self) -> bool:
        """The chief's answer, for all (every rank)."""
        minutes = self.config.every_minutes
        if not minutes or (self.position.step % STEPS_BETWEEN_CLOCK_LOOKS and not self.position.ends_epoch):
            return False
        return self.strategy.broadcast(time.monotonic() - self._last_seconds >= 60 * minutes)

    def _write(self, metrics: dict[str, float]) -> None:
        self.weights.level()
        self.weights(f"before the checkpoint of step {self.position.step:,}", everything=True)
        states = self.strategy.gather(checkpoint.rank_state(self.model))
        self.strategy.on_chief(lambda: self._write_on_chief(states, metrics))
        self._last_seconds = time.monotonic()

    def _write_on_chief(self, states: list[dict[str, np.ndarray]], metrics: dict[str, float]) -> None:
        step = self.position.step
        epoch, step_in_epoch = self.position.plan.position(step)
        meta = {**self.meta, "epoch": epoch, "step_in_epoch": step_in_epoch, "metrics": metrics}
        meta["callbacks"] = self.callback_state.numbers()
        meta["ended"] = self.model.stop_training and not self.interruption.reason
        checkpoint.write(self.folder, step, self.model, meta, states, self.callback_state.arrays())
        name = self.config.best
        if name in metrics and self._is_best(metrics[name]):
            checkpoint.mark_best(self.folder, step, name, metrics[name])
        checkpoint.prune(self.folder, self.config.keep)

    def _is_best(self, value: float) -> bool:
        best = checkpoint.read_best(self.folder)
        if best is None or best["metric"] != self.config.best:
            return True
        lower_is_better = "loss" in self.config.best or "error" in self.config.best
        return value < best["value"] if lower_is_better else value > best["value"]
