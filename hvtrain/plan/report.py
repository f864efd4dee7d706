"""Formats a forecast as lines of text and as JSON."""

import argparse
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvtrain.core.step_plan import share_of_progress
from hvtrain.plan.algorithms import Machine
from hvtrain.plan.forecast import Forecast, key_steps
from hvtrain.plan.methods import (
    METHODS,
    CompressionCost,
    Method,
    Wire,
    advice,
    method_of,
    sent_bytes,
)
from hvtrain.plan.step_cost import Cost, Rules, Work
from hvtrain.system.secrets import without_secrets
from hvtrain.system.text import counted, duration


def format_bytes(num_bytes: float) -> str:
    """Formats a number of bytes in decimal units, as is usual for the sizes of models.

    >>> format_bytes(102_334_368), format_bytes(6.24e9), format_bytes(1_234_000), format_bytes(880)
    ('102 MB', '6.2 GB', '1.2 MB', '0.9 kB')
    """
    for unit, unit_bytes in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= unit_bytes:
            digits = 0 if num_bytes >= 10 * unit_bytes else 1
            return f"{num_bytes / unit_bytes:,.{digits}f} {unit}"

    return f"{num_bytes / 1e3:,.1f} kB"


def launch_line(forecast: Forecast, options: argparse.Namespace) -> str:
    """Returns the command that starts the run, without secrets; for several hosts, with a hostfile."""
    num_ranks = forecast.plan.size
    line = f"horovodrun -np {num_ranks} python -m hvtrain"
    # A strategy with replicas is a single process, which trains all of them.
    if "num_replicas" in forecast.config.strategy:
        line = f"python -m hvtrain launch -np {num_ranks} --"
    elif num_ranks > options.ranks_per_host:
        # Several hosts need a hostfile, which the user has to write.
        line = f"python -m hvtrain launch -np {num_ranks} --hostfile hosts.txt --"
    return shlex.join([*line.split(), *without_secrets(options.overrides)])


def memory(forecast: Forecast, method: Method) -> dict[str, int]:
    """Returns a rank's bytes of memory by purpose, without activations if their size is unknown."""
    footprint = forecast.footprint
    num_ranks = forecast.plan.size

    parts = Counter(
        {
            "weights": footprint.weight_bytes,
            "gradients": footprint.gradient_bytes,
            "optimizer slots": footprint.slot_bytes,
        }
    )
    # A single rank reduces nothing.
    if num_ranks > 1:
        # Horovod allocates this buffer for grouped tensors too.
        parts["fusion buffer"] = Rules.fusion_bytes
        parts.update(method.extra_bytes(footprint, num_ranks))
    if footprint.activation_bytes is not None:
        parts["activations"] = footprint.activation_bytes
    return parts


def checkpoint_bytes(forecast: Forecast) -> int:
    """Returns the bytes of a checkpoint, including each rank's own state."""
    num_ranks = forecast.plan.size
    size = forecast.footprint.checkpoint_bytes
    if num_ranks > 1:
        size += num_ranks * method_of(forecast.config.strategy).rank_bytes(forecast.footprint)
    return size


def run_lines(forecast: Forecast, options: argparse.Namespace) -> list[str]:
    """Returns the lines about the run that do not depend on the predicted step time."""
    config = forecast.config
    plan = forecast.plan
    num_hosts = math.ceil(plan.size / options.ranks_per_host)
    rate = (
        f"{plan.base_learning_rate:g} x {plan.learning_rate_factor:g} = {plan.peak_learning_rate:g}"
    )
    # Taken from the schedule itself, so that these are the rates that the run will use.
    rates = (
        f"{forecast.schedule(step):.4g} at {label}{step:,}" for label, step in key_steps(forecast)
    )
    # The newest checkpoints, the best one, and those of keep_every_epochs. The number that
    # keep_every_hours keeps cannot be predicted.
    num_checkpoints = config.checkpoint.keep + 1
    if config.checkpoint.keep_every_epochs:
        num_checkpoints += plan.num_epochs // config.checkpoint.keep_every_epochs
    size = checkpoint_bytes(forecast)

    lines = [
        (
            "model",
            f"{forecast.model_name}, {forecast.num_parameters:,} parameters, {config.train.precision}",
        ),
        ("dataset", f"{forecast.source.name}: {plan.num_examples:,} train"),
        ("ranks", f"{plan.size} on {counted(num_hosts, 'host')}"),
        ("global batch", _global_batch_text(forecast)),
        ("steps", _steps_text(forecast)),
        ("learning rate", f"{rate} (base x {config.train.learning_rate_scale} scale)"),
        ("", ", ".join(rates)),
        ("memory", _memory_text(forecast)),
        (
            "checkpoint",
            f"{format_bytes(size)}; {num_checkpoints} of them are kept: {format_bytes(num_checkpoints * size)}",
        ),
        ("launch", launch_line(forecast, options)),
    ]
    if "hosts.txt" in lines[-1][1]:
        lines.append(("", f"hosts.txt: {num_hosts} lines like `s1 slots={options.ranks_per_host}`"))
    return [f"{name:<15}{text}" for name, text in lines]


def _global_batch_text(forecast: Forecast) -> str:
    plan = forecast.plan
    # If the ranks' batches differ, the global batch is not a product.
    if len(set(plan.batch_sizes)) > 1:
        return f"{plan.global_batch:,}"
    return f"{plan.size} x {plan.batch_sizes[0]} = {plan.global_batch:,} (ranks x batch)"


def _steps_text(forecast: Forecast) -> str:
    plan = forecast.plan
    # Examples that do not fill a batch on all ranks are left out of an epoch.
    left_out = ""
    num_dropped = plan.num_examples - plan.examples_per_epoch
    if num_dropped:
        left_out = f"; examples left out per epoch: {num_dropped:,}"
    epochs = counted(plan.num_epochs, "epoch")
    return f"{plan.num_steps:,} ({plan.steps_per_epoch:,} per epoch, {epochs}{left_out})"


def _memory_text(forecast: Forecast) -> str:
    parts = memory(forecast, method_of(forecast.config.strategy))
    total = format_bytes(sum(parts.values()))

    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    if "activations" in parts:
        return f"about {total} per rank: {shown} (an estimate)"
    return (
        f"at least {total} per rank: {shown} (without activations: the shape of a layer is unknown)"
    )


def step_lines(
    forecast: Forecast, costs: Sequence[Cost], links: Sequence[str], rules: Rules
) -> list[str]:
    """Returns the lines about the predicted step and the assumptions behind it.

    Args:
        forecast: The run.
        costs: Predictions for 1, 2, 4, ... ranks; the last is for the run's number of ranks.
        links: A line for each link in use.
        rules: How the ranks reduce gradients.
    """
    num_messages = len(forecast.messages)
    batch_sizes = forecast.plan.batch_sizes
    num_ranks = forecast.plan.size
    # With buckets, the reduction overlaps with the backward pass.
    when = "while later gradients are computed" if rules.overlap else "at the end"
    lines = [f"{name:<15}{link}" for name, link in zip(("links", ""), links)]

    lines += [
        f"{'step':<15}{1000 * costs[0].step_seconds:,.4g} ms on one rank; ranks differ by {rules.deviation:.1%}; "
        f"{format_bytes(forecast.footprint.gradient_bytes)} are reduced in {counted(num_messages, 'message')}, "
        f"{when}",
    ]
    if forecast.row_bytes:
        received = format_bytes(forecast.row_bytes * (num_ranks - 1) / num_ranks)
        lines.append(
            f"{'tables':<15}a rank receives up to {received} of sharded rows per step, and sends gradients of "
            "the same size; the time for this is not included"
        )
    lines += [
        "",
        f"{'ranks':>6}{'step ms':>11}{'reducing ms':>13}{'exposed ms':>12}{'examples/s':>13}{'efficiency':>12}  by",
    ]
    for cost in costs:
        examples_per_second = sum(batch_sizes[: cost.num_ranks]) / cost.step_seconds
        lines.append(
            f"{cost.num_ranks:>6}{1000 * cost.step_seconds:>11,.1f}{1000 * cost.communication_seconds:>13,.1f}"
            f"{1000 * cost.exposed_seconds:>12,.1f}{examples_per_second:>13,.0f}"
            f"{cost.efficiency:>12.1%}  {cost.algorithm}"
        )

    num_steps = forecast.plan.num_steps
    seconds = costs[-1].step_seconds
    lines += [
        "",
        f"{num_steps:,} steps of {1000 * seconds:,.1f} ms: {duration(num_steps * seconds)}",
    ]
    return lines


def advice_lines(
    forecast: Forecast,
    costs: Mapping[Method, Cost],
    work: Work,
    compression_costs: Mapping[Wire, CompressionCost],
) -> list[str]:
    """Returns a table with a row for each method that fits the run, and the advice on which one to take.

    Args:
        forecast: The run.
        costs: The cost of each method on the run's ranks.
        work: One rank's step.
        compression_costs: The result of methods.measure_compression.
    """
    num_ranks = forecast.plan.size
    lines = [
        "",
        f"{num_ranks} ranks with{'step ms':>39}{'sent':>10}{'memory':>10}{'speed':>7}  the result",
    ]
    for method, cost in costs.items():
        sent = format_bytes(
            sent_bytes(method, work, compression_costs, num_ranks, forecast.plan.accumulate)
        )
        size = format_bytes(sum(memory(forecast, method).values()))
        lines.append(
            f"{method.settings:<40}{1000 * cost.step_seconds:>11,.1f}{sent:>10}{size:>10}"
            f"{costs[METHODS[0]].step_seconds / cost.step_seconds:>7.2f}  {method.effect}"
        )
    return [*lines, "", f"{'advice':<15}{advice(costs)}"]


def progress_line(forecast: Forecast, cost: Cost, noise_scale: float) -> str:
    """Returns the line about progress relative to one rank: speed times progress per example."""
    num_ranks = forecast.plan.size
    joint_batch = forecast.plan.global_batch * forecast.plan.accumulate
    share = share_of_progress(noise_scale, joint_batch / num_ranks, joint_batch)
    speedup = num_ranks * cost.efficiency * share
    return (
        f"{'progress':<15}{speedup:.1f} times that of one rank: {num_ranks} ranks x {cost.efficiency:.0%} parallel "
        f"efficiency x {share:.0%} statistical efficiency (noise scale {noise_scale:,.0f})"
    )


def as_json(
    forecast: Forecast,
    options: argparse.Namespace,
    rules: Rules,
    costs: Sequence[Cost],
    method_costs: Mapping[Method, Cost],
    machine: Machine | None,
) -> dict[str, Any]:
    """Returns the whole forecast for plan.json, in seconds and bytes."""
    plan = forecast.plan

    return {
        "overrides": without_secrets(options.overrides),
        "num_ranks": plan.size,
        "ranks_per_host": options.ranks_per_host,
        "global_batch": plan.global_batch,
        "num_examples": plan.num_examples,
        "num_steps": plan.num_steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "learning_rate": [[step, forecast.schedule(step)] for _, step in key_steps(forecast)],
        "memory_bytes": memory(forecast, method_of(forecast.config.strategy)),
        "checkpoint_bytes": checkpoint_bytes(forecast),
        "gradient_bytes": forecast.footprint.gradient_bytes,
        "row_bytes": forecast.row_bytes,
        "launch": launch_line(forecast, options),
        "rules": asdict(rules),
        # null if no step time is predicted.
        "machine": asdict(machine) if machine else None,
        "costs": [asdict(cost) for cost in costs],
        "methods": {method.settings: asdict(cost) for method, cost in method_costs.items()},
    }
