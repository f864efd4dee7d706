"""When every rank holds the state in memory, for an attempt that continues from it after ranks left or joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from hvtrain.checkpoint import store
from hvtrain.restore.resume import RunState
from hvtrain.strategies.base import Strategy, WeightCheck
from hvtrain.training.callbacks.callback_state import CallbackState
from hvtrain.training.callbacks.position import Position


class Committing(keras.callbacks.Callback):
    """Holds what a checkpoint would, after every strategy.commit_steps steps and each epoch (every rank).

    Then it looks whether ranks are about to join or to go, and nothing is lost where they are. Put it last.
    """

    def __init__(
        self,
        run_state: RunState,
        meta: dict[str, Any],
        strategy: Strategy,
        position: Position,
        weights: WeightCheck,
        callback_state: CallbackState,
    ) -> None:
        super().__init__()
        self.run_state = run_state
        self.meta = meta
        self.strategy = strategy
        self.position = position
        self.weights = weights
        self.callback_state = callback_state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.position.step % self.strategy.commit_steps == 0 and not self.position.ends_epoch:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.position.ends_epoch:
            self._commit()

    def _commit(self) -> None:
        if self.model.stop_training:
            return  # All ranks are leaving, with a checkpoint.
        step = self.position.step
        epoch, step_in_epoch = self.position.plan.position(step)
        meta = {**self.meta, "step": step, "epoch": epoch, "step_in_epoch": step_in_epoch}
        meta["callbacks"] = self.callback_state.numbers()
        self.weights.average_untrained()
        states = self.strategy.gather(store.rank_state(self.model))
        arrays = store.snapshot(self.model, states, self.callback_state.arrays())
        self.run_state.checkpoint = store.Checkpoint(Path(f"step-{step:08d}"), step, meta, arrays)
        if step < self.position.plan.num_steps:
            self.strategy.check_membership()
