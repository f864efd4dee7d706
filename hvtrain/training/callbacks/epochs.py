"""Callbacks that measure epochs: metrics over all ranks, validation, speed, and rows of history.csv and ranks.csv."""

import logging
import time
from typing import Any

from hvtrain.core.step_plan import share_of_progress
from hvtrain.errors import ConfigError, StorageError
from hvtrain.keras.noise_scale import NoiseScale, noise_scale
from hvtrain.keras.optimizer import gradient_norm
from hvtrain.models.rates import averaged_weights
from hvtrain.step.step_timing import FEW_STEPS, Split, StepTimes, seconds_per_step, slowdown_cause
from hvtrain.system.run_files import EpochRecord, history_table, note_step, ranks_table
from hvtrain.training.callbacks.run_context import Logs, RunCallback, RunContext, RunReport
from hvtrain.training.run import Run, Start

log = logging.getLogger(__name__)

# In the first steps ranks trace, compile, fill the data pipeline, and wait for each other to do so.
WARMUP_STEPS = 10
SECONDS_BETWEEN_NOTES = 1.0


class EpochMetrics(RunCallback):
    """Puts the training metrics of the whole epoch, over all ranks, into its logs (every rank).

    Args:
        context: The run's context.
        start: Where the run begins or resumes. If it resumes within an epoch, the model's metrics must be
            built.
    """

    def __init__(self, context: RunContext, start: Start) -> None:
        super().__init__(context)
        # Sorted by number, which is the order of model.metrics_variables.
        self._resumed = [
            value
            for name, value in sorted(start.rank_state.items())
            if name.startswith("metric/") and self.position.in_epoch
        ]

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        # Not earlier, since Keras resets the metrics just before this call.
        for variable, value in zip(self.model.metrics_variables, self._resumed):
            variable.assign(value)
        self._resumed = []

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        metrics = self.strategy.metrics_over_ranks(self.model)
        # A user's own train_step may leave out some of Keras's metrics, such as a loss that it never computes.
        left_out = metrics.keys() - logs.keys()
        for name, value in self.run.task.results(metrics).items():
            if name not in left_out:
                logs[name] = value


class SameLogs(RunCallback):
    """Replaces an epoch's logs with the chief's (every rank).

    Callbacks after it then make the same decisions on all ranks.
    """

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        logs.update(self.comm.broadcast({name: float(value) for name, value in logs.items()}))


class Validation(RunCallback):
    """Evaluates every N epochs, every N steps, or both (every rank).

    Only epochs with an evaluation have val_* in their logs: EarlyStopping, for example, would take a
    repeated value for a lack of improvement.

    Args:
        context: The run's context.
        start: Where the run begins or resumes; holds the results that were unlogged then.

    Attributes:
        dataset: This rank's shard; None: nothing is validated.
        latest: The newest results, for callbacks that act within an epoch; empty before the first.
        latest_step: The step of these results; -1 before the first.
        unlogged: Results that no epoch's logs contain yet.
    """

    def __init__(self, context: RunContext, start: Start) -> None:
        super().__init__(context)
        self.config = self.run.config.train
        self.dataset = self.run.evaluation_data("validation")
        self.latest: dict[str, float] = {}
        self.latest_step = -1
        self.unlogged = start.unlogged

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        is_due = self.position.is_multiple_of(self.config.validate_every_steps)
        if self.dataset is not None and is_due:
            self._validate()
            results = ", ".join(f"{name} {value:.4f}" for name, value in self.latest.items())
            log.info(f"step {self.step:,}: {results}")

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self.dataset is None or self.position.in_epoch:
            return  # Stopped within the epoch.
        every = self.config.validate_every_epochs
        is_due = every and ((epoch + 1) % every == 0 or self.position.is_last)
        # validate_every_steps may already have validated after this step.
        if is_due and self.latest_step != self.step:
            self._validate()

        logs.update(self.unlogged)
        self.unlogged = {}

    def _validate(self) -> None:
        self.weights.average_untrained()  # Otherwise each rank would validate a different model.
        with averaged_weights(self.model, self.config.ema):
            results = self.run.task.results(self.strategy.evaluate(self.model, self.dataset))
        self.latest = {f"val_{name}": value for name, value in results.items()}
        self.unlogged = self.latest
        self.latest_step = self.step


class Throughput(RunCallback):
    """Times the steps, puts examples/s into the logs, and splits the time of a step (every rank).

    Steps are timed from Keras's batch begin to its batch end. This includes waiting for data, compute
    and reduction, but not validation, checkpoints and other callbacks. The split covers the steps after
    the warm-up.

    Attributes:
        epoch_seconds: The time of the last epoch, including the callbacks within it but not those
            at its end.
        rank_seconds: Each rank's seconds of own work per step in that epoch; empty if steps are not timed.
        newest_times: Each rank's times per step since the warm-up or the start of that epoch, whichever
            came later; empty if steps are not timed.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        plan = self.plan
        start_step = self.position.start_step
        self.rank_seconds: list[float] = []
        self.newest_times: list[StepTimes] = []

        self._examples_per_step = plan.examples_per_epoch / plan.steps_per_epoch
        # At most half of a short run is warm-up, so that there are steps to time.
        self._last_warmup_step = start_step + min(WARMUP_STEPS, (plan.num_steps - start_step) // 2)

        self._last_step = start_step
        self._noted_at = 0.0
        self._steps = 0
        self._seconds = 0.0
        self._times_after_warmup: StepTimes | None = None
        # The times up to which goodput has counted: the end of the first step, then of each epoch.
        self._times_counted: StepTimes | None = None
        # The ranks' times in the fastest epoch, and in the slow epoch that was logged last; empty if steps
        # are fast.
        self._fastest: list[StepTimes] = []
        self._reported_slow: list[StepTimes] = []

    @property
    def epoch_examples_per_second(self) -> float:
        """Examples per second over the steps of the epoch so far, including the warm-up."""
        # Before the first step of an epoch there are no steps and no seconds.
        return self._examples_per_step * self._epoch_steps / max(self._epoch_step_seconds, 1e-9)

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self._epoch_began = time.perf_counter()
        self._epoch_steps = 0
        self._epoch_step_seconds = 0.0
        self._times_at_epoch_begin = self.strategy.marks.times()

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        self._batch_began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        now = time.perf_counter()
        seconds = now - self._batch_began
        # A call of the graph may have done several steps.
        steps_before = self._last_step
        steps = self.step - steps_before
        self._last_step = self.step
        self._epoch_step_seconds += seconds
        self._epoch_steps += steps
        logs["examples/s"] = self.epoch_examples_per_second

        # A call that began within the warm-up does not count, unless there is no other.
        is_only_call = self.position.is_last and not self._steps
        if steps_before >= self._last_warmup_step or is_only_call:
            self._seconds += seconds
            self._steps += steps
        if self._times_after_warmup is None and self.step >= self._last_warmup_step:
            self._times_after_warmup = self.strategy.marks.times()

        goodput = self.report.goodput
        if self._times_counted:
            goodput.seconds["steps"] += seconds
        else:
            # The first step, which traces the graph, and everything before it.
            goodput.seconds["start"] += time.time() - goodput.start_began
            self._times_counted = self.strategy.marks.times()
        if now - self._noted_at >= SECONDS_BETWEEN_NOTES:
            self._noted_at = now
            self._count_waits()
            if self.is_chief:
                note_step(self.run.folder)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self.epoch_seconds = time.perf_counter() - self._epoch_began
        logs["examples/s"] = self.epoch_examples_per_second
        if self._steps:
            self.report.step_seconds = self._seconds / self._steps
            self.report.examples_per_second = self._examples_per_step * self._steps / self._seconds
        if self.strategy.marks.timed:  # The same on all ranks, so all of them gather.
            times = self.strategy.marks.times()
            self._split_time(times)
            self._log_slowdown(epoch)
            self._count_waits()

    def _count_waits(self) -> None:
        """Moves the time in which steps waited for data from goodput's "steps" to its "data".

        Also called within an epoch, whose end a killed process does not reach.
        """
        if not (self.strategy.marks.timed and self._times_counted):
            return
        times = self.strategy.marks.times()
        waited = (times - self._times_counted).data
        self.report.goodput.seconds["steps"] -= waited
        self.report.goodput.seconds["data"] += waited
        self._times_counted = times

    def _split_time(self, times: StepTimes) -> None:
        """Sets rank_seconds, newest_times and report.split from the times of all ranks (every rank)."""
        topology = self.comm.topology
        in_epoch = times - self._times_at_epoch_begin
        after_warmup = times - (self._times_after_warmup or times)
        # The span with fewer steps began later.
        newest = min(after_warmup, in_epoch, key=lambda span: span.steps)
        own = (after_warmup.mean(), topology.host), in_epoch.mean().own_work, newest.mean()
        times_and_hosts, own_work, newest_times = zip(*self.comm.gather(own))
        self.rank_seconds = list(own_work)
        if after_warmup.steps > 0:
            self.newest_times = list(newest_times)
            has_one_replica_per_rank = self.strategy.num_computing == topology.size
            sees_exchange = has_one_replica_per_rank or self.strategy.cuts_batches
            steps_in_a_row = min(round(after_warmup.steps), self.plan.steps_per_epoch)
            self.report.split = Split.of(times_and_hosts, steps_in_a_row, sees_exchange)

    def _log_slowdown(self, epoch: int) -> None:
        """Logs what has made steps slower than in the fastest epoch, and again only if they become slower still."""
        times = self.newest_times
        # With few steps, the wait in the first one, after the pause between epochs, weighs too much.
        has_few_steps = self.plan.steps_per_epoch < FEW_STEPS or self.position.in_epoch
        if len(times) < 2 or has_few_steps:
            return
        self._fastest = min(self._fastest or times, times, key=seconds_per_step)
        text = slowdown_cause(self._fastest, times, self.strategy.devices)
        if not text:
            self._reported_slow = []
        elif slowdown_cause(self._reported_slow or self._fastest, times, self.strategy.devices):
            self._reported_slow = times
            if self.is_chief:
                log.info("slower         epoch %d: %s", epoch + 1, text)


class GradientNoise(RunCallback):
    """Puts the gradient noise scale, in examples, into an epoch's logs (every rank).

    An epoch that is too short or too noisy for an estimate has no value.

    Raises:
        ConfigError: The noise scale cannot be measured with this optimizer.
    """

    latest: float | None = None

    def on_train_begin(self, logs: Any) -> None:
        try:
            # Before a step is traced, because the graph itself measures the gradients.
            self._noise = NoiseScale(
                self.model.optimizer, self.run.config.profile.noise_scale_every
            )
        except ValueError as error:
            raise ConfigError(f"profile.noise_scale_every: {error}; leave it out") from error

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        plan = self.plan
        batch_sizes = [size * plan.accumulate for size in plan.batch_sizes]
        scale = noise_scale(self.comm.gather(self._noise.norms()), batch_sizes)
        if scale is not None:
            logs["noise_scale"] = scale
            self.latest = scale

    def on_train_end(self, logs: Any) -> None:
        if self.latest:
            plan = self.plan
            joint_batch = plan.global_batch * plan.accumulate
            share = share_of_progress(self.latest, joint_batch / plan.size, joint_batch)
            log.info(
                f"gradient noise scale: {self.latest:,.0f} examples; an example in the joint batch of {joint_batch:,} "
                f"makes {share:.0%} of the progress of one in a rank's batch"
            )


class Recording(RunCallback):
    """Adds a row to history.csv and ranks.csv after each epoch.

    Every rank takes part, the chief writes, and all ranks raise its error. The first row after a start
    rewrites the files, since a resumed run keeps only the rows before its start. If writing fails and
    checkpoint.on_error=warn, training continues without the row, and the next epoch tries again.
    """

    def __init__(self, context: RunContext, throughput: Throughput) -> None:
        super().__init__(context)
        self._throughput = throughput
        self._history = history_table(self.run.folder)
        self._ranks = ranks_table(self.run.folder)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self.position.in_epoch:
            return  # Stopped within the epoch; the start that finishes it writes the row.
        metrics = {name: float(value) for name, value in logs.items() if name != "examples/s"}
        # ReduceLROnPlateau logs this epoch's rate, and may have changed the optimizer's since.
        rate = metrics.pop("learning_rate", float(self.model.optimizer.learning_rate))

        # Added here and not to the logs, since the console would show them.
        norm = gradient_norm(self.model.optimizer)
        if norm is not None:
            metrics["gradient_norm"] = float(f"{norm:.6g}")
        for name, value in self.report.flops(self._throughput.epoch_examples_per_second).items():
            metrics[name] = float(f"{value:.4g}")
        record = EpochRecord(
            epoch=epoch + 1,
            step=self.step,
            learning_rate=float(f"{rate:.7g}"),  # The precision of float32.
            seconds=round(self._throughput.epoch_seconds, 3),
            examples_per_second=round(self._throughput.epoch_examples_per_second, 1),
            metrics=metrics,
        )

        self.report.records.append(record)
        if self._throughput.rank_seconds:
            self.report.rank_seconds[epoch + 1] = self._throughput.rank_seconds
        self.comm.on_chief(self._write)

    def _write(self) -> None:
        try:
            self._history.save(self.report.records)
            if self.report.rank_seconds:
                self._ranks.save(list(self.report.rank_seconds.items()))
        except StorageError as error:
            if self.run.config.checkpoint.on_error == "stop":
                raise
            log.warning("%s; training continues (checkpoint.on_error=warn)", error)


def report_skipped(run: Run, report: RunReport) -> None:
    """Logs the examples left out since the last call, and adds them to the report (every rank).

    Their names go to the log of the rank that failed to read them, and their number so far goes to
    the console.
    """
    if not run.source.skips:
        return

    own = run.source.unreadable()
    for part in own:
        log.warning("rank %d skips %s: %s", run.topology.rank, part.location, part.problem)
    new = [part for parts in run.strategy.comm.gather(own) for part in parts]
    report.unreadable.update({part.location: part for part in new})

    if new:
        files = sum(part.num_examples is None for part in report.unreadable.values())
        rest = f", and the rest of {files} damaged file(s)" if files else ""
        log.info(
            f"skipped {report.num_skipped:,} example(s) that could not be read{rest}; "
            "their names are in logs/ of the run folder"
        )
