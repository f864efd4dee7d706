"""Medians and ratios of measurements that were taken in turns. Pure.

A machine that other work shares is slower for minutes at a time. So contenders take turns, and what counts is the
ratio of two that ran in the same round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median


@dataclass(frozen=True)
class Ratio:
    """The median ratio over the rounds, with the interval that holds the true median with at least 95 percent.

    coverage is what it holds it with; with fewer than 6 rounds even the widest interval holds less.
    """

    median: float
    low: float
    high: float
    coverage: float

    def verdict(self, goal: float, smaller_is_better: bool = True) -> str:
        """ "holds" or "fails" where the whole interval is on one side of the goal, else what the median says."""
        if not smaller_is_better:
            return Ratio(-self.median, -self.high, -self.low, self.coverage).verdict(-goal)
        if self.high <= goal:
            return "holds"
        if self.low > goal:
            return "fails"
        return "holds by its median" if self.median <= goal else "fails by its median"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """ours[i] / theirs[i], round by round; the interval is that of order statistics (no distribution is assumed).

    >>> ratio([2, 4, 6, 8, 10, 12, 14], [2, 2, 2, 2, 2, 2, 2])
    Ratio(median=4.0, low=1.0, high=7.0, coverage=0.984375)
    """
    found = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    number = len(found)
    cut = 0
    while cut + 1 < number / 2 and _coverage(number, cut + 1) >= 0.95:
        cut += 1
    return Ratio(median(found), found[cut], found[number - 1 - cut], _coverage(number, cut))


def _coverage(number: int, cut: int) -> float:
    """How often a median lies between the values of rank cut and number - 1 - cut (0 is the smallest)."""
    return 1 - 2 * sum(comb(number, k) for k in range(cut + 1)) / 2**number
