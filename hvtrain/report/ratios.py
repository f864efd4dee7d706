"""Computes ratios between measurements of the same rounds, with their uncertainty, and draws the rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Any

from hvtrain.report.charts import INK

# Required probability that an interval contains the true median.
COVERAGE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Median ratio over the rounds, and an interval that contains the true median with probability `coverage`.

    The interval is the narrowest with a coverage of at least 0.95; with fewer than 6 rounds, even the widest has less.
    """

    median: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        """Returns the median and the interval, with the coverage if that is below 95 percent.

        >>> str(Ratio(0.9, 0.8, 1.0, 0.75))
        '0.900 [0.800, 1.000, 75% sure]'
        """
        note = "" if self.coverage >= COVERAGE else f", {self.coverage:.0%} sure"
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}{note}]"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Returns the median ratio of two measurements over the rounds, with an interval between order statistics.

    No distribution is assumed: the true median lies below the k-th smallest of n ratios as often as
    fewer than k of n tosses of a coin show heads, and above the k-th largest as often.

    Args:
        numerators: the first measurement of each round.
        denominators: the second measurement of each round.

    Raises:
        ValueError: the two differ in length.

    >>> ratio([3.0, 5.0, 4.0], [2.0, 2.0, 2.0])
    Ratio(median=2.0, low=1.5, high=2.5, coverage=0.75)
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    count = len(ratios)
    # Drop equally many values at both ends, as long as the coverage suffices.
    cut = 0
    while _coverage(count, cut + 1) >= COVERAGE:
        cut += 1

    return Ratio(median(ratios), ratios[cut], ratios[count - 1 - cut], _coverage(count, cut))


def _coverage(count: int, cut: int) -> float:
    """Returns the probability that the true median lies between the sorted ratios `cut` and `count - 1 - cut`."""
    return 1 - 2 * sum(comb(count, k) for k in range(cut + 1)) / 2**count


def draw_rounds(axes: Any, values: Mapping[str, Sequence[float]], colors: Sequence[str]) -> None:
    """Draws a bar with the median of each contender, and a dot for each round; the first contender is at the top.

    Contenders without values keep their row.

    Args:
        axes: Matplotlib axes.
        values: each contender's values, by round.
        colors: one for each bar.
    """
    for row, (runs, color) in enumerate(zip(values.values(), colors)):
        if runs:
            axes.barh(row, median(runs), color=color, height=0.6)
        # The dots show the spread of the rounds, which the median hides.
        axes.plot(runs, [row] * len(runs), "o", color=INK, markersize=3, alpha=0.7)

    axes.set_yticks(range(len(values)), list(values))
    # The first row is at the top, as in the table.
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    # Labels such as 1,250,000 would run into each other.
    axes.locator_params("x", nbins=4)
    axes.set_axisbelow(True)
