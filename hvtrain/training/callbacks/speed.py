"""Speed of a run: images per second, and the time of a step split into data, compute and communication."""

import time
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from hvtrain.step.step_timing import StepTimes
from hvtrain.training.callbacks.position import RunCallback

# The first steps trace and compile, fill the data pipeline and wait for the other ranks' first steps.
WARMUP_STEPS = 10


@dataclass(frozen=True)
class Split:
    """Seconds of a step: means over the ranks. The slowest rank has the most work of its own in a step.

    efficiency: the speed relative to a run whose reductions take no time. It and the time of communication are None
    where one process leads replicas or workers, whose exchange it does not see.
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
        slowest = max(range(len(ranks)), key=lambda rank: work[rank])
        whole = mean(times.whole for times, _ in ranks)
        communication = efficiency = None
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
        more = ""
        if num_ranks > 1 and self.communication_seconds is not None:
            parts["communication"] = self.communication_seconds
            more = (
                f" (efficiency {self.efficiency:.0%}); slowest: rank {self.slowest_rank} on {self.slowest_host}, "
                f"{1000 * self.slowest_seconds:.2f} ms without communication"
            )
        each = ", ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in parts.items())
        return f"a step: {1000 * sum(parts.values()):.2f} ms = {each}{more}"


class Throughput(RunCallback):
    """Times the steps, puts examples/s into the logs, and splits the time of a step (every rank).

    Steps are timed from Keras's batch begin to its batch end: waiting for data, compute and reduction, but
    not validation, checkpoints and other callbacks. The split is of the steps after the warm-up, so far.
    """

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        plan, start_step = self.position.plan, self.position.start_step
        self._examples_per_step = plan.examples_per_epoch / plan.steps_per_epoch
        self._first = start_step + min(WARMUP_STEPS, (plan.num_steps - start_step) // 2)
        self._last_step = start_step
        self._steps = self._epoch_steps = 0
        self._seconds = self._epoch_step_seconds = 0.0
        self._begin = self._epoch_begin = 0.0
        self.epoch_seconds = 0.0
        self.split: Split | None = None
        self._warm: StepTimes | None = None
        self._epoch_start: StepTimes | None = None
        self.rank_seconds: list[float] = []
        """Seconds of a step's own work in the epoch, by rank; empty if steps are not timed."""

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step after the warm-up."""
        return self._seconds / self._steps if self._steps else None

    @property
    def examples_per_second(self) -> float | None:
        return self._examples_per_step * self._steps / self._seconds if self._steps else None

    @property
    def per_second(self) -> dict[str, float]:
        """The same in what examples consist of, such as tokens, if the task says it."""
        unit, rate = self.run.task.unit(self.run.source), self.examples_per_second
        return {unit[0]: rate * unit[1]} if unit and rate else {}

    @property
    def epoch_examples_per_second(self) -> float:
        """Images per second over the steps of the epoch so far, warm-up included."""
        return self._examples_per_step * self._epoch_steps / max(self._epoch_step_seconds, 1e-9)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_begin = time.perf_counter()
        self._epoch_steps, self._epoch_step_seconds = 0, 0.0
        self._epoch_start = self.run.strategy.marks.times()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        seconds = time.perf_counter() - self._begin
        steps, self._last_step = self.position.step - self._last_step, self.position.step
        self._epoch_step_seconds += seconds
        self._epoch_steps += steps
        if self.position.step > self._first:
            self._seconds += seconds
            self._steps += steps
        if self._warm is None and self.position.step >= self._first:
            self._warm = self.run.strategy.marks.times()
        logs["examples/s"] = self.epoch_examples_per_second

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.epoch_seconds = time.perf_counter() - self._epoch_begin
        logs["examples/s"] = self.epoch_examples_per_second
        marks, topology = self.run.strategy.marks, self.comm.topology
        times = marks.times()
        if not marks.timed:
            return  # The same on all ranks.
        own = (times - (self._epoch_start or times)).each().own_work
        warm = self._warm or times
        ranks = self.comm.gather(((times - warm).each(), topology.host, own))
        self.rank_seconds = [own for *_, own in ranks]
        if times.steps > warm.steps:
            sees_exchange = self.run.strategy.num_computing == topology.size
            self.split = Split.of([(each, host) for each, host, _ in ranks], sees_exchange)
