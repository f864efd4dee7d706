"""A link from measured allreduces: the alpha, beta and start by least squares. Pure.

What is minimised is the sum of squared relative errors, so that small messages count as much as large ones do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from statistics import geometric_mean
from typing import NamedTuple

from hvtrain.errors import ConfigError
from hvtrain.plan.costs.algorithms import allreduce_seconds
from hvtrain.plan.costs.links import Link, Machine


@dataclass(frozen=True)
class Measured:
    """One allreduce."""

    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """What fits best, and how far off it is: the mean relative error, without sign.

    latency_seconds is None where all was measured on one number of ranks: then it cannot be told from the start.
    """

    start_seconds: float
    latency_seconds: float | None
    bytes_per_second: float
    error: float

    def link(self, latency_seconds: float) -> Link:
        """With the latency found, or else the given one."""
        return Link(latency_seconds if self.latency_seconds is None else self.latency_seconds, self.bytes_per_second)


def fit(found: Sequence[Measured]) -> Fit:
    """start + 2 (n - 1) alpha + 2 (n - 1) / n x bytes / beta: a ring on one kind of link.

    Raises ConfigError when there are not two sizes, or larger ones do not take longer.

    >>> ring = [Measured(n, m, 1e-3 + 2 * (n - 1) * (1e-5 + m / n / 1e9)) for n in (2, 4) for m in (4, 10**6, 10**8)]
    >>> found = fit(ring)
    >>> round(found.start_seconds, 6), round(found.latency_seconds, 8), round(found.bytes_per_second)
    (0.001, 1e-05, 1000000000)
    >>> fit(ring[:3]).latency_seconds is None, round(fit(ring[:3]).start_seconds, 5)
    (True, 0.00102)
    """
    if len({one.num_bytes for one in found}) < 2 or min(one.num_ranks for one in found) < 2:
        raise ConfigError(
            f"{len(found)} measured allreduces cannot give latency and bandwidth; needed are two sizes or more, on 2 "
            "ranks or more: run python -m hvtrain.bench allreduce"
        )
    equations = [
        Equation((1.0, 2.0 * (one.num_ranks - 1), 2 * (1 - 1 / one.num_ranks) * one.num_bytes), one.seconds)
        for one in found
    ]
    columns = [0, 1, 2] if len({one.num_ranks for one in found}) > 1 else [0, 2]
    best = _least_squares(equations, columns)
    if 1 in columns and (best[0] < 0 or best[1] < 0):  # One of the two is nothing; which, says the other's fit.
        tries = [_least_squares(equations, [kept, 2]) for kept in (0, 1)]
        best = min(tries, key=lambda factors: _error(equations, [max(0.0, factor) for factor in factors]))
    start, latency, inverse = (max(0.0, factor) for factor in best)
    if inverse <= 0:
        raise ConfigError("the measured allreduces take no longer for larger messages; measure more rounds and sizes")
    error = _error(equations, [start, latency, inverse])
    return Fit(start, latency if 1 in columns else None, 1 / inverse, error)


def corrected(machine: Machine, found: Sequence[Measured], algorithms: Sequence[str]) -> Machine:
    """The machine whose allreduces take what was measured at those sizes, and between them what lies between.

    Where several numbers of ranks were measured, a size has the geometric mean of their corrections.

    >>> measured = [Measured(2, 1000, 2e-6), Measured(2, 10**6, 1.5e-3)]
    >>> real = corrected(Machine(Link(0.0, 1e9), Link(0.0, 1e9), ranks_per_host=2), measured, ["ring"])
    >>> real.inside.corrections
    ((1000, 2.0), (1000000, 1.5))
    """
    ratios: dict[int, list[float]] = {}
    for one in found:
        seconds, _ = allreduce_seconds(one.num_bytes, one.num_ranks, machine, algorithms)
        ratios.setdefault(one.num_bytes, []).append(one.seconds / seconds)
    name = machine.slowest(found[0].num_ranks)
    corrections = tuple((size, round(geometric_mean(ratios[size]), 6)) for size in sorted(ratios))
    return replace(machine, **{name: replace(getattr(machine, name), corrections=corrections)})


class Equation(NamedTuple):
    """factors x terms = seconds."""

    terms: tuple[float, float, float]
    seconds: float


def _least_squares(equations: Sequence[Equation], columns: list[int]) -> list[float]:
    """The factors of the columns, 0 for those left out."""
    rows = [[one.terms[column] / one.seconds for column in columns] for one in equations]
    scales = [max(row[index] for row in rows) for index in range(len(columns))]
    scaled = [[value / scale for value, scale in zip(row, scales)] for row in rows]
    # Each column times each column and times the right side, where a relative second is 1.
    right = [*zip(*scaled), [1.0] * len(equations)]
    solved = _solve([[sum(map(mul, column, other)) for other in right] for column in zip(*scaled)])
    found = [0.0, 0.0, 0.0]
    for column, value, scale in zip(columns, solved, scales):
        found[column] = value / scale
    return found


def _solve(table: list[list[float]]) -> list[float]:
    """Of a system of equations whose last column is the right side, by Gauss with pivots.

    >>> _solve([[2.0, 1.0, 3.0], [1.0, 3.0, 4.0]])
    [1.0, 1.0]
    """
    size = len(table)
    for step in range(size):
        pivot = max(range(step, size), key=lambda row: abs(table[row][step]))
        table[step], table[pivot] = table[pivot], table[step]
        for row in range(size):
            if row != step:
                factor = table[row][step] / table[step][step]
                table[row] = [value - factor * other for value, other in zip(table[row], table[step])]
    return [table[row][size] / table[row][row] for row in range(size)]


def _error(equations: Sequence[Equation], factors: list[float]) -> float:
    """Mean relative error without sign."""
    return sum(abs(sum(map(mul, factors, one.terms)) / one.seconds - 1) for one in equations) / len(equations)
