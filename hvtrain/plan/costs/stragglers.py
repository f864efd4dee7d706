"""How much later than the mean the last of n ranks is done. Pure.

Ranks that reduce together wait for the slowest in every step. If step times are normal with a relative deviation d,
the step takes 1 + d E(n) times the mean, where E(n) is the expected maximum of n standard normal numbers (David and
Nagaraja 2003, "Order Statistics", chapter 3), which grows like sqrt(2 ln n). Chen et al. (2016, "Revisiting Distributed
Synchronous SGD", arXiv:1604.00981) measured the tail that real clusters add to it; that is not in here.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

_STANDARD = NormalDist()
_END, _STEPS = 8.0, 800  # Beyond 8 deviations a normal number is as good as never.


@lru_cache(maxsize=1024)
def expected_maximum(number: int) -> float:
    """Of so many independent standard normal numbers, by the trapezoidal rule over its distribution function.

    >>> [round(expected_maximum(number), 4) for number in (1, 2, 10, 100)]  # 2: 1 / sqrt(pi)
    [0.0, 0.5642, 1.5388, 2.5076]
    """
    width = 2 * _END / _STEPS
    below = [_STANDARD.cdf(-_END + width * (index + 0.5)) ** number for index in range(_STEPS)]
    return _END - width * sum(below)


def slowdown(num_ranks: int, deviation: float) -> float:
    """The step of the slowest of num_ranks ranks over the mean step.

    >>> round(slowdown(512, 0.03), 3)
    1.091
    """
    return 1 + deviation * expected_maximum(num_ranks)
