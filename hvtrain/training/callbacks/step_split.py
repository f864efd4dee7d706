"""What a step's time goes to: data, compute and communication, and which rank the others wait for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import keras

from hvtrain.step_timing import StepTimes
from hvtrain.strategies.base import Strategy
from hvtrain.training.callbacks.throughput import Throughput

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """A step, in seconds: means over the ranks. The slowest rank is the one with most work of its own a step.

    efficiency: the speed over what it would be if the other ranks' gradients cost nothing and came at once.
    """

    data_seconds: float
    compute_seconds: float
    communication_seconds: float
    efficiency: float
    slowest_rank: int
    slowest_host: str
    slowest_seconds: float
    median_seconds: float

    @classmethod
    def of(cls, ranks: list[tuple[StepTimes, str]]) -> Split:
        """From what each rank's step took, and its host.

        >>> Split.of([(StepTimes(1, 0.0, 0.03, 0.02), "s1"), (StepTimes(1, 0.01, 0.04, 0.0), "s2")]).efficiency
        0.8
        """
        work = [times.own_work for times, _ in ranks]
        slowest = max(range(len(ranks)), key=lambda rank: work[rank])
        whole = mean(times.whole for times, _ in ranks)
        return cls(
            data_seconds=mean(times.data for times, _ in ranks),
            compute_seconds=mean(times.compute for times, _ in ranks),
            communication_seconds=mean(times.communication for times, _ in ranks),
            efficiency=round(mean(work) / whole, 4) if whole else 1.0,
            slowest_rank=slowest,
            slowest_host=ranks[slowest][1],
            slowest_seconds=work[slowest],
            median_seconds=median(work),
        )

    def in_words(self, num_ranks: int) -> str:
        """One line."""
        parts = {"data": self.data_seconds, "compute": self.compute_seconds}
        if num_ranks > 1:
            parts["communication"] = self.communication_seconds
        text = f"a step: {', '.join(f'{name} {1000 * seconds:.2f} ms' for name, seconds in parts.items())}"
        if num_ranks == 1:
            return text
        return (
            f"{text}; efficiency {self.efficiency:.0%}; slowest rank {self.slowest_rank} on {self.slowest_host} "
            f"({1000 * self.slowest_seconds:.2f} ms of its own, median {1000 * self.median_seconds:.2f})"
        )


class StepSplit(keras.callbacks.Callback):
    """Of the steps after the warm-up, which Throughput leaves out too. Says it after the first epoch (every rank)."""

    def __init__(self, strategy: Strategy, throughput: Throughput) -> None:
        super().__init__()
        self.strategy = strategy
        self.throughput = throughput
        self.split: Split | None = None
        self._begin: StepTimes | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._begin is None and self.throughput.is_warm:
            self._begin = self.strategy.marks.times()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        times = self.strategy.marks.times()
        if self._begin is None or times.steps == self._begin.steps or not self.strategy.marks.timed:
            return  # So it is on all ranks.
        is_first = self.split is None
        mine = ((times - self._begin).each(), self.strategy.topology.host)
        self.split = Split.of(self.strategy.comm.gather(mine))
        if is_first and self.strategy.topology.size > 1:
            log.info("%s", self.split.in_words(self.strategy.topology.size))
