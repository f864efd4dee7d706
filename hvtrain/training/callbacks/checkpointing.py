"""Saves the state of a run: checkpoints on disk, interruptions, and commits to memory."""

import math
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
from hvtrain.training.callbacks.epochs import Validation
from hvtrain.training.callbacks.run_context import RunCallback, RunContext
from hvtrain.training.resume import gather_arrays

# Minutes are counted by the chief's clock. Asking it is a broadcast, which is too slow for every
# step.
STEPS_BETWEEN_CLOCK_CHECKS = 20


class Interruption(RunCallback):
    """Requests a stop after train.max_time or after a signal to this rank (every rank).

    The run is saved, to be resumed later. The ranks stop together, after the same step. A signal
    that came between two attempts counts too. While training goes on, Ctrl-C is such a signal; a
    second one ends the process at once.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._limit = self.run.config.train.max_time
        self._deadline = float("inf")
        # The chief's clock alone: others would ask for a stop a step earlier or later.
        if self._limit and self.run.topology.is_chief:
            self._deadline = self.run.state.began + seconds("train.max_time", self._limit)
        self._signals = self.run.state.signals
        console.take_signals(self._take_signal)

    def on_train_begin(self, logs: Any = None) -> None:
        # Before and after the training there is nothing to save, and Ctrl-C ends the process.
        console.take_signals(self._take_signal, signal.SIGINT)

    def on_train_end(self, logs: Any = None) -> None:
        console.take_signals(signal.default_int_handler, signal.SIGINT)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._signals or self._is_late:
            self.model.stop_training = True

    def agree_on_reason(self) -> None:
        """Reports why training has stopped and the exit code, the same on all ranks (every rank).

        Of several reasons Ctrl-C comes first, then signals, then the clock. There is none if a
        callback of the user's has stopped the training.
        """
        own_reasons: dict[int, str] = {}  # By exit code.
        if signal.SIGINT in self._signals:
            own_reasons[INTERRUPTED] = "Ctrl-C"
        elif self._signals:
            name = signal.Signals(self._signals[0]).name
            host = socket.gethostname()
            own_reasons[RESTART_HELPS] = f"{name} to rank {self.comm.topology.rank} on {host}"
        if self._is_late:
            own_reasons[0] = f"train.max_time={self._limit}"

        all_reasons = self.comm.gather(own_reasons)
        for exit_code in (INTERRUPTED, RESTART_HELPS, 0):
            reasons = [reasons[exit_code] for reasons in all_reasons if exit_code in reasons]
            if reasons:
                self.report.exit_code = exit_code
                self.report.stopped_by = reasons[0]
                return

    @property
    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def _take_signal(self, number: int, frame: Any) -> None:
        self._signals.append(number)
        console.note_signal()
        if number == signal.SIGINT:
            console.take_signals(signal.SIG_DFL, signal.SIGINT)
            if not console.is_launched():  # Otherwise the launcher says it.
                console.say_stopping()


class CallbackState(keras.callbacks.Callback):
    """Saves the state of the user's callbacks, and restores it in a resumed run (every rank).

    Numbers (patience, best value) go into the checkpoint's meta and best_weights among its arrays;
    nothing else is kept. Callbacks set the factor of the learning rate, so all ranks get the
    chief's. Put it after those callbacks.
    """

    def __init__(
        self,
        callbacks: dict[str, keras.callbacks.Callback],
        saved: dict[str, dict[str, Any]],
        comm: Comm,
    ) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._saved = saved
        self._comm = comm

    def on_train_begin(self, logs: Any = None) -> None:
        # Keras's callbacks set their counters anew in on_train_begin, so this one has to come after
        # them.
        for name, values in self._saved.items():
            if name in self._callbacks:
                vars(self._callbacks[name]).update(values)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        factor = store.rate_factor(self.model)
        # Ranks with different rates would drift apart.
        if self._callbacks and factor is not None:
            factor.assign(self._comm.broadcast(float(factor)))

    def numbers(self) -> dict[str, dict[str, Any]]:
        """The numbers of each callback, by its name."""
        numbers = {}
        for name, callback in self._callbacks.items():
            values = {key: vars(callback).get(key) for key in store.NUMBERS}
            numbers[name] = {key: float(value) for key, value in values.items() if value is not None}
        return numbers

    def arrays(self) -> dict[str, np.ndarray]:
        """The best weights in callbacks, by the keys that store.Checkpoint.callbacks reads."""
        return {
            f"callback/{name}/{index:04d}": weight
            for name, callback in self._callbacks.items()
            for index, weight in enumerate(getattr(callback, "best_weights", None) or ())
        }


class _Saving(RunCallback):
    """The state that checkpoints and commits copy."""

    def __init__(
        self,
        context: RunContext,
        callback_state: CallbackState,
        validation: Validation,
    ) -> None:
        super().__init__(context)
        self.callback_state = callback_state
        self.validation = validation

    def checkpoint(
        self, rank_states: list[dict[str, np.ndarray]], parts: dict[str, np.ndarray] | None = None, **meta: Any
    ) -> store.Checkpoint:
        """Copies the state of this moment, with that of each rank, and what is sharded over them."""
        step = self.position.step
        epoch, step_in_epoch = self.position.plan.position(step)
        return store.Checkpoint(
            path=Path(store.folder_name(step)),
            step=step,
            meta={
                **self.run.meta,
                "epoch": epoch,
                "step_in_epoch": step_in_epoch,
                "callbacks": self.callback_state.numbers(),
                "unlogged": self.validation.unlogged,
                "goodput": self.report.goodput.record(time.time()),
                **meta,
            },
            arrays=store.snapshot(self.model, rank_states, self.callback_state.arrays(), parts),
        )


class Checkpointing(_Saving):
    """Writes a checkpoint when one is due and at the end (every rank).

    The chief gathers the state of all ranks and writes it; other hosts note where it is. Training
    waits while the state is copied; the writer does the rest in the background, and the end waits
    for it.
    """

    def __init__(
        self,
        context: RunContext,
        callback_state: CallbackState,
        validation: Validation,
        interruption: Interruption,
        writer: Writer,
    ) -> None:
        super().__init__(context, callback_state, validation)
        self.config = self.run.config.checkpoint
        self.interruption = interruption
        self.writer = writer
        self._last_saved_at = time.monotonic()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Only rank 0 knows that a background write failed. It requests the stop here, so that all
        # ranks agree on it after this step; then on_epoch_end raises the error on all of them.
        if self.writer.failed:
            self.model.stop_training = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The last step of an epoch is left to on_epoch_end, when its metrics are known.
        if not self.position.in_epoch:
            return
        if self.position.is_multiple_of(self.config.every_steps) or self._minutes_due():
            self._save(self.validation.latest if self._validated_now() else {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.model.stop_training:
            self.interruption.agree_on_reason()
        is_end = self.position.is_last or self.model.stop_training
        by_epochs = self.config.every_epochs and (epoch + 1) % self.config.every_epochs == 0
        by_steps = self.position.is_multiple_of(self.config.every_steps)

        # _minutes_due is a collective. All ranks come to it or none: what stands before it is equal
        # on all of them.
        if is_end or by_epochs or by_steps or self._minutes_due():
            metrics = {name: float(value) for name, value in (logs or {}).items()}
            if not self._validated_now():
                # These val_* are of an earlier step, and would be taken for those of this
                # checkpoint.
                metrics = {name: value for name, value in metrics.items() if not name.startswith("val_")}
            self._save(metrics)

        if is_end:
            began = time.monotonic()
            self.run.state.note_keeper.note(self.comm.on_chief(self.writer.finish))
            self.report.goodput.seconds["checkpoints"] += time.monotonic() - began

    def _validated_now(self) -> bool:
        return self.validation.latest_step == self.position.step

    def _minutes_due(self) -> bool:
        """True if checkpoint.every_minutes have passed, by the chief's clock (every rank)."""
        minutes = self.config.every_minutes
        steps = math.lcm(STEPS_BETWEEN_CLOCK_CHECKS * self.position.plan.accumulate, self.run.strategy.sync_every)
        if not minutes or (self.position.in_epoch and not self.position.is_multiple_of(steps)):
            return False
        return self.comm.broadcast(time.monotonic() - self._last_saved_at >= 60 * minutes)

    def _save(self, metrics: dict[str, float]) -> None:
        """Hands a checkpoint to the chief's writer (every rank).

        Raises the error of the writer's previous write, if any.
        """
        began = time.monotonic()
        # Moving statistics follow each rank's own batches; the checkpoint gets their means.
        self.weights.average_untrained()
        # Only the chief's weights are saved. If ranks differed, a resume would hide it.
        self.weights(f"before the checkpoint of step {self.position.step:,}", everything=True)

        # One exchange for both: the state of all ranks, and how the chief's previous write ended.
        outcome = self.writer.outcome()
        gathered = self.comm.gather((store.rank_state(self.model), outcome, self.writer.whole_step))
        for _, error, _ in gathered:
            if error:
                raise error
        _, _, whole_step = gathered[0]
        self.run.state.note_keeper.note(whole_step)

        states = [state for state, *_ in gathered]
        if store.keeps_memory(self.model):
            memory = store.rank_memory(self.model, self.comm.topology.is_chief)
            memories = gather_arrays(memory, self.comm)
            states = [{**state, **arrays} for state, arrays in zip(states, memories)]
        parts = self.comm.gather_parts(store.sharded_variables(self.model), self.run.folder)

        if self.comm.topology.is_chief:
            # An interrupted run goes on later; one that a callback has stopped has ended.
            goes_on = self.report.stopped_by or self.report.rebalanced
            ended = self.model.stop_training and not goes_on
            saved = self.checkpoint(states, parts, metrics=metrics, ended=ended)
            self.writer.submit(saved.step, saved.arrays, saved.meta)
        self._last_saved_at = time.monotonic()
        self.report.goodput.seconds["checkpoints"] += self._last_saved_at - began


class MemoryCommit(_Saving):
    """Commits the state of an elastic job to every rank's memory (every rank).

    It does so after every membership.commit_steps steps and each epoch. It then lets ranks join or
    leave; the next attempt continues from the commit, so nothing is lost. Put it last.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The end of an epoch is left to on_epoch_end, after the other callbacks' work.
        commit_steps = self.run.strategy.membership.commit_steps
        if self.position.is_multiple_of(commit_steps) and self.position.in_epoch:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.position.in_epoch:
            self._commit()

    def _commit(self) -> None:
        if self.model.stop_training:
            return  # All ranks are leaving, with a checkpoint.
        self.weights.average_untrained()
        rank_states = self.comm.gather(store.rank_state(self.model))
        # The writer adds its step to the meta of a checkpoint on disk.
        self.run.state.checkpoint = self.checkpoint(rank_states, step=self.position.step)
        if not self.position.is_last:
            self.run.strategy.membership.check()
