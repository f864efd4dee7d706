"""The machine of a forecast: links from given figures, or from measurements of bench allreduce."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from hvtrain.errors import ConfigError
from hvtrain.plan.costs.algorithms import Link, Machine
from hvtrain.plan.costs.calibration import Measured, corrected, fit


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
    said = {
        "inside": f"{options.inside_gbytes:g} GB/s, {options.inside_latency_us:.3g} us",
        "between": f"{options.link_gbits:g} Gbit/s, {options.latency_us:.3g} us",
    }
    said = {name: f"{text}; {options.link_share:.1%} of the speed is used" for name, text in said.items()}
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
            steps = 2 * (measured[0].num_ranks - 1)
            found = replace(found, start_seconds=max(0.0, found.start_seconds - steps * latency_seconds))
        start_seconds = max(machine.start_seconds, found.start_seconds)
        changes: dict[str, Any] = {name: Link(latency_seconds, found.bytes_per_second), "start_seconds": start_seconds}
        machine = replace(machine, **changes)
        ranks = ", ".join(map(str, sorted({one.num_ranks for one in measured})))
        latency = "" if found.latency_seconds is None else f", {1e6 * latency_seconds:.3g} us a step"
        said[name] = (
            f"{found.bytes_per_second / 1e9:.3g} GB/s{latency}, {1e6 * found.start_seconds:,.0f} us to start; measured "
            f"on {ranks} ranks, the fit is {found.error:.0%} off, and corrected by size"
        )
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
        if isinstance(error, OSError):
            what = f"cannot be read: {error.strerror}"
        raise ConfigError(
            f"--calibrate {path} {what}; give the allreduce.json of python -m hvtrain.bench allreduce"
        ) from None
