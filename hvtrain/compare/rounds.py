"""Rounds of measurements taken in turns, and the ratios between them.

A shared machine can be slower for minutes at a time. So contenders take turns, and only runs of the same round are
compared.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import TypeVar

T = TypeVar("T")


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
        sure = "" if self.coverage >= 0.95 else f", {self.coverage:.0%} sure"
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}{sure}]"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """ours[i] / theirs[i] over the rounds i, with the interval of order statistics (no distribution is assumed)."""
    found = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    number, cut = len(found), 0
    while cut + 1 < number / 2 and _coverage(number, cut + 1) >= 0.95:
        cut += 1
    return Ratio(median(found), found[cut], found[number - 1 - cut], _coverage(number, cut))


def _coverage(number: int, cut: int) -> float:
    """Probability that the true median lies between the sorted values `cut` and `number - 1 - cut` (from 0)."""
    return 1 - 2 * sum(comb(number, k) for k in range(cut + 1)) / 2**number


def in_turns(items: Sequence[T], num_rounds: int) -> Iterator[tuple[int, list[T]]]:
    """Yields each round's number, from 1, and its order; every second round goes backwards.

    >>> list(in_turns("ab", 3))
    [(1, ['a', 'b']), (2, ['b', 'a']), (3, ['a', 'b'])]
    """
    for number in range(1, num_rounds + 1):
        yield number, list(items if number % 2 else reversed(items))


def progress(text: str) -> None:
    """Shows what is running, on a terminal only, until the next call; "" clears the line."""
    if sys.stderr.isatty():
        # A line that wraps could not be cleared.
        sys.stderr.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()
