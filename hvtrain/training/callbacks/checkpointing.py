"""Saves the state of a run: checkpoints on disk, also when it is interrupted, and commits to memory in elastic jobs."""

import signal
import socket
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvtrain.checkpoint import store
from hvtrain.checkpoint.writer import Writer
from hvtrain.config.validate import seconds
from hvtrain.errors import INTERRUPTED, RESTART_HELPS
from hvtrain.strategies.comm import Comm
from hvtrain.system import console
from hvtrain.training.callbacks.epoch_metrics import Validation
from hvtrain.training.callbacks.position import RunCallback
from hvtrain.training.run import Run

# Minutes are counted by the chief's clock. Asking it is a broadcast, which is too slow for every step.
STEPS_BETWEEN_CLOCK_CHECKS = 20


class Interruption(keras.callbacks.Callback):
    """Requests a stop after train.max_time by the chief's clock, or after a signal to this rank (every rank).

    The run is saved, to be resumed later. The ranks stop together, after the same step. A signal that came between two
    attempts counts too. While training goes on, Ctrl-C is such a signal; a second one ends the process at once.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.reason = ""
        self.exit_code = 0
        self._comm = run.strategy.comm
        self._limit = limit = run.config.train.max_time if run.topology.is_chief else None
        self._deadline = run.state.began + seconds("train.max_time", limit) if limit else float("inf")
        self._signals = run.state.signals
        console.take_signals(self._take_signal)

    def on_train_begin(self, logs: Any = None) -> None:
        console.take_signals(self._take_signal, signal.SIGINT)

    def on_train_end(self, logs: Any = None) -> None:
        console.take_signals(signal.default_int_handler, signal.SIGINT)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._signals or time.monotonic() >= self._deadline:
            self.model.stop_training = True

    def agree_on_reason(self) -> None:
        """Sets the reason for which training has stopped, the same on all ranks; empty if it is not this callback's."""
        name = signal.Signals(self._signals[0]).name if self._signals else ""
        by_signal = f"{name} to rank {self._comm.topology.rank} on {socket.gethostname()}" if name else ""
        by_user = "Ctrl-C" if signal.SIGINT in self._signals else ""
        by_clock = f"train.max_time={self._limit}" if time.monotonic() >= self._deadline else ""
        users, signals, clocks = zip(*self._comm.gather((by_user, by_signal, by_clock)))
        self.exit_code = INTERRUPTED if any(users) else RESTART_HELPS if any(signals) else 0
        self.reason = next(filter(None, [*users, *signals, *clocks]), "")

    def _take_signal(self, number: int, frame: Any) -> None:
        self._signals.append(number)
        console.note_signal()
        if number == signal.SIGINT:
            console.take_signals(signal.SIG_DFL, signal.SIGINT)
            if not console.is_launched():  # Otherwise the launcher says it.
                console.say_stopping()


class CallbackState(keras.callbacks.Callback):
    """Saves the state of the given callbacks, and restores it when training begins again (every rank).

    Numbers (patience, best value) go into the checkpoint's meta and best_weights among its arrays; nothing else is
    kept. Callbacks set the factor of the learning rate, so all ranks get the chief's. Put it after those callbacks.
    """

    def __init__(
        self, callbacks: dict[str, keras.callbacks.Callback], saved: dict[str, dict[str, Any]], comm: Comm
    ) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._saved = saved
        self._comm = comm

    def on_train_begin(self, logs: Any = None) -> None:
        for name, values in self._saved.items():
            if name in self._callbacks:
                vars(self._callbacks[name]).update(values)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        factor = store.rate_factor(self.model)
        if self._callbacks and factor is not None:
            factor.assign(self._comm.broadcast(float(factor)))  # Ranks with different rates would drift apart.

    def numbers(self) -> dict[str, dict[str, Any]]:
        """The numbers of each callback, by its name."""
        return {
            name: {key: float(value) for key in store.NUMBERS if (value := vars(callback).get(key)) is not None}
            for name, callback in self._callbacks.items()
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """The best weights in callbacks, by the keys that `saved_callbacks` reads."""
        return {
            f"callback/{name}/{index:04d}": weight
            for name, callback in self._callbacks.items()
            for index, weight in enumerate(getattr(callback, "best_weights", None) or ())
        }


class _Saving(RunCallback):
    """The state that checkpoints and commits copy."""

    def __init__(self, *place: Any, callback_state: CallbackState, validation: Validation) -> None:
        super().__init__(*place)
        self.callback_state, self.validation = callback_state, validation

    def checkpoint(self, states: list[dict[str, np.ndarray]], **meta: Any) -> store.Checkpoint:
        """Copies the state of this moment. states are those of all ranks."""
        step = self.position.step
        epoch, step_in_epoch = self.position.plan.position(step)
        state = {"callbacks": self.callback_state.numbers(), "unlogged": self.validation.unlogged}
        meta = {**self.run.meta, "epoch": epoch, "step_in_epoch": step_in_epoch, **state, **meta}
        arrays = store.snapshot(self.model, states, self.callback_state.arrays())
        return store.Checkpoint(Path(store.folder_name(step)), step, meta, arrays)


class Checkpointing(_Saving):
    """Writes a checkpoint when one is due and at the end (every rank).

    The chief gathers the state of all ranks and writes it; other hosts note where it is. Training waits while the
    state is copied; the writer does the rest in the background, and the end waits for it.
    """

    def __init__(self, *place: Any, writer: Writer, interruption: Interruption, **more: Any) -> None:
        super().__init__(*place, **more)
        self.config = self.run.config.checkpoint
        self.writer = writer
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
            self._save(self.validation.latest if self._validated_now() else {})

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
        return self.validation.latest_step == self.position.step

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
