"""Divides the global batch among the ranks by their measured speeds (train.balance)."""

import heapq
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from hvtrain.errors import ConfigError
from hvtrain.step.step_timing import StepTimes
from hvtrain.training.callbacks.epochs import Throughput
from hvtrain.training.callbacks.run_context import RunCallback, RunContext

log = logging.getLogger(__name__)

# A step must become at least this many times as fast; a smaller gain may be noise.
MIN_SPEEDUP = 1.1
# Size of the largest batch of a rank, relative to the mean: a larger
# one might not fit into the device's memory.
MAX_BATCH_RATIO = 2


class Balance(RunCallback):
    """Ends the attempt after an epoch if other batch sizes would be faster (every rank).

    Checkpointing then writes a checkpoint with the new batch sizes, from which the next attempt
    continues. Put this callback before Checkpointing, and after the callbacks that propagate one
    rank's stop request to all ranks.

    Raises:
        ConfigError: Steps are not timed, ranks may join or leave, or the strategy's ranks need equal batches.
    """

    def __init__(self, context: RunContext, throughput: Throughput) -> None:
        super().__init__(context)
        self._throughput = throughput
        strategy = self.strategy
        obstacle = ""
        if not strategy.marks.timed:
            obstacle = "train.deterministic=true, which leaves steps untimed"
        elif strategy.membership.commit_steps:
            obstacle = "an elastic job, whose ranks change"
        elif (
            strategy.num_computing != self.run.topology.size
            or not strategy.is_plain
            or strategy.sync_every > 1
        ):
            obstacle = "a strategy whose ranks have equal batches"
        if obstacle:
            raise ConfigError(
                f"train.balance=true cannot be combined with {obstacle}; leave train.balance out"
            )

        # Another attempt costs about the time from here to the end of the first step.
        self._began = time.monotonic()
        self._first_step_seconds = 0.0

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if not self._first_step_seconds:
            self._first_step_seconds = time.monotonic() - self._began

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        position = self.position
        plan = position.plan
        times = self._throughput.newest_times
        if (
            self.model.stop_training
            or position.in_epoch
            or position.is_last
            or plan.is_resized
            or not times
        ):
            return

        old_sizes = plan.batch_sizes
        work_seconds = [rank.own_work for rank in times]
        new_sizes = balanced_sizes(old_sizes, work_seconds)
        old_seconds = max(work_seconds)
        new_seconds = max(
            new * (work / old) for new, work, old in zip(new_sizes, work_seconds, old_sizes)
        )
        saved_seconds = (old_seconds - new_seconds) * (plan.num_steps - position.step)
        # The conditions above are the same on all ranks, so all ranks reach this broadcast or none does.
        cost = self.comm.broadcast(self._first_step_seconds)
        if old_seconds < MIN_SPEEDUP * new_seconds or saved_seconds < cost:
            return

        if self.is_chief:
            log.info(
                "%s; from epoch %d on, batches are %s instead of %s, and the slowest rank's own work in a step "
                "should take %.1f ms instead of %.1f (train.balance)",
                slowest_in_words(times, old_sizes, self.strategy.devices),
                epoch + 2,
                " + ".join(map(str, new_sizes)),
                " + ".join(map(str, old_sizes)),
                1000 * new_seconds,
                1000 * old_seconds,
            )
        self.run.meta.update(batch_sizes=new_sizes, balanced=True)
        self.report.rebalanced = True
        self.model.stop_training = True


def balanced_sizes(batch_sizes: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Returns batch sizes with the same sum that let the slowest rank finish a step as early as possible.

    A rank's work is assumed to be proportional to its batch. Each batch has at least one example and
    at most MAX_BATCH_RATIO times the mean.

    Args:
        batch_sizes: Examples in a step, by rank.
        seconds: Seconds of own work in such a step, by rank.

    >>> balanced_sizes([32, 32], [0.1, 0.2])
    [43, 21]
    >>> balanced_sizes([8, 8, 8], [0.01, 0.1, 0.1])
    [16, 4, 4]
    """
    total = sum(batch_sizes)
    num_ranks = len(batch_sizes)
    largest = math.ceil(MAX_BATCH_RATIO * total / num_ranks)
    example_seconds = [work / size for work, size in zip(seconds, batch_sizes)]

    sizes = [1] * num_ranks
    # Each further example goes to the rank that would finish it first.
    ends = [(2 * cost, rank) for rank, cost in enumerate(example_seconds)]
    heapq.heapify(ends)
    for _ in range(total - num_ranks):
        _, rank = heapq.heappop(ends)
        sizes[rank] += 1
        if sizes[rank] < largest:
            heapq.heappush(ends, ((sizes[rank] + 1) * example_seconds[rank], rank))
    return sizes


def slowest_in_words(
    times: Sequence[StepTimes], batch_sizes: Sequence[int], devices: Sequence[str]
) -> str:
    """Describes how much slower the slowest rank is per example than the fastest, and the cause: data or compute.

    >>> slow, fast = StepTimes(1, 0.1, 0.3, 0), StepTimes(1, 0.1, 0.1, 0)
    >>> slowest_in_words([slow, fast, fast], [8, 8, 8], ["s1 CPU", "s2 CPU", "s3 CPU"])
    'rank 0 (s1 CPU) takes 2.0 times as long for an example as rank 1 (compute)'
    """
    per_example = [
        StepTimes(*(seconds / size for seconds in rank)) for rank, size in zip(times, batch_sizes)
    ]
    work_seconds = [rank.own_work for rank in per_example]
    slowest = work_seconds.index(max(work_seconds))
    fastest = work_seconds.index(min(work_seconds))
    ratio = work_seconds[slowest] / max(work_seconds[fastest], 1e-9)
    excess = per_example[slowest] - per_example[fastest]
    cause = "data" if excess.data > excess.compute else "compute"
    return (
        f"rank {slowest} ({devices[slowest]}) takes {ratio:.1f} times as long for an example as "
        f"rank {fastest} ({cause})"
    )
