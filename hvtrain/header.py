"""What rank 0 says before the first step: everything that a reader of the log wants to know later."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import keras
import tensorflow as tf

from hvtrain import __version__
from hvtrain.config import RunConfig
from hvtrain.data.source import Source
from hvtrain.plan import StepPlan
from hvtrain.strategies.base import Strategy


def versions() -> dict[str, str]:
    """Versions of what computes and what talks."""
    return {
        "hvtrain": __version__,
        "horovod": version("horovod"),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
    }


def header(
    config: RunConfig,
    strategy: Strategy,
    source: Source,
    model: keras.Model,
    plan: StepPlan,
    folder: Path,
    saved: str | None,
) -> str:
    """The header, some ten lines without the closing newline."""
    splits = {split: source.num_examples(split) for split in ("train", "validation", "test")}
    rate = f"{plan.base_learning_rate:g} x {plan.learning_rate_factor:g} = {plan.peak_learning_rate:g}"
    sizes = plan.batch_sizes
    same = len(set(sizes)) == 1
    batch = f"{plan.size} x {sizes[0]}" if same else " + ".join(map(str, sizes))
    lines = {
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        "ranks": f"{plan.size} ({strategy.description()})",
        "devices": device_map(strategy.devices()),
        "model": f"{config.model['_target_']}, {model.count_params():,} parameters, {config.train.precision}",
        "dataset": f"{source.name}: {', '.join(f'{count:,} {split}' for split, count in splits.items() if count)}",
        "from": source.origin,
        "global batch": f"{batch} = {plan.global_batch} ({'ranks x batch' if same else 'by rank'})",
        "learning rate": f"{rate} (base x {config.train.learning_rate_scale} scale), "
        f"{config.schedule['_target_'].split('.')[-1].lower()}",
        "steps": f"{plan.num_steps:,} ({plan.steps_per_epoch:,} an epoch)",
        "run folder": str(folder),
    }
    if saved:
        step = int(saved.removeprefix("step-"))
        lines["resumed"] = f"{saved}: {step:,} of {plan.num_steps:,} steps were done"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items() if text) + "\n"


def device_map(devices: list[str]) -> str:
    """Ranks and their devices, the ranks of one device together: "0-3 s1 CPU"."""
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(rank)
    return ", ".join(
        f"{found[0]} {device}" if len(found) == 1 else f"{found[0]}-{found[-1]} {device}"
        for device, found in ranks.items()
    )
