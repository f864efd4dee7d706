"""Judges and records the batch sizes that find_batch tries: which is fastest, and whether the next one would fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from hvtrain.report.charts import BLUE, ORANGE, write_panels
from hvtrain.system.files import write_json

MIB = 2**20
# Batches with at least this share of the highest examples/s count as equally fast; the smallest is best.
FAST_ENOUGH = 0.97
# Free memory must exceed this multiple of the predicted growth: memory grows in jumps, and the
# kernel kills processes when it runs out.
MEMORY_MARGIN = 1.25


@dataclass(frozen=True)
class Trial:
    """The measurements of one batch size.

    Attributes:
        batch_size: examples of one rank in a step.
        global_batch: examples of all ranks in a step.
        step_seconds: seconds per step in the fastest call of the graph.
        memory_bytes: each rank's peak memory: that of its GPU, or of its process if it has none.
    """

    batch_size: int
    global_batch: int
    step_seconds: float
    memory_bytes: list[int]

    @property
    def examples_per_second(self) -> float:
        """Speed of all ranks together."""
        return self.global_batch / self.step_seconds

    def __str__(self) -> str:
        """Describes the trial in one line.

        >>> str(Trial(8, 16, 0.004, [3 * MIB, 2 * MIB]))
        'train.batch_size=8 (16 on all ranks): 4,000 examples/s, 4.00 ms per step, at most 3 MiB per rank'
        """
        return (
            f"train.batch_size={self.batch_size} ({self.global_batch:,} on all ranks): "
            f"{self.examples_per_second:,.0f} examples/s, {1000 * self.step_seconds:.2f} ms per step, "
            f"at most {max(self.memory_bytes) / MIB:,.0f} MiB per rank"
        )


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank and of its host.

    Attributes:
        host: name of the host.
        growth_bytes: predicted growth of the rank's memory with the next size.
        free_bytes: free memory of the host.
        resident_bytes: memory that the rank occupies now.
    """

    host: str
    growth_bytes: float
    free_bytes: int
    resident_bytes: int


def fastest(trials: Sequence[Trial]) -> Trial:
    """Returns the trial with the smallest batch that is almost as fast as the fastest.

    >>> trials = [Trial(size, size, seconds, []) for size, seconds in ((1, 0.02), (2, 0.0201), (4, 0.04), (8, 0.079))]
    >>> fastest(trials).batch_size
    2
    """
    highest = max(trial.examples_per_second for trial in trials)
    return next(trial for trial in trials if trial.examples_per_second >= FAST_ENOUGH * highest)


def predicted_peak(peaks: Sequence[tuple[int, int]], size: int, first_slope: float) -> float:
    """Predicts a rank's peak memory with batches of this size, in bytes.

    Extrapolates from the last peak with the steepest slope so far, since an allocator that reuses
    memory may hide growth for a while.

    Args:
        peaks: pairs of an earlier size and its peak in bytes, smallest first. Size 0 stands for the
            rank before its first step.
        size: the size whose peak to predict.
        first_slope: bytes per example to assume before any size has been measured.

    >>> predicted_peak([(0, 500), (1, 600), (2, 640), (4, 740)], 8, 0.0)
    940.0
    >>> predicted_peak([(0, 500)], 8, 10.0)
    580.0
    """
    # The first pair's slope includes memory that does not depend on the size, so it is used only
    # while there is no other.
    pairs = list(pairwise(peaks[1:])) or list(pairwise(peaks))
    slopes = [(peak2 - peak1) / (size2 - size1) for (size1, peak1), (size2, peak2) in pairs]
    slope = max(0.0, *slopes) if slopes else first_slope
    last_size, last_peak = peaks[-1]

    return last_peak + slope * (size - last_size)


def lacking_host(
    ranks: Sequence[RankMemory], limit_bytes: int | None = None
) -> tuple[str, float, float] | None:
    """Returns the first host that lacks memory; None if every host has enough.

    Args:
        ranks: the memory of all ranks.
        limit_bytes: memory that the ranks of a host may occupy together; None: no limit but the free memory.

    Returns:
        The host's name, the bytes that its ranks would add, and its free bytes.

    >>> ranks = [RankMemory("s1", 100.0, 260, 50), RankMemory("s1", 100.0, 250, 60)]
    >>> lacking_host(ranks), lacking_host(ranks[:1])
    (('s1', 200.0, 250), None)
    >>> lacking_host(ranks[:1], limit_bytes=170)
    ('s1', 100.0, 120)
    """
    # Ranks of one host compete for its memory, so their growth is added up.
    for host in dict.fromkeys(rank.host for rank in ranks):
        local_ranks = [rank for rank in ranks if rank.host == host]
        growth = sum(rank.growth_bytes for rank in local_ranks)
        # Ranks measure at slightly different times; the smallest value is the safe one.
        free = min(rank.free_bytes for rank in local_ranks)
        if limit_bytes is not None:
            resident = sum(rank.resident_bytes for rank in local_ranks)
            free = min(free, max(0, limit_bytes - resident))
        if MEMORY_MARGIN * growth >= free:
            return host, growth, free

    return None


def write_sizes(folder: Path, trials: Sequence[Trial], ended: str | None = None) -> None:
    """Writes batch.json with the trials so far (chief only).

    Args:
        folder: the run folder.
        trials: the trials so far, at least one.
        ended: why no other size is tried; None before the end.
    """
    sizes = [
        {**vars(trial), "examples_per_second": round(trial.examples_per_second, 1)}
        for trial in trials
    ]
    content = {
        "sizes": sizes,
        "ended": ended,
        "largest": trials[-1].batch_size,
        "fastest": fastest(trials).batch_size,
    }
    write_json(folder / "batch.json", content)


def write_png(folder: Path, trials: Sequence[Trial]) -> None:
    """Writes batch.png, which shows speed and memory by size (chief only)."""
    sizes = [trial.batch_size for trial in trials]
    speeds = [trial.examples_per_second for trial in trials]
    peaks = [max(trial.memory_bytes) / MIB for trial in trials]
    best = fastest(trials).batch_size

    def draw(axes, values: Sequence[float], label: str) -> None:
        axes.plot(sizes, values, "o-", color=BLUE)
        axes.axvline(best, color=ORANGE, linestyle="--", label=f"fastest: {best}")
        axes.set(xlabel="train.batch_size", ylabel=label, ylim=(0, 1.1 * max(values)))
        # A logarithmic axis, since each size is twice the one before.
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.legend()

    draw_speed = partial(draw, values=speeds, label="examples/s of all ranks")
    draw_memory = partial(draw, values=peaks, label="peak memory of a rank in MiB")
    write_panels([("", draw_speed), ("", draw_memory)], folder / "batch.png", 1, (7, 2.5))
