"""What stands before the first step: settings compared, folder made, seeds set, model built, checkpoint restored."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvtrain import checkpoint
from hvtrain.config import RunConfig, flatten, to_dict
from hvtrain.data.source import Source
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.instantiate import build
from hvtrain.learning_rate import LearningRate
from hvtrain.plan import StepPlan
from hvtrain.strategies.base import Strategy

log = logging.getLogger(__name__)


def check_same_config(strategy: Strategy, config: RunConfig) -> None:
    """Raises ConfigError on all ranks when their settings differ, naming settings and ranks."""
    all_settings = strategy.gather(flatten(to_dict(config)))
    first = all_settings[0]
    for rank, settings in enumerate(all_settings):
        different = [name for name in {**first, **settings} if settings.get(name) != first.get(name)]
        if different:
            shown = "; ".join(f"{name} is {first.get(name)} and {settings.get(name)}" for name in different[:5])
            raise ConfigError(
                f"ranks 0 and {rank} were started with different settings: {shown}; start all ranks with the same line"
            )


def open_run_folder(config: RunConfig) -> Path:
    """Makes the run folder and sees that it can be written (chief only)."""
    names = [str(config.model["_target_"]).split(".")[-1], str(config.dataset["_target_"]).split(".")[-1]]
    default = Path("runs") / "-".join([datetime.now().strftime("%Y-%m-%d_%H-%M-%S"), *names])
    folder = Path(config.run.dir or default).absolute()
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"run.dir={folder} cannot be written: {error.strerror}; choose another run.dir") from error
    if config.resume == "never" and any((folder / "checkpoints").glob("step-*")):
        raise ConfigError(
            f"run.dir={folder} holds checkpoints of an earlier run; go on with resume=auto or choose another run.dir"
        )
    return folder


def seed_everything(config: RunConfig, rank: int) -> None:
    """Each rank its own seed: weights are broadcast anyway, and dropout shall differ."""
    keras.utils.set_random_seed(config.seed + rank)
    if config.train.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.config.set_dtype_policy(config.train.precision)


def build_model(config: RunConfig, source: Source, plan: StepPlan, strategy: Strategy) -> keras.Model:
    """The compiled model with its optimizer built, so that its slots exist before restore and broadcast."""
    if config.train.jit_compile and plan.size > 1:
        raise ConfigError("train.jit_compile=true works with one rank only: XLA cannot compile the reduction")
    model = build("model", config.model, image_shape=source.image_shape, num_classes=source.num_classes)
    schedule = build(
        "schedule",
        config.schedule,
        base=plan.base_learning_rate,
        peak=plan.peak_learning_rate,
        steps_per_epoch=plan.steps_per_epoch,
        num_steps=plan.num_steps,
    )
    optimizer = strategy.distribute(build("optimizer", config.optimizer, learning_rate=LearningRate(schedule)))
    compile_model(model, optimizer, config.train.jit_compile)
    model.optimizer.build(model.trainable_variables)
    return model


def compile_model(model: keras.Model, optimizer: keras.optimizers.Optimizer, jit_compile: bool = False) -> None:
    """Classification: logits against class indices."""
    # Never "auto", which is on where there is a GPU: XLA cannot compile a Horovod op (horovod#2590).
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        jit_compile=jit_compile,
    )


def resume(
    config: RunConfig, folder: Path, model: keras.Model, plan: StepPlan, strategy: Strategy
) -> tuple[str | None, int, dict[str, Any]]:
    """Restores on the chief; returns, on every rank, the checkpoint's name, its step and this rank's own state."""

    def restore() -> tuple[str | None, int, dict[int, dict[str, Any]]]:
        newest, damaged = checkpoint.read_newest(folder / "checkpoints")
        for line in damaged:
            log.warning("%s; the one before is taken", line)
        if newest is None:
            return None, 0, {}
        same = {name: newest.meta[name] for name in ("num_ranks", "batch_size", "steps_per_epoch")}
        wanted = {"num_ranks": plan.size, "batch_size": plan.batch_size, "steps_per_epoch": plan.steps_per_epoch}
        different = [f"{name} {same[name]}, now {wanted[name]}" for name in wanted if same[name] != wanted[name]]
        if different:
            raise CheckpointError(
                f"checkpoint {newest.path.name} was made with {'; '.join(different)}; "
                "start with the same numbers, or choose another run.dir"
            )
        checkpoint.restore(newest, model)
        return newest.path.name, newest.step, {rank: newest.rank_state(rank) for rank in range(plan.size)}

    name, step, states = strategy.on_chief(restore)
    state = states.get(strategy.topology.rank, {})
    checkpoint.restore_seeds(state, model)
    return name, step, state
