"""Speed of a run: examples per second, and a step's time split by data, compute, communication."""

import time
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from hvtrain.step.step_timing import StepTimes
from hvtrain.training.callbacks.run_context import RunCallback, RunContext

# The first steps trace and compile, fill the data pipeline and wait for the other ranks' first
# steps.
WARMUP_STEPS = 10


@dataclass(frozen=True)
class Split:
    """The time of a step by purpose, and the slowest rank.

    Args:
        data_seconds: Wait for a batch, mean over the ranks.
        compute_seconds: Forward, backward and update, mean over the ranks.
        communication_seconds: Reduction and the wait for slower ranks, mean over the ranks. None
            where one process leads replicas or workers, whose exchange it does not see.
        efficiency: Speed relative to a run whose reductions take no time; None as above.
        slowest_rank: The rank with the most work of its own in a step.
        slowest_host: Its host.
        slowest_seconds: Its own work in a step.
        median_seconds: The median of the ranks' own work.
    """

    data_seconds: float
    compute_seconds: float
    communication_seconds: float | None
    efficiency: float | None
    slowest_rank: int
    slowest_host: str
    slowest_seconds: float
    median_seconds: float

    @classmethod
    def of(cls, ranks: list[tuple[StepTimes, str]], sees_exchange: bool = True) -> "Split":
        """Combines the step times and hosts of all ranks."""
        work = [times.own_work for times, _ in ranks]
        # The rank with the most work of its own: a rank that waits for others takes as long as they
        # do.
        slowest = max(range(len(ranks)), key=lambda rank: work[rank])
        whole = mean(times.whole for times, _ in ranks)

        communication = None
        efficiency = None
        if sees_exchange:
            communication = mean(times.communication for times, _ in ranks)
            efficiency = round(mean(work) / whole, 4) if whole else 1.0

        return cls(
            data_seconds=mean(times.data for times, _ in ranks),
            compute_seconds=mean(times.compute for times, _ in ranks),
            communication_seconds=communication,
            efficiency=efficiency,
            slowest_rank=slowest,
            slowest_host=ranks[slowest][1],
            slowest_seconds=work[slowest],
            median_seconds=median(work),
        )

    def in_words(self, num_ranks: int) -> str:
        """The split in one line."""
        parts = {"data": self.data_seconds, "compute": self.compute_seconds}
        ending = ""
        if num_ranks > 1 and self.communication_seconds is not None:
            parts["communication"] = self.communication_seconds
            ending = (
                f" (efficiency {self.efficiency:.0%}); slowest: rank {self.slowest_rank} on {self.slowest_host}, "
                f"{1000 * self.slowest_seconds:.2f} ms without communication"
            )
        terms = ", ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in parts.items())
        return f"a step: {1000 * sum(parts.values()):.2f} ms = {terms}{ending}"


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
