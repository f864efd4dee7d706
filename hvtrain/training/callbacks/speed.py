"""Speed of a run: examples per second, and a step's time split by data, compute, communication."""

import time
from typing import Any

from hvtrain.step.step_timing import Split, StepTimes
from hvtrain.training.callbacks.run_context import RunCallback, RunContext

# The first steps trace and compile, fill the data pipeline and wait for the other ranks' first
# steps.
WARMUP_STEPS = 10


class Throughput(RunCallback):
    """Times the steps, puts examples/s into the logs, and splits the time of a step (every rank).

    Steps are timed from Keras's batch begin to its batch end: waiting for data, compute and
    reduction, but not validation, checkpoints and other callbacks. The split is of the steps after
    the warm-up, so far.

    epoch_seconds is the time of the last epoch with all callbacks; rank_seconds has the seconds of
    a step's own work in that epoch, by rank, and is empty if steps are not timed.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        plan = self.position.plan
        start_step = self.position.start_step
        self.epoch_seconds = 0.0
        self.rank_seconds: list[float] = []

        self._examples_per_step = plan.examples_per_epoch / plan.steps_per_epoch
        # A short run is half warm-up, so that it still has a speed.
        self._last_warmup_step = start_step + min(WARMUP_STEPS, (plan.num_steps - start_step) // 2)

        self._last_step = start_step
        self._batch_began = 0.0
        self._steps = 0
        self._seconds = 0.0

        self._epoch_began = 0.0
        self._epoch_steps = 0
        self._epoch_step_seconds = 0.0
        self._times_after_warmup: StepTimes | None = None
        self._times_at_epoch_begin: StepTimes | None = None

    @property
    def epoch_examples_per_second(self) -> float:
        """Examples per second over the steps of the epoch so far, warm-up included."""
        # Before the first step of an epoch both are 0.
        return self._examples_per_step * self._epoch_steps / max(self._epoch_step_seconds, 1e-9)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_began = time.perf_counter()
        self._epoch_steps = 0
        self._epoch_step_seconds = 0.0
        self._times_at_epoch_begin = self.run.strategy.marks.times()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._batch_began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        seconds = time.perf_counter() - self._batch_began
        # A call of the graph may have done several steps.
        steps = self.position.step - self._last_step
        self._last_step = self.position.step
        self._epoch_step_seconds += seconds
        self._epoch_steps += steps
        if self.position.step > self._last_warmup_step:
            self._seconds += seconds
            self._steps += steps
        if self._times_after_warmup is None and self.position.step >= self._last_warmup_step:
            self._times_after_warmup = self.run.strategy.marks.times()
        logs["examples/s"] = self.epoch_examples_per_second

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.epoch_seconds = time.perf_counter() - self._epoch_began
        logs["examples/s"] = self.epoch_examples_per_second
        if self._steps:
            self.report.step_seconds = self._seconds / self._steps
            self.report.examples_per_second = self._examples_per_step * self._steps / self._seconds
        if self.run.strategy.marks.timed:  # The same on all ranks.
            self._split_time()

    def _split_time(self) -> None:
        """Gathers the times of all ranks (every rank)."""
        topology = self.comm.topology
        times = self.run.strategy.marks.times()
        in_epoch = times - (self._times_at_epoch_begin or times)
        after_warmup = times - (self._times_after_warmup or times)
        ranks = self.comm.gather((after_warmup.each(), topology.host, in_epoch.each().own_work))
        self.rank_seconds = [own_work for *_, own_work in ranks]
        if after_warmup.steps > 0:
            sees_exchange = self.run.strategy.num_computing == topology.size
            self.report.split = Split.of([(times, host) for times, host, _ in ranks], sees_exchange)
