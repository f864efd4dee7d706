"""Callbacks that stop an interrupted run, and that save a run's state to checkpoints on disk or to memory."""

import logging
import math
import signal
import time
from operator import itemgetter
from typing import Any

import keras

from hvtrain.checkpoint import model_state, store
from hvtrain.checkpoint.writer import Writer
from hvtrain.config.validate import parse_duration
from hvtrain.core.schedule import rate_factor
from hvtrain.errors import (
    INTERRUPTED,
    NOT_FINITE_ADVICE,
    RESTART_HELPS,
    CheckpointError,
    StorageError,
    TrainingError,
)
from hvtrain.keras.gradients import are_finite
from hvtrain.system import console
from hvtrain.training.callbacks.epochs import Validation
from hvtrain.training.callbacks.guard import layer_hint
from hvtrain.training.callbacks.run_context import Logs, RunCallback, RunContext
from hvtrain.training.resume import send_arrays
from hvtrain.training.run import Start

log = logging.getLogger(__name__)

# checkpoint.every_minutes follows the chief's clock. Reading it takes a broadcast,
# which is too slow for every step.
STEPS_BETWEEN_CLOCK_CHECKS = 20


class Interruption(RunCallback):
    """Requests a stop after train.max_time or after a signal to this rank (every rank).

    All ranks stop after the same step, and the run is saved and can be resumed. A signal that arrived
    between two attempts counts too. During training, Ctrl-C is such a signal; a second Ctrl-C ends the
    process immediately.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._limit = self.run.config.train.max_time
        self._deadline = float("inf")
        # Only by the chief's clock: other ranks' clocks would request the stop a step earlier or later.
        if self._limit and self.is_chief:
            self._deadline = self.run.state.began + parse_duration("train.max_time", self._limit)
        self._signals = self.run.state.signals
        console.take_signals(self._take_signal)

    def on_train_begin(self, logs: Any) -> None:
        # Only during training: before and after it there is nothing to save, and Ctrl-C ends the process.
        console.take_signals(self._take_signal, signal.SIGINT)

    def on_train_end(self, logs: Any) -> None:
        console.take_signals(signal.default_int_handler, signal.SIGINT)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        # A single rank stops only after an update, as several do: if it saved gradients that it has
        # accumulated so far, a resume on more ranks would count them once per rank.
        may_stop = self.comm.topology.size > 1 or self.position.is_multiple_of(self.plan.accumulate)
        if may_stop and (self._signals or self._is_late):
            self.model.stop_training = True

    def agree_on_reason(self) -> None:
        """Sets report.stopped_by and report.exit_code, equal on all ranks (every rank).

        If there are several reasons, Ctrl-C takes precedence, then other signals, then the clock. There
        is no reason if a user's callback has stopped the training.
        """
        # Precedence (0 first), exit code and text of each.
        own_reasons: list[tuple[int, int, str]] = []
        if signal.SIGINT in self._signals:
            own_reasons.append((0, INTERRUPTED, "Ctrl-C"))
        elif self._signals:
            name = signal.Signals(self._signals[0]).name
            topology = self.comm.topology
            reason = f"{name} to rank {topology.rank} on {topology.host}"
            own_reasons.append((1, RESTART_HELPS, reason))
        if self._is_late:
            own_reasons.append((2, 0, f"train.max_time={self._limit}"))

        reasons = [reason for reasons in self.comm.gather(own_reasons) for reason in reasons]
        if reasons:
            # Among reasons of equal precedence, min takes the first, which is the lowest rank's.
            _, self.report.exit_code, self.report.stopped_by = min(reasons, key=itemgetter(0))

    @property
    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def _take_signal(self, signum: int, frame: Any) -> None:
        self._signals.append(signum)
        console.note_signal()
        if signum == signal.SIGINT:
            console.take_signals(signal.SIG_DFL, signal.SIGINT)
            if not console.is_launched():  # Otherwise the launcher prints this message.
                console.say_stopping()


class CallbackState(RunCallback):
    """Saves the state of the user's callbacks, and restores it in a resumed run (every rank).

    It saves store.NUMBERS, such as the best value, in the checkpoint's meta, and best_weights among its
    arrays. Since callbacks may set the factor of the learning rate, all ranks get the chief's factor after
    each epoch. Put this callback after the user's.

    Args:
        context: The run's context.
        callbacks: The user's callbacks on this rank, by name.
        start: Where the run begins or resumes; has the state that was saved.
    """

    def __init__(
        self,
        context: RunContext,
        callbacks: dict[str, keras.callbacks.Callback],
        start: Start,
    ) -> None:
        super().__init__(context)
        self._callbacks = callbacks
        self._saved = start.callbacks
        self._resumed_factor = None
        if self.position.in_epoch:
            self._resumed_factor = start.rank_state.get("rate/factor")

    def on_train_begin(self, logs: Any) -> None:
        # Keras's callbacks reset their counters in on_train_begin, so
        # this callback has to come later.
        for name, values in self._saved.items():
            if name not in self._callbacks:
                continue
            own_values = vars(self._callbacks[name])
            monitor = own_values.get("monitor")
            before = values.get("monitor", monitor)
            if before == monitor:
                own_values.update(values)
            else:
                # The best value of one metric says nothing about another.
                log.warning(f"callbacks.{name} starts anew: it monitored {before}, not {monitor}")

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        # The epoch had begun before the resume, so callbacks such as LearningRateScheduler have
        # just changed the rate a second time.
        factor = rate_factor(self.model)
        if factor is not None and self._resumed_factor is not None:
            factor.assign(self._resumed_factor)
        self._resumed_factor = None

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        factor = rate_factor(self.model)
        # Ranks with different rates would drift apart. Every rank takes part, even without
        # callbacks of its own: the chief may have some, such as CSVLogger.
        if factor is not None:
            factor.assign(self.comm.broadcast(float(factor)))

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Returns the numbers of each callback, by its name."""
        return {
            name: store.callback_numbers(callback) for name, callback in self._callbacks.items()
        }

    def arrays(self) -> store.Arrays:
        """Returns the best weights in callbacks, by the keys that store.Checkpoint.callbacks reads."""
        return {
            f"callback/{name}/{index:04d}": weight
            for name, callback in self._callbacks.items()
            for index, weight in enumerate(getattr(callback, "best_weights", None) or ())
        }


class _Saving(RunCallback):
    """Base of the callbacks that copy a run's state, for checkpoints and commits."""

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
        self,
        rank_states: list[store.Arrays],
        whole_values: store.Arrays,
        **meta: Any,
    ) -> store.Checkpoint:
        """Returns a copy of the current state.

        Args:
            rank_states: Results of model_state.rank_state, by rank.
            whole_values: The whole values of sharded variables, by key.
            meta: More facts for the checkpoint's meta.
        """
        epoch, step_in_epoch = self.plan.position(self.step)
        return store.Checkpoint(
            self.step,
            meta={
                **self.run.meta,
                "step": self.step,
                "epoch": epoch,
                "step_in_epoch": step_in_epoch,
                "callbacks": self.callback_state.numbers(),
                "unlogged": self.validation.unlogged,
                "goodput": self.report.goodput.record(time.time()),
                **meta,
            },
            arrays=model_state.snapshot(
                self.model, rank_states, self.callback_state.arrays(), whole_values
            ),
        )


class Checkpointing(_Saving):
    """Writes a checkpoint when one is due and at the end (every rank).

    The chief gathers the state of all ranks and writes it; other hosts note where the checkpoint is.
    Training waits while the state is copied, and for the previous write if that is not done yet. The
    writer works in the background, and the end of the run waits for it.
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

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        # Only rank 0 knows that a background write failed. It requests a stop here,
        # which the strategy's stop_callbacks extend to all ranks; on_epoch_end then
        # raises the error on all of them.
        if self.writer.failed:
            self.model.stop_training = True

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        # The last step of an epoch is left to on_epoch_end, when its metrics are known.
        if not self.position.in_epoch:
            return
        if self.position.is_multiple_of(self.config.every_steps) or self._minutes_due():
            self._save({})

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self.model.stop_training and not self.position.in_epoch:
            self.interruption.agree_on_reason()
        is_end = self.position.is_last or self.model.stop_training
        is_epoch_due = self.config.every_epochs and (epoch + 1) % self.config.every_epochs == 0
        is_step_due = self.position.is_multiple_of(self.config.every_steps)

        # _minutes_due is collective. The conditions before it are the same on all ranks, so all
        # call it or none does.
        if is_end or is_epoch_due or is_step_due or self._minutes_due():
            # An interrupted epoch has its metrics once a later start has finished it.
            self._save({} if self.position.in_epoch and self.report.stopped_by else logs)

        if is_end:
            began = time.monotonic()
            whole_step = self.comm.on_chief(self.writer.finish)
            self.run.state.note_keeper.note(whole_step)
            self.report.goodput.seconds["checkpoints"] += time.monotonic() - began
            ends_early = self.plan.ends_early and self.position.is_last
            # An elastic job continues from memory instead.
            is_elastic = self.strategy.membership.commit_steps
            continues = self.report.rebalanced or (ends_early and not is_elastic)
            if continues and not self.report.stopped_by and whole_step != self.step:
                # Otherwise the next attempt would resume from an older checkpoint
                # and come here again, endlessly.
                raise CheckpointError(
                    f"the rest of the run needs the checkpoint of step {self.step}, which was not written; "
                    "make room, then start again with the same run.dir"
                )

    def _minutes_due(self) -> bool:
        """True if checkpoint.every_minutes have passed, by the chief's clock (every rank)."""
        minutes = self.config.every_minutes
        steps = math.lcm(
            STEPS_BETWEEN_CLOCK_CHECKS * self.plan.accumulate, self.strategy.sync_every
        )
        if not minutes or (self.position.in_epoch and not self.position.is_multiple_of(steps)):
            return False
        return self.comm.broadcast(time.monotonic() - self._last_saved_at >= 60 * minutes)

    def _save(self, metrics: dict[str, float]) -> None:
        """Hands a checkpoint to the chief's writer (every rank).

        The checkpoint's metrics are `metrics` and the results of a validation after this very step.

        Raises TrainingError if a weight is not finite, or the error of the previous write, if any, on all ranks.
        """
        began = time.monotonic()
        # Moving statistics follow each rank's own batches; the checkpoint gets their means.
        self.weights.average_untrained()
        # Only the chief's weights are saved. If ranks differed, a resume would hide it.
        self.weights(f"before the checkpoint of step {self.step:,}", everything=True)

        # One exchange for the state of all ranks and for errors: weights that must not be saved,
        # and a failure of the chief's previous write.
        outcome = self._nonfinite_weights_error() or self.writer.outcome()
        own = model_state.rank_state(self.model), outcome, self.writer.whole_step
        own_states, errors, whole_steps = zip(*self.comm.gather(own))
        for error in errors:
            if error:
                raise error
        self.run.state.note_keeper.note(whole_steps[0])

        states = list(own_states)
        if model_state.keeps_memory(self.model):
            memory = model_state.rank_memory(self.model, self.is_chief)
            # One rank after the other, since the chief's link is the bottleneck anyway.
            states = [
                state | send_arrays(memory, rank, self.comm, self.is_chief)
                for rank, state in enumerate(states)
            ]
        sharded = model_state.sharded_variables(self.model)
        try:
            whole_values = self.comm.gather_parts(sharded, self.run.folder)
        except StorageError as error:
            # Raised on all ranks: the chief has no room for a whole table.
            if self.is_chief:
                self.writer.fail(error)
        else:
            if self.is_chief:
                self._submit(states, whole_values, metrics)
        self._last_saved_at = time.monotonic()
        self.report.goodput.seconds["checkpoints"] += self._last_saved_at - began

    def _submit(
        self, states: list[store.Arrays], whole_values: store.Arrays, metrics: dict[str, float]
    ) -> None:
        # An interrupted or rebalanced run continues; one that a user's callback has stopped is complete.
        is_unfinished = self.report.stopped_by or self.report.rebalanced
        ended = self.model.stop_training and not is_unfinished
        validated = self.validation.latest if self.validation.latest_step == self.step else {}
        # Without that validation, val_* are results of an earlier step.
        others = {
            name: float(value)
            for name, value in metrics.items()
            if validated or not name.startswith("val_")
        }
        saved = self.checkpoint(states, whole_values, metrics=validated | others, ended=ended)
        self.writer.submit(saved.step, saved.arrays, saved.meta)

    def _nonfinite_weights_error(self) -> TrainingError | None:
        """Returns an error if a weight is not finite, since a resume would continue with it. Not collective.

        A check of gradients is not enough: a step on finite ones can overflow, and strategy=single does not check them.
        """
        weights = [variable.value for variable in self.model.trainable_variables]
        if not self.run.config.guard.finite or are_finite(weights):
            return None
        return TrainingError(
            f"weights are not finite after step {self.step:,}, so no checkpoint of it is written; "
            f"{NOT_FINITE_ADVICE}{layer_hint(self.strategy)}"
        )


class MemoryCommit(_Saving):
    """Commits the state of an elastic job to every rank's memory (every rank).

    Commits after every membership.commit_steps steps and after each epoch. Ranks may then join or leave;
    the next attempt continues from the commit, so no step is lost. Put this callback last.
    """

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        # The end of an epoch is left to on_epoch_end, after the other callbacks' work.
        commit_steps = self.strategy.membership.commit_steps
        if self.position.is_multiple_of(commit_steps) and self.position.in_epoch:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        if not self.position.in_epoch:
            self._commit()

    def _commit(self) -> None:
        if self.model.stop_training:
            return  # All ranks stop, and save a checkpoint.
        self.weights.average_untrained()
        rank_states = self.comm.gather(model_state.rank_state(self.model))
        # The chief alone has callbacks such as ModelCheckpoint. If it is lost, the next chief needs their
        # numbers: otherwise a worse model would count as the best.
        numbers = self.comm.broadcast(self.callback_state.numbers())
        self.run.state.checkpoint = self.checkpoint(rank_states, {}, callbacks=numbers)
        if not self.position.is_last:
            self.strategy.membership.check()
