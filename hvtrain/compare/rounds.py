"""Rounds of measurements taken in turns, and the ratios between them.

A shared machine can be slower for minutes at a time. So contenders take turns, and only runs of the same round are
compared.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Any, TypeVar

from hvtrain.report.charts import INK

T = TypeVar("T")

# Probability that an interval should contain the true median.
COVERAGE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Median ratio over the rounds, and an interval that contains the true median with probability `coverage`.

    The interval is the narrowest with a coverage of at least 0.95; below 6 rounds even the widest has less.
    """

    median: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        """The median and its interval, with its coverage if that is below 95 percent.

        >>> str(Ratio(0.9, 0.8, 1.0, 0.75))
        '0.900 [0.800, 1.000, 75% sure]'
        """
        note = "" if self.coverage >= COVERAGE else f", {self.coverage:.0%} sure"
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}{note}]"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Returns the ratio of two measurements by round, with the interval of order statistics.

    No distribution is assumed: the true median lies below the k-th smallest of n ratios as often as fewer than k of n
    tosses of a coin show heads, and above the k-th largest as often.

    Args:
        numerators: of each round.
        denominators: of the same rounds.

    >>> ratio([3.0, 5.0, 4.0], [2.0, 2.0, 2.0])
    Ratio(median=2.0, low=1.5, high=2.5, coverage=0.75)
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    count = len(ratios)
    # Leaves out as many values at one end as at the other, while what is left is sure enough.
    cut = 0
    while cut + 1 < count / 2 and _coverage(count, cut + 1) >= COVERAGE:
        cut += 1

    return Ratio(median(ratios), ratios[cut], ratios[count - 1 - cut], _coverage(count, cut))


def _coverage(count: int, cut: int) -> float:
    """Probability that the true median lies between the sorted values `cut` and `count - 1 - cut` (from 0)."""
    return 1 - 2 * sum(comb(count, k) for k in range(cut + 1)) / 2**count


def in_turns(items: Sequence[T], num_rounds: int) -> Iterator[tuple[int, list[T]]]:
    """Yields each round's number, from 1, and its order; every second round goes backwards.

    A machine that becomes slower during a round thus favors each of two contenders as often as the other.

    >>> list(in_turns("ab", 3))
    [(1, ['a', 'b']), (2, ['b', 'a']), (3, ['a', 'b'])]
    """
    for number in range(1, num_rounds + 1):
        yield number, list(items if number % 2 else reversed(items))


def progress(text: str) -> None:
    """Shows what is running, on a terminal only, until the next call; "" clears the line."""
    if sys.stderr.isatty():
        # A line that wraps could not be cleared.
        columns = shutil.get_terminal_size().columns
        sys.stderr.write(f"\r\033[K{text[: columns - 1]}")
        sys.stderr.flush()


def draw_rounds(axes: Any, values: Mapping[str, Sequence[float]], colors: Sequence[str]) -> None:
    """Draws a bar with the median of each contender, the first at the top; those without values keep their row.

    Args:
        axes: Matplotlib's.
        values: of each contender, by round.
        colors: of the bars.
    """
    for row, (runs, color) in enumerate(zip(values.values(), colors)):
        if runs:
            axes.barh(row, median(runs), color=color, height=0.6)
        # The dots show how much a round differs from the others, which a median hides.
        axes.plot(runs, [row] * len(runs), "o", color=INK, markersize=3, alpha=0.7)

    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.set_axisbelow(True)
