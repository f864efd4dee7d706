"""Saves the state of a run: checkpoints on disk, and commits to memory in elastic jobs."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from hvtrain.checkpoint import store
from hvtrain.checkpoint.writer import Writer
from hvtrain.strategies.parts import WeightCheck
from hvtrain.training.callbacks.callback_state import CallbackState
from hvtrain.training.callbacks.interruption import Interruption
from hvtrain.training.callbacks.position import Position, RunCallback
from hvtrain.training.callbacks.validation import Validation
from hvtrain.training.run import Run

# Minutes are counted by the chief's clock. Asking it is a broadcast, which is too slow for every step.
STEPS_BETWEEN_CLOCK_CHECKS = 20


class _Saving(RunCallback):
    """The state that checkpoints and commits copy."""

    def __init__(self, run: Run, position: Position, weights: WeightCheck, callback_state: CallbackState) -> None:
        super().__init__(run, position)
        self.weights = weights
        self.callback_state = callback_state

    def checkpoint(self, states: list[dict[str, np.ndarray]], **meta: Any) -> store.Checkpoint:
        """Copies the state of this moment. states are those of all ranks."""
        step = self.position.step
        epoch, step_in_epoch = self.position.plan.position(step)
        callbacks = self.callback_state.numbers()
        meta = {**self.run.meta, "epoch": epoch, "step_in_epoch": step_in_epoch, "callbacks": callbacks, **meta}
        arrays = store.snapshot(self.model, states, self.callback_state.arrays())
        return store.Checkpoint(Path(store.folder_name(step)), step, meta, arrays)


class Checkpointing(_Saving):
    """Writes a checkpoint when one is due and at the end (every rank).

    The chief gathers the state of all ranks and writes it; other hosts note where it is. Training waits while the
    state is copied; the writer does the rest in the background, and the end waits for it.
    """

    def __init__(
        self,
        run: Run,
        position: Position,
        weights: WeightCheck,
        callback_state: CallbackState,
        writer: Writer,
        validation: Validation | None,
        interruption: Interruption,
    ) -> None:
        super().__init__(run, position, weights, callback_state)
        self.config = run.config.checkpoint
        self.writer = writer
        self.validation = validation
        self.interruption = interruption
        self._last_seconds = time.monotonic()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Only rank 0 knows that a background write failed. It requests the stop here, so that all ranks agree on it
        # after this step; then on_epoch_end raises the error on all of them.
        if self.writer.failed:
            self.model.stop_training = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The last step of an epoch is left to on_epoch_end, when its metrics are known.
        if self.position.in_epoch and (self.position.is_multiple_of(self.config.every_steps) or self._minutes_due()):
            self._save(self.validation.latest if self.validation and self._validated_now() else {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.model.stop_training:
            self.interruption.agree_on_reason()
        is_end = self.position.is_last or self.model.stop_training
        by_epochs = self.config.every_epochs and (epoch + 1) % self.config.every_epochs == 0
        by_steps = self.position.is_multiple_of(self.config.every_steps)
        if is_end or by_epochs or by_steps or self._minutes_due():
            kept = {name: float(value) for name, value in (logs or {}).items()}
            if not self._validated_now():
                kept = {name: value for name, value in kept.items() if not name.startswith("val_")}
            self._save(kept)
        if is_end:
            self.run.state.note_keeper.note(self.comm.on_chief(self._finish))

    def _finish(self) -> int:
        self.writer.finish()
        return self.writer.whole_step

    def _validated_now(self) -> bool:
        return self.validation is not None and self.validation.latest_step == self.position.step

    def _minutes_due(self) -> bool:
        """The chief's answer, for all (every rank)."""
        minutes = self.config.every_minutes
        steps = STEPS_BETWEEN_CLOCK_CHECKS * self.position.plan.accumulate
        if not minutes or (self.position.in_epoch and not self.position.is_multiple_of(steps)):
            return False
        return self.comm.broadcast(time.monotonic() - self._last_seconds >= 60 * minutes)

    def _save(self, metrics: dict[str, float]) -> None:
        self.weights.average_untrained()
        self.weights(f"before the checkpoint of step {self.position.step:,}", everything=True)
        # One exchange for both: the state of all ranks, and how the chief's previous write ended.
        outcome = self.writer.outcome()
        gathered = self.comm.gather((store.rank_state(self.model), outcome, self.writer.whole_step))
        for _, error, _ in gathered:
            if error:
                raise error
        self.run.state.note_keeper.note(gathered[0][2])
        if self.comm.topology.is_chief:
            ended = self.model.stop_training and not self.interruption.reason
            saved = self.checkpoint([state for state, *_ in gathered], metrics=metrics, ended=ended)
            self.writer.submit(saved.step, saved.arrays, saved.meta)
        self._last_seconds = time.monotonic()


class MemoryCommit(_Saving):
    """Commits the state to every rank's memory, after every membership.commit_steps steps and each epoch (every rank).

    It then lets ranks join or leave; the next attempt continues from the commit, so nothing is lost. Put it last.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.position.is_multiple_of(self.run.strategy.membership.commit_steps) and self.position.in_epoch:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.position.in_epoch:
            self._commit()

    def _commit(self) -> None:
        if self.model.stop_training:
            return  # All ranks are leaving, with a checkpoint.
        self.weights.average_untrained()
        states = self.comm.gather(store.rank_state(self.model))
        self.run.state.checkpoint = self.checkpoint(states, step=self.position.step)
        if not self.position.is_last:
            self.run.strategy.membership.check()
