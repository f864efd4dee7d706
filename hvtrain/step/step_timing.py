"""Counts and times the phases of this process's training steps, inside the graph.

The watchdog's thread reads the counts, and the times go into the run's record. The graph itself reads
the clock, because Python sees neither the wait for a batch nor the wait for other ranks. The marks are
set in strategies/loop.py and in the reducers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple

import tensorflow as tf

# With at least this many steps between two pauses, the wait after a pause is a small part of the total.
FEW_STEPS = 20
# Factor by which steps must have become slower; a smaller change may be noise.
LEAST_SLOWDOWN = 1.5


class StepTimes(NamedTuple):
    """Total seconds of this process's steps, by phase, and the number of steps."""

    steps: float
    # Waiting for a batch.
    data: float
    # Forward, backward and update.
    compute: float
    # From this rank's gradients being ready to all being reduced,
    # including the wait for slower ranks.
    communication: float

    def __sub__(self, other: "StepTimes") -> "StepTimes":
        return StepTimes(*(later - earlier for later, earlier in zip(self, other)))

    def mean(self) -> "StepTimes":
        """Returns the mean times of one step."""
        return StepTimes(*(total / max(self.steps, 1.0) for total in self))

    @property
    def own_work(self) -> float:
        """Seconds of data and compute: all but communication, which includes the wait for other ranks."""
        return self.data + self.compute

    @property
    def whole(self) -> float:
        """Seconds of all phases."""
        return self.own_work + self.communication


class StepCounts(NamedTuple):
    """Numbers of this process's steps that got their batch, had gradients ready, had them reduced, and ended."""

    arrived: int
    ready: int
    reduced: int
    ended: int


class StepMarks:
    """Counters and clocks of one process. The methods that set marks must be called while a graph is traced.

    In this order, `ended` marks the beginning of a step, `arrived` its batch, `ready` its gradients,
    `reduced` the reduced gradients, and the next `ended` the end of the step.
    """

    def __init__(self) -> None:
        # Set this to False if TensorFlow's operations must be
        # deterministic, which reading a clock is not.
        self.timed = True
        # True without a GPU. Marked values are then passed on only after the clock was read, since
        # a single thread might otherwise use them first. With a GPU each step would wait for the
        # host, only to make the times a few microseconds more exact.
        self.host_only = not tf.config.list_logical_devices("GPU")

        # Counts of marks, and of examples.
        self._arrived = host_variable(0, tf.int64, "mark")
        self._ready = host_variable(0, tf.int64, "mark")
        self._reduced = host_variable(0, tf.int64, "mark")
        self._examples = host_variable(0, tf.int64, "examples")
        # Of the current step: when it began, when its batch arrived, and 1 until it ends.
        self._step = host_variable([0.0, 0.0, 0.0], tf.float64, "step")
        # Over all steps: seconds of waiting for data, seconds in all, and the number of steps.
        self._totals = host_variable([0.0, 0.0, 0.0], tf.float64, "totals")
        # Seconds of communication.
        self._seconds = host_variable(0.0, tf.float64, "seconds")

    def __call__(self) -> StepCounts:
        return StepCounts(
            int(self._arrived),
            int(self._ready),
            int(self._reduced),
            int(self._totals[2]),
        )

    @property
    def num_examples(self) -> int:
        """Number of examples in all batches that arrived."""
        return int(self._examples)

    def times(self) -> StepTimes:
        """Returns the times of all steps since this object was created."""
        data, whole, steps = map(float, self._totals.numpy())
        communication = float(self._seconds)
        return StepTimes(steps, data, whole - data - communication, communication)

    def now(self, after: Any) -> tf.Tensor:
        """Returns the time in seconds; 0 if not timed.

        The clock is read once `after`, any structure of values and operations, is computed.
        """
        # Grouped on the values' own device, so that one signal goes to
        # the CPU, not one for each value.
        with tf.control_dependencies([tf.group(after)]), tf.device("/CPU:0"):
            return tf.timestamp() if self.timed else tf.zeros([], tf.float64)

    def arrived(self, data: Any, began: tf.Tensor) -> Any:
        """Marks that a step has its batch.

        Args:
            data: the batch, any structure of tensors.
            began: the time at which the step began, from `ended`.

        Returns:
            The batch to continue with.
        """
        now = self.now(data)
        with tf.control_dependencies([now]), tf.device("/CPU:0"):
            self._arrived.assign_add(1)
            self._examples.assign_add(tf.shape(tf.nest.flatten(data)[0], tf.int64)[0])
            self._step.assign([began, now, 1.0])
        return self._after(now, data)

    def ready(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Marks that this rank's gradients are ready to be reduced; returns the time."""
        now = self.now(gradients)
        with tf.control_dependencies([now]):
            self._ready.assign_add(1)
        return now

    def reduced(self, gradients: Sequence[Any], ready: tf.Tensor, last: list[Any]) -> list[Any]:
        """Marks that gradients are reduced.

        Args:
            gradients: all gradients that were reduced.
            ready: the time at which they were ready, from `ready`.
            last: those of them that are passed on only after the clock was read.

        Returns:
            `last`, to continue with.
        """
        now = self.now(gradients)
        with tf.control_dependencies([now]), tf.device("/CPU:0"):
            self._seconds.assign_add(now - ready)
            self._reduced.assign_add(1)
        return self._after(now, last)

    def ended(self, result: Any) -> tf.Tensor:
        """Marks the end of the previous step, if any, and the start of the next; returns the time.

        Args:
            result: tensors that the previous step computed.
        """
        now = self.now(result)
        with tf.control_dependencies([now]), tf.device("/CPU:0"):
            began, arrived, is_open = tf.unstack(self._step)
            # Before the first step is_open is 0, and nothing is added.
            step = tf.stack([arrived - began, now - began, 1.0])
            totals = self._totals.assign_add(is_open * step)
            closed = self._step.assign([0.0, 0.0, 0.0])
            with tf.control_dependencies([totals, closed]):
                return tf.identity(now)

    def _after(self, now: tf.Tensor, values: Any) -> Any:
        if not self.host_only:
            return values
        with tf.control_dependencies([now]):
            return tf.nest.map_structure(tf.identity, values, expand_composites=True)


def host_variable(value: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """Creates a variable on the CPU, so that reading it waits for no GPU."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.Variable(value, dtype=dtype, trainable=False, name=name)


@dataclass(frozen=True)
class Split:
    """Seconds of a step by purpose, and the slowest rank.

    Args:
        data_seconds: Waiting for a batch, mean over the ranks.
        compute_seconds: Forward, backward and update, mean over the ranks.
        communication_seconds: Reduction, and waiting for slower ranks, mean over the ranks. None
            where one process leads replicas or workers, whose exchange it does not see.
        efficiency: Speed relative to a run whose reductions take no time; None as above.
        slowest_rank: The rank with the most work of its own (all but communication).
        slowest_host: The slowest rank's host.
        slowest_seconds: The slowest rank's own work in a step.
        median_seconds: The median over the ranks of their own work in a step.
        caution: Why the efficiency is not reliable; empty if it is.
    """

    data_seconds: float
    compute_seconds: float
    communication_seconds: float | None
    efficiency: float | None
    slowest_rank: int
    slowest_host: str
    slowest_seconds: float
    median_seconds: float
    caution: str

    @classmethod
    def of(
        cls, ranks: Sequence[tuple[StepTimes, str]], steps_in_a_row: int, sees_exchange: bool
    ) -> "Split":
        """Combines the mean times of a step, and the hosts, of all ranks.

        Args:
            ranks: The times and the host of each rank.
            steps_in_a_row: Timed steps from one pause of the ranks, such as the end of an epoch, to the next.
            sees_exchange: False if this process leads replicas or workers and does not see their exchange.
        """
        work = [times.own_work for times, _ in ranks]
        # By own work, since in total a rank that waits for others takes as long as they do.
        slowest = work.index(max(work))
        whole = mean(times.whole for times, _ in ranks)

        communication = None
        efficiency = None
        caution = ""
        if sees_exchange:
            communication = mean(times.communication for times, _ in ranks)
            efficiency = round(mean(work) / whole, 4) if whole else 1.0
            if steps_in_a_row < FEW_STEPS:
                # After a pause the ranks begin at different times, and the first reduction waits
                # for the last of them.
                caution = f"too few steps in a row to judge by ({steps_in_a_row}): the first waits for slower ranks"

        return cls(
            data_seconds=mean(times.data for times, _ in ranks),
            compute_seconds=mean(times.compute for times, _ in ranks),
            communication_seconds=communication,
            efficiency=efficiency,
            slowest_rank=slowest,
            slowest_host=ranks[slowest][1],
            slowest_seconds=work[slowest],
            median_seconds=median(work),
            caution=caution,
        )

    def in_words(self, num_ranks: int) -> str:
        """Formats the split in one line."""
        parts = {"data": self.data_seconds, "compute": self.compute_seconds}
        ending = ""
        if num_ranks > 1 and self.communication_seconds is not None:
            parts["communication"] = self.communication_seconds
            ending = (
                f" (efficiency {self.efficiency:.0%}); slowest: rank {self.slowest_rank} on {self.slowest_host}, "
                f"{1000 * self.slowest_seconds:.2f} ms without communication"
            )
            if self.caution:
                ending += f"; {self.caution}"
        terms = ", ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in parts.items())
        return f"a step: {1000 * sum(parts.values()):.2f} ms = {terms}{ending}"


def seconds_per_step(times: Sequence[StepTimes]) -> float:
    """Returns the seconds of a step on the rank that takes longest, given each rank's mean times."""
    return max(rank.whole for rank in times)


def slowdown_cause(
    before: Sequence[StepTimes], now: Sequence[StepTimes], devices: Sequence[str]
) -> str:
    """Returns what has made steps slower; empty unless they take at least LEAST_SLOWDOWN times as long as before.

    Args:
        before: Each rank's mean times of a step in an earlier epoch.
        now: The same in this epoch.
        devices: Each rank's host and device.

    >>> before = [StepTimes(1, 0.001, 0.010, 0.002), StepTimes(1, 0.001, 0.009, 0.003)]
    >>> now = [StepTimes(1, 0.001, 0.010, 0.023), StepTimes(1, 0.001, 0.031, 0.002)]
    >>> slowdown_cause(before, now, ["s1 CPU", "s2 CPU"])
    'a step takes 34.0 ms instead of 13.0; rank 1 (s2 CPU) computes for 31.0 ms instead of 9.0'
    >>> now = [StepTimes(1, 0.001, 0.010, 0.030), StepTimes(1, 0.001, 0.009, 0.031)]
    >>> slowdown_cause(before, now, ["s1 CPU", "s2 CPU"])
    'a step takes 41.0 ms instead of 13.0; the network takes 30.0 ms instead of 2.0'
    """
    steps = [seconds_per_step(times) for times in (before, now)]
    if steps[1] < LEAST_SLOWDOWN * steps[0]:
        return ""
    # The rank that waits least for the others waits only for the network.
    waits = [min(rank.communication for rank in times) for times in (before, now)]
    spans = {"the network takes": waits}
    for rank, (old, new, device) in enumerate(zip(before, now, devices)):
        spans[f"rank {rank} ({device}) waits for data for"] = [old.data, new.data]
        spans[f"rank {rank} ({device}) computes for"] = [old.compute, new.compute]
    cause = max(spans, key=lambda name: spans[name][1] - spans[name][0])

    changes = {"a step takes": steps, cause: spans[cause]}
    return "; ".join(
        f"{name} {1000 * new:.1f} ms instead of {1000 * old:.1f}"
        for name, (old, new) in changes.items()
    )
