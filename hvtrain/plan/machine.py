"""Makes the machine of a forecast: links with given figures, or fitted to measurements by `hvtrain allreduce`."""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from hvtrain.errors import ConfigError
from hvtrain.plan.algorithms import LINK_SHARE, Link, Machine, allreduce_seconds
from hvtrain.system.text import counted


@dataclass(frozen=True)
class Measured:
    """One measured all-reduce.

    Attributes:
        num_ranks: Number of ranks.
        num_bytes: Size of the tensor on each rank; for other kinds of exchange, the size of the float32
            tensor whose all-reduce sends as many bytes per rank.
        seconds: Median time.
        kind: A key of Machine.exchanges; empty for an all-reduce of float32.
    """

    num_ranks: int
    num_bytes: int
    seconds: float
    kind: str = ""


@dataclass(frozen=True)
class Fit:
    """The parameters of a ring that fit some measurements best.

    Attributes:
        start_seconds: Fixed cost of an all-reduce.
        latency_seconds: Latency of one step of the ring. None if all measurements have the same number
            of ranks; it is then part of start_seconds.
        bytes_per_second: Bandwidth of the link.
        error: Mean absolute relative error of the fit.
    """

    start_seconds: float
    latency_seconds: float | None
    bytes_per_second: float
    error: float


def fit(measurements: Sequence[Measured]) -> Fit:
    """Fits start + 2 (n - 1) alpha + 2 (n - 1) / n x bytes / beta: a ring on one kind of link.

    Minimizes the sum of squared relative errors, so that small messages count as much as large ones.

    >>> ring = [Measured(n, m, 1e-3 + 2 * (n - 1) * (1e-5 + m / n / 1e9)) for n in (2, 4) for m in (4, 10**6, 10**8)]
    >>> fitted = fit(ring)
    >>> round(fitted.start_seconds, 6), round(fitted.latency_seconds, 8), round(fitted.bytes_per_second)
    (0.001, 1e-05, 1000000000)
    >>> fit(ring[:3]).latency_seconds is None, round(fit(ring[:3]).start_seconds, 5)
    (True, 0.00102)

    Raises:
        ConfigError: There are fewer than two sizes or two ranks, or larger messages do not take longer.
    """
    from scipy.optimize import nnls  # Importing it takes half a second; only --calibrate needs it.

    rows = [(row.num_ranks, row.num_bytes, row.seconds) for row in measurements]
    ranks, sizes, seconds = np.array(rows, float).T
    if len(set(sizes)) < 2 or ranks.min() < 2:
        raise ConfigError(
            f"{counted(len(measurements), 'measured allreduce')} cannot give latency and "
            "bandwidth; this takes two sizes or more, on 2 ranks or more: run python -m hvtrain "
            "allreduce"
        )

    # Solves terms x (start, alpha, 1 / beta) = 1, where each row of terms is divided by the
    # measured time. The solution is non-negative, since no time can be negative.
    terms = (
        np.stack([np.ones(len(ranks)), 2.0 * (ranks - 1), 2 * (1 - 1 / ranks) * sizes], axis=1)
        / seconds[:, None]
    )
    has_latency = len(set(ranks)) > 1
    if not has_latency:
        terms[:, 1] = 0
    # The columns differ by many orders of magnitude (1 and bytes), so each is divided by its
    # largest value.
    scales = terms.max(axis=0).clip(min=np.finfo(float).tiny)
    factors = nnls(terms / scales, np.ones(len(terms)))[0] / scales
    error = float(abs(terms @ factors - 1).mean())

    start, latency, inverse_bandwidth = factors.tolist()
    # Noise can make the best non-negative factor 0.
    if inverse_bandwidth <= 0:
        raise ConfigError(
            "the measured allreduces take no longer for larger messages; measure more rounds and sizes"
        )
    return Fit(start, latency if has_latency else None, 1 / inverse_bandwidth, error)


def with_corrections(
    machine: Machine, measurements: Sequence[Measured], algorithms: Sequence[str]
) -> Machine:
    """Returns the machine with corrections, so that all-reduces of the measured sizes take the measured times.

    All measurements must be on the same link. If several numbers of ranks were measured, a size gets
    the geometric mean of their corrections.

    >>> measured = [Measured(2, 1000, 2e-6), Measured(2, 10**6, 1.5e-3)]
    >>> real = with_corrections(Machine(Link(0.0, 1e9), Link(0.0, 1e9), ranks_per_host=2), measured, ["ring"])
    >>> real.inside.corrections
    ((1000, 2.0), (1000000, 1.5))
    """
    ratios = defaultdict(list)
    for measurement in measurements:
        seconds, _ = allreduce_seconds(
            measurement.num_bytes, measurement.num_ranks, machine, algorithms
        )
        ratios[measurement.num_bytes].append(measurement.seconds / seconds)

    corrections = tuple((size, round(geometric_mean(ratios[size]), 6)) for size in sorted(ratios))
    name = machine.slowest_link(measurements[0].num_ranks)
    link = replace(getattr(machine, name), corrections=corrections)
    return replace(machine, **{name: link})


def machine_of(
    options: argparse.Namespace, measurements: Sequence[Measured], algorithms: Sequence[str]
) -> tuple[Machine, list[str]]:
    """Returns the machine that the options describe, and a line for each link in use.

    Measurements replace the given figures of the link on which they were taken.

    Args:
        options: The parsed command line.
        measurements: Those of all files, as `read` returns them.
        algorithms: Names in algorithms.ALGORITHMS.

    Raises:
        ConfigError: The measurements of a link cannot be fitted.
    """
    share = f"{LINK_SHARE:.1%} of the speed is used"
    machine = Machine(
        inside=Link(options.inside_latency_us * 1e-6, options.inside_gbytes * 1e9 * LINK_SHARE),
        between=Link(options.latency_us * 1e-6, options.link_gbits / 8 * 1e9 * LINK_SHARE),
        ranks_per_host=options.ranks_per_host,
    )
    descriptions = {
        "inside": f"{options.inside_gbytes:g} GB/s, {options.inside_latency_us:.3g} us; {share}",
        "between": f"{options.link_gbits:g} Gbit/s, {options.latency_us:.3g} us; {share}",
    }
    # By kind and link, since one link may have been measured with several numbers of ranks.
    groups: dict[str, dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for measurement in measurements:
        groups[measurement.kind][machine.slowest_link(measurement.num_ranks)].append(measurement)
    sums = groups.pop("", {})
    for name, group in sums.items():
        machine, descriptions[name] = _with_fit(machine, name, group)

    # After all fits, because corrections are relative to the fitted machine.
    slowest = machine.slowest_link(options.np)
    exchanges = {
        kind: with_corrections(machine, links[slowest], algorithms)
        for kind, links in groups.items()
        if slowest in links
    }
    for group in sums.values():
        machine = with_corrections(machine, group, algorithms)
    machine = replace(machine, exchanges=exchanges)
    # Links that the ranks do not use get no line.
    used = [slowest]
    if slowest == "between" and options.ranks_per_host > 1:
        used = ["inside", "between"]

    labels = {"inside": "inside a host", "between": "between hosts"}
    return machine, [f"{labels[name]}: {descriptions[name]}" for name in used]


def _with_fit(machine: Machine, name: str, measurements: Sequence[Measured]) -> tuple[Machine, str]:
    """Returns the machine with one link fitted to the measurements, and the line that describes this link."""
    fitted = fit(measurements)
    latency_seconds = fitted.latency_seconds
    start_seconds = fitted.start_seconds
    latency = ""
    if latency_seconds is None:
        # The fitted start includes the latency of the ring's steps, which is kept as given and
        # subtracted.
        latency_seconds = getattr(machine, name).latency_seconds
        start_seconds -= 2 * (measurements[0].num_ranks - 1) * latency_seconds
        start_seconds = max(0.0, start_seconds)
    else:
        latency = f", {1e6 * latency_seconds:.3g} us a step"

    ranks = ", ".join(map(str, sorted({measurement.num_ranks for measurement in measurements})))
    description = (
        f"{fitted.bytes_per_second / 1e9:.3g} GB/s{latency}, {1e6 * start_seconds:,.0f} us to start; "
        f"measured on {ranks} ranks; the fit is {fitted.error:.0%} off before correction by size"
    )
    # If both links were measured, the longer start counts.
    start_seconds = max(machine.start_seconds, start_seconds)
    link: Any = Link(latency_seconds, fitted.bytes_per_second)
    return replace(machine, start_seconds=start_seconds, **{name: link}), description


def read(path: Path) -> list[Measured]:
    """Reads the median time for each size and kind from a file of `hvtrain allreduce`. Raises ConfigError."""
    try:
        content = json.loads(path.read_text("utf-8"))
        num_ranks = int(content["num_ranks"])
        measured = []
        for key, seconds in content["seconds"]["hvtrain"].items():
            # 4096, gather-4096, half-4096, bytes-4096; other keys are measurements of benchmarks/allreduce.py.
            kind, _, size = key.rpartition("-")
            if size.isdigit():
                measured.append(Measured(num_ranks, int(size), median(seconds), kind))
        if not measured:
            raise ValueError("it has no measurements")
        return measured
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--calibrate {path} cannot be read ({type(error).__name__}: {error}); "
            "give the allreduce.json of python -m hvtrain allreduce"
        ) from None
