"""The machine of a forecast: links from given figures, or fitted to measurements of bench allreduce."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from hvtrain.errors import ConfigError
from hvtrain.plan.costs.algorithms import Link, Machine, allreduce_seconds


@dataclass(frozen=True)
class Measured:
    """One measured all-reduce."""

    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The best fit, and its mean absolute relative error.

    latency_seconds is None if all measurements have the same number of ranks: then it is part of start_seconds.
    """

    start_seconds: float
    latency_seconds: float | None
    bytes_per_second: float
    error: float


def fit(found: Sequence[Measured]) -> Fit:
    """Fits start + 2 (n - 1) alpha + 2 (n - 1) / n x bytes / beta: a ring on one kind of link.

    The sum of squared relative errors is minimised, so that small messages count as much as large ones. Raises
    ConfigError if there are not two sizes, or larger messages do not take longer.

    >>> ring = [Measured(n, m, 1e-3 + 2 * (n - 1) * (1e-5 + m / n / 1e9)) for n in (2, 4) for m in (4, 10**6, 10**8)]
    >>> found = fit(ring)
    >>> round(found.start_seconds, 6), round(found.latency_seconds, 8), round(found.bytes_per_second)
    (0.001, 1e-05, 1000000000)
    >>> fit(ring[:3]).latency_seconds is None, round(fit(ring[:3]).start_seconds, 5)
    (True, 0.00102)
    """
    ranks = np.array([one.num_ranks for one in found])
    if len({one.num_bytes for one in found}) < 2 or ranks.min() < 2:
        fix = "needed are two sizes or more, on 2 ranks or more: run python -m hvtrain allreduce"
        raise ConfigError(f"{len(found)} measured allreduces cannot give latency and bandwidth; {fix}")
    sizes, seconds = (np.array([getattr(one, name) for one in found], float) for name in ("num_bytes", "seconds"))
    # Relative to what was measured: terms x (start, alpha, 1 / beta) = 1.
    terms = np.stack([np.ones(len(found)), 2.0 * (ranks - 1), 2 * (1 - 1 / ranks) * sizes], axis=1) / seconds[:, None]
    columns = [0, 1, 2] if len(set(ranks)) > 1 else [0, 2]
    best = _least_squares(terms, columns)
    if 1 in columns and min(best[:2]) < 0:  # One of the two is zero: whichever fits better without the other.
        best = min((_least_squares(terms, [kept, 2]) for kept in (0, 1)), key=lambda factors: _error(terms, factors))
    start, latency, inverse = best.clip(0).tolist()
    if inverse <= 0:
        raise ConfigError("the measured allreduces take no longer for larger messages; measure more rounds and sizes")
    return Fit(start, latency if 1 in columns else None, 1 / inverse, _error(terms, best))


def _least_squares(terms: np.ndarray, columns: list[int]) -> np.ndarray:
    """The factors with which the columns of terms come nearest to 1; 0 for other columns."""
    scales, factors = terms[:, columns].max(axis=0), np.zeros(3)
    factors[columns] = np.linalg.lstsq(terms[:, columns] / scales, np.ones(len(terms)), rcond=None)[0] / scales
    return factors


def _error(terms: np.ndarray, factors: np.ndarray) -> float:
    return float(abs(terms @ factors.clip(0) - 1).mean())


def corrected(machine: Machine, found: Sequence[Measured], algorithms: Sequence[str]) -> Machine:
    """The machine with corrections, so that all-reduces of the measured sizes take the measured times.

    If several numbers of ranks were measured, a size has the geometric mean of their corrections.

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


def machine_of(
    options: argparse.Namespace, files: Sequence[Sequence[Measured]], algorithms: Sequence[str]
) -> tuple[Machine, list[str]]:
    """The machine that the options describe, and a line for each link in use.

    Measurements replace the link that they were taken on: files holds the result of `read` for each file. algorithms
    are names in costs.algorithms. Raises ConfigError if a file cannot be fitted.
    """
    per_host = options.ranks_per_host
    inside = Link(options.inside_latency_us * 1e-6, options.inside_gbytes * 1e9 * options.link_share)
    between = Link(options.latency_us * 1e-6, options.link_gbits / 8 * 1e9 * options.link_share)
    share = f"{options.link_share:.1%} of the speed is used"
    said = {
        "inside": f"{options.inside_gbytes:g} GB/s, {options.inside_latency_us:.3g} us; {share}",
        "between": f"{options.link_gbits:g} Gbit/s, {options.latency_us:.3g} us; {share}",
    }
    machine = Machine(inside, between, per_host)
    groups: dict[str, list[Measured]] = {}
    for measured in files:
        groups.setdefault(machine.slowest(measured[0].num_ranks), []).extend(measured)
    for name, measured in groups.items():
        found = fit(measured)
        latency_seconds = found.latency_seconds
        if latency_seconds is None:
            latency_seconds = getattr(machine, name).latency_seconds
            # The fitted start includes the latency of the steps.
            in_steps = 2 * (measured[0].num_ranks - 1) * latency_seconds
            found = replace(found, start_seconds=max(0.0, found.start_seconds - in_steps))
        start_seconds = max(machine.start_seconds, found.start_seconds)
        changes: dict[str, Any] = {name: Link(latency_seconds, found.bytes_per_second), "start_seconds": start_seconds}
        machine = replace(machine, **changes)
        ranks = ", ".join(map(str, sorted({one.num_ranks for one in measured})))
        latency = "" if found.latency_seconds is None else f", {1e6 * latency_seconds:.3g} us a step"
        said[name] = f"{found.bytes_per_second / 1e9:.3g} GB/s{latency}, {1e6 * found.start_seconds:,.0f} us to start; "
        said[name] += f"measured on {ranks} ranks, the fit is {found.error:.0%} off, and corrected by size"
    for measured in groups.values():
        machine = corrected(machine, measured, algorithms)
    slowest = machine.slowest(options.np)
    used = ("inside", "between") if slowest == "between" and per_host > 1 else (slowest,)
    labels = {"inside": "inside a host", "between": "between hosts"}
    return machine, [f"{labels[name]}: {said[name]}" for name in used]


def read(path: Path) -> list[Measured]:
    """Reads the median of each size from a file of bench allreduce. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        num_ranks, seconds = int(content["num_ranks"]), content["seconds"]["hvtrain"]
        return [Measured(num_ranks, int(size), median(rounds)) for size, rounds in seconds.items() if size.isdigit()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"is not what bench allreduce writes ({type(error).__name__}: {error})"
        what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else what
        advice = "give the allreduce.json of python -m hvtrain allreduce"
        raise ConfigError(f"--calibrate {path} {what}; {advice}") from None
