"""Which batch is the largest and which the fastest, and whether a larger one would fit. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ALMOST = 0.97
"""A batch is as fast as the fastest with this part of its examples/s: the smaller one is then better."""
MARGIN = 1.25
"""How much more than predicted must be free. Memory grows in steps, and beyond its end the kernel ends processes."""


@dataclass(frozen=True)
class Trial:
    """One size: examples of a step and a rank, and what was measured. memory_bytes are peaks, by rank."""

    batch_size: int
    global_batch: int
    step_seconds: float
    memory_bytes: list[int]

    @property
    def examples_per_second(self) -> float:
        """Of all ranks."""
        return self.global_batch / self.step_seconds


@dataclass(frozen=True)
class Room:
    """What a rank would add to its memory, and what its host has left, in bytes. resident_bytes: its memory now."""

    host: str
    growth_bytes: float
    free_bytes: int
    resident_bytes: int


def fastest(trials: Sequence[Trial]) -> Trial:
    """The smallest batch that is almost as fast as the fastest.

    >>> trials = [Trial(size, size, seconds, []) for size, seconds in ((1, 0.02), (2, 0.0201), (4, 0.04), (8, 0.079))]
    >>> fastest(trials).batch_size
    2
    """
    most = max(trial.examples_per_second for trial in trials)
    return next(trial for trial in trials if trial.examples_per_second >= ALMOST * most)


def predicted_peak(peaks: Sequence[tuple[int, int]], size: int, first_slope: float) -> float:
    """Bytes of a rank with batches of that size, from pairs of the earlier sizes and their peaks, smallest first.

    The line through the last peak with the steepest slope so far; an allocator that reuses memory may hide growth for
    a while. first_slope: bytes of an example, for the first size, before which nothing was measured.

    >>> predicted_peak([(0, 500), (1, 600), (2, 640), (4, 740)], 8, 0.0)
    940.0
    >>> predicted_peak([(0, 500)], 8, 10.0)
    580.0
    """
    # To the first size it grows by what the size does not change, too: that counts only while there is nothing better.
    pairs = [*pairwise(peaks[1:])] or [*pairwise(peaks)]
    measured = [(later - before) / (size2 - size1) for (size1, before), (size2, later) in pairs]
    slope = max(0.0, *measured) if measured else first_slope
    last_size, last_peak = peaks[-1]
    return last_peak + slope * (size - last_size)


def lacking(rooms: Sequence[Room], limit_bytes: int | None = None) -> tuple[str, float, float] | None:
    """The host that has too little memory, what its ranks would need more, and what it has; None if all have enough.

    limit_bytes: what the ranks of a host may occupy together.

    >>> here = [Room("s1", 100.0, 260, 50), Room("s1", 100.0, 250, 60)]
    >>> lacking(here), lacking(here[:1])
    (('s1', 200.0, 250), None)
    >>> lacking(here[:1], limit_bytes=170)
    ('s1', 100.0, 120)
    """
    for host in dict.fromkeys(room.host for room in rooms):
        own = [room for room in rooms if room.host == host]
        growth, free = sum(room.growth_bytes for room in own), min(room.free_bytes for room in own)
        if limit_bytes is not None:
            free = min(free, max(0, limit_bytes - sum(room.resident_bytes for room in own)))
        if MARGIN * growth >= free:
            return host, growth, free
    return None
