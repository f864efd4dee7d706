"""Expected delay of the slowest of n ranks against the mean. Pure.

Ranks that reduce together wait for the slowest in every step. If step times are normal with a relative deviation d,
the step takes 1 + d E(n) times the mean, where E(n) is the expected maximum of n standard normal numbers (David and
Nagaraja 2003, "Order Statistics", chapter 3), which grows like sqrt(2 ln n). The heavier tail that Chen et al. (2016,
"Revisiting Distributed Synchronous SGD", arXiv:1604.00981) measured on real clusters is not modelled.
"""

from functools import lru_cache
from statistics import NormalDist

_STANDARD = NormalDist()
_END, _STEPS = 8.0, 800  # Normal numbers beyond 8 deviations are negligible.


@lru_cache(maxsize=1024)
def expected_maximum(number: int) -> float:
    """Expected maximum of independent standard normal numbers, by the midpoint rule over its distribution.

    >>> [round(expected_maximum(number), 4) for number in (1, 2, 10, 100)]  # 2: 1 / sqrt(pi)
    [0.0, 0.5642, 1.5388, 2.5076]
    """
    width = 2 * _END / _STEPS
    below = [_STANDARD.cdf(-_END + width * (index + 0.5)) ** number for index in range(_STEPS)]
    return _END - width * sum(below)


def slowdown(num_ranks: int, deviation: float) -> float:
    """Expected step time of the slowest of num_ranks ranks, relative to the mean.

    >>> round(slowdown(512, 0.03), 3)
    1.091
    """
    return 1 + deviation * expected_maximum(num_ranks)
