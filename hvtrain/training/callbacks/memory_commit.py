"""Commits the state to the memory of every rank, for an attempt that continues from it after ranks left or joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from hvtrain.checkpoint import store
from hvtrain.strategies.parts import WeightCheck
from hvtrain.training.callbacks.callback_state import CallbackState
from hvtrain.training.callbacks.position import Position
from hvtrain.training.run import Run


class MemoryCommit(keras.callbacks.Callback):
    """Keeps what a checkpoint would, after every membership.commit_steps steps and each epoch (every rank).

    Then it lets ranks join or leave, so nothing is lost when they do. Put it last.
    """

    def __init__(self, run: Run, position: Position, weights: WeightCheck, callback_state: CallbackState) -> None:
        super().__init__()
        self.run = run
        self.membership = run.strategy.membership
        self.position = position
        self.weights = weights
        self.callback_state = callback_state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.position.step % self.membership.commit_steps == 0 and not self.position.ends_epoch:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.position.ends_epoch:
            self._commit()

    def _commit(self) -> None:
        if self.model.stop_training:
            return  # All ranks are leaving, with a checkpoint.
        step = self.position.step
        epoch, step_in_epoch = self.position.plan.position(step)
        meta = {**self.run.meta, "step": step, "epoch": epoch, "step_in_epoch": step_in_epoch}
        meta["callbacks"] = self.callback_state.numbers()
        self.weights.average_untrained()
        states = self.run.strategy.comm.gather(store.rank_state(self.model))
        arrays = store.snapshot(self.model, states, self.callback_state.arrays())
        self.run.state.checkpoint = store.Checkpoint(Path(f"step-{step:08d}"), step, meta, arrays)
        if step < self.position.plan.num_steps:
            self.membership.check()
