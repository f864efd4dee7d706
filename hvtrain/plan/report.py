"""Prints a forecast as lines, draws it, and gives it as JSON."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvtrain.plan.costs.algorithms import Machine
from hvtrain.plan.costs.step import Cost, Rules
from hvtrain.plan.forecast import Forecast, key_steps
from hvtrain.report.charts import BLUE, GREY, picture
from hvtrain.system.secrets import without_secrets
from hvtrain.system.text import duration

NUM_POINTS = 600


def amount(num_bytes: float) -> str:
    """Bytes in powers of 1000.

    >>> amount(102_334_368), amount(6.24e9), amount(1_234_000), amount(880)
    ('102 MB', '6.2 GB', '1.2 MB', '0.9 kB')
    """
    for unit, length in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= length:
            return f"{num_bytes / length:,.{0 if num_bytes >= 10 * length else 1}f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"


def launch_line(words: Sequence[str], num_ranks: int, ranks_per_host: int) -> str:
    """The command that starts the run, without secrets; for several hosts, with a hostfile.

    >>> launch_line(["dataset.api_key=hunter2"], 1, 4)
    "horovodrun -np 1 python -m hvtrain 'dataset.api_key=***'"
    >>> launch_line(["model=cnn"], 2, 4), launch_line(["model=cnn"], 8, 4)
    ('horovodrun -np 2 python -m hvtrain model=cnn', 'python -m hvtrain launch -np 8 --hostfile hosts.txt -- model=cnn')
    """
    line = f"horovodrun -np {num_ranks} python -m hvtrain"
    if num_ranks > ranks_per_host:
        line = f"python -m hvtrain launch -np {num_ranks} --hostfile hosts.txt --"
    return shlex.join([*line.split(), *without_secrets(words)])


def memory(forecast: Forecast) -> dict[str, int]:
    """Bytes on a rank by purpose; activations only if they are known."""
    found = forecast.footprint
    parts = {"weights": found.weight_bytes, "gradients": found.gradient_bytes, "optimizer slots": found.slot_bytes}
    if forecast.plan.size > 1:
        parts["fusion buffer"] = Rules.fusion_bytes  # Horovod allocates it for grouped tensors too.
    if found.activation_bytes is not None:
        parts["activations"] = found.activation_bytes
    return parts


def of_the_run(forecast: Forecast, words: Sequence[str], ranks_per_host: int) -> list[str]:
    """Lines on the run itself, which need no prediction."""
    config, plan, bytes_of = forecast.config, forecast.plan, memory(forecast)
    sizes, hosts = plan.batch_sizes, -(-plan.size // ranks_per_host)
    same = len(set(sizes)) == 1
    batch = f"{plan.size} x {sizes[0]} = {plan.global_batch:,} (ranks x batch)" if same else f"{plan.global_batch:,}"
    rate = f"{plan.base_learning_rate:g} x {plan.learning_rate_factor:g} = {plan.peak_learning_rate:g}"
    dropped = plan.num_examples - plan.examples_per_epoch
    left_out = f"; {dropped:,} examples of an epoch are left out" if dropped else ""
    kept, checkpoint = config.checkpoint.keep + 1, forecast.footprint.checkpoint_bytes
    parts = (f"{name} {'about ' * (name == 'activations')}{amount(size)}" for name, size in bytes_of.items() if size)
    known = "activations" in bytes_of
    epochs = f"{plan.num_epochs} epoch{'s' * (plan.num_epochs > 1)}"
    lines = [
        ("model", f"{forecast.model_name}, {forecast.footprint.num_parameters:,} parameters, {config.train.precision}"),
        ("dataset", f"{forecast.source.name}: {plan.num_examples:,} train"),
        ("ranks", f"{plan.size} on {hosts} host{'s' * (hosts > 1)}"),
        ("global batch", batch),
        ("steps", f"{plan.num_steps:,} ({plan.steps_per_epoch:,} an epoch, {epochs}{left_out})"),
        ("learning rate", f"{rate} (base x {config.train.learning_rate_scale} scale)"),
        ("", ", ".join(f"{forecast.schedule(s):.4g} at {about}{s:,}" for about, s in key_steps(forecast))),
        (
            "memory",
            f"{'about' if known else 'at least'} {amount(sum(bytes_of.values()))} a rank: {', '.join(parts)}"
            f" ({'an estimate' if known else 'without activations: the shape of a layer is unknown'})",
        ),
        ("checkpoint", f"{amount(checkpoint)}; {kept} of them are kept: {amount(kept * checkpoint)}"),
        ("launch", launch_line(words, plan.size, ranks_per_host)),
    ]
    if hosts > 1:
        lines.append(("", f"hosts.txt: {hosts} lines like `s1 slots={ranks_per_host}`"))
    return [f"{name:<15}{text}" for name, text in lines]


def of_the_step(
    forecast: Forecast, costs: Sequence[Cost], links: Sequence[str], rules: Rules, faster: float | None
) -> list[str]:
    """Lines on the predicted step and its assumptions. faster is the last step's time if hosts reduce first."""
    number, step_seconds = len(forecast.messages), costs[0].step_seconds
    way = f"in {number} message{'s' * (number > 1)}, {'while others are computed' if rules.overlap else 'at the end'}"
    lines = [
        *(f"{name:<15}{link}" for name, link in zip(("links", ""), links)),
        f"{'step':<15}{1000 * step_seconds:,.4g} ms on one rank; ranks differ by {rules.deviation:.1%}; "
        f"{amount(forecast.footprint.gradient_bytes)} are reduced {way}",
        "",
        f"{'ranks':>6}{'step ms':>11}{'reducing ms':>13}{'exposed ms':>12}{'examples/s':>13}{'efficiency':>12}  by",
    ]
    for cost in costs:
        images = forecast.batch_size * cost.num_ranks / cost.step_seconds
        lines.append(
            f"{cost.num_ranks:>6}{1000 * cost.step_seconds:>11,.1f}{1000 * cost.communication_seconds:>13,.1f}"
            f"{1000 * cost.exposed_seconds:>12,.1f}{images:>13,.0f}{cost.efficiency:>12.1%}  {cost.algorithm}"
        )
    steps, seconds = forecast.plan.num_steps, costs[-1].step_seconds
    lines += ["", f"{steps:,} steps of {1000 * seconds:,.1f} ms: {duration(steps * seconds)}"]
    if faster:
        found = f"{1000 * faster:,.1f} ms, {step_seconds / faster:.1%}"
        lines.append(f"with hosts reduced first (HOROVOD_HIERARCHICAL_ALLREDUCE=1, on GPUs): {found}")
    return lines


def as_json(
    forecast: Forecast, options: argparse.Namespace, rules: Rules, costs: Sequence[Cost], machine: Machine | None
) -> dict[str, Any]:
    """The whole forecast, in SI units."""
    plan = forecast.plan
    return {
        "words": without_secrets(options.overrides),
        "num_ranks": plan.size,
        "ranks_per_host": options.ranks_per_host,
        "global_batch": plan.global_batch,
        "num_examples": plan.num_examples,
        "num_steps": plan.num_steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "learning_rate": [[step, forecast.schedule(step)] for _, step in key_steps(forecast)],
        "memory_bytes": memory(forecast),
        "checkpoint_bytes": forecast.footprint.checkpoint_bytes,
        "gradient_bytes": forecast.footprint.gradient_bytes,
        "launch": launch_line(options.overrides, plan.size, options.ranks_per_host),
        "rules": asdict(rules),
        "machine": asdict(machine) if machine else None,
        "costs": [asdict(cost) for cost in costs],
    }


def draw(forecast: Forecast, costs: Sequence[Cost], path: Path) -> None:
    """Writes a PNG; without costs it shows the learning rate alone."""
    plan = forecast.plan
    with picture(path, 13 if costs else 5, 4, columns=3 if costs else 1) as (figure, _):
        figure.suptitle(f"{forecast.model_name}, {plan.size} ranks, global batch {plan.global_batch:,}")
        steps = [*range(0, plan.num_steps, max(1, plan.num_steps // NUM_POINTS)), plan.num_steps - 1]
        rates, axes = [forecast.schedule(step) for step in steps], figure.axes[0]
        axes.plot([step / plan.steps_per_epoch for step in steps], rates, color=BLUE)
        axes.set(title="learning rate", xlabel="epoch")
        axes.set_ylim(bottom=0)
        if costs:
            ranks, (_, by_speed, by_efficiency) = [cost.num_ranks for cost in costs], figure.axes
            speeds = [forecast.batch_size * cost.num_ranks / cost.step_seconds for cost in costs]
            ideal = [speeds[0] * number for number in ranks]
            by_speed.plot(ranks, ideal, "--", color=GREY, label="one rank's times ranks")
            by_speed.plot(ranks, speeds, "o-", color=BLUE, label="predicted")
            by_speed.set(title="examples per second", yscale="log")
            by_speed.legend(frameon=False)
            percent = [100 * cost.efficiency for cost in costs]
            by_efficiency.plot(ranks, percent, "o-", color=BLUE)
            last, above = (ranks[-1], percent[-1]), {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
            by_efficiency.annotate(f"{percent[-1]:.0f}%", last, **above)
            by_efficiency.set(title="efficiency in percent", ylim=(0, 108))
            # The last number is always labelled; the one before it only where there is room.
            shown = [*(number for number in ranks[:: max(1, len(ranks) // 6)] if number * 1.5 < ranks[-1]), ranks[-1]]
            for axes in (by_speed, by_efficiency):
                axes.set_xscale("log", base=2)
                axes.set_xticks(shown, [f"{number:,}" for number in shown])
                axes.minorticks_off()
                axes.set_xlabel("ranks")
