"""What stands before the first step: folder made, seeds set, model and callbacks built, checkpoint restored."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvtrain import checkpoint
from hvtrain.callbacks.callback_state import saved_state
from hvtrain.config import RunConfig, default_run_dir, to_dict
from hvtrain.data.source import Source
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.header import versions
from hvtrain.instantiate import build
from hvtrain.learning_rate import LearningRate
from hvtrain.plan import StepPlan, make_plan, size_of_each_rank
from hvtrain.strategies.base import Strategy
from hvtrain.topology import Topology, reduced
from hvtrain.weighting import RankWeighted

log = logging.getLogger(__name__)


def open_run_folder(config: RunConfig) -> Path:
    """Makes the run folder and sees that it can be written (chief only)."""
    folder = Path(config.run.dir or default_run_dir(config)).absolute()
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


def open_data(config: RunConfig, strategy: Strategy) -> tuple[Source, StepPlan]:
    """The data set, and the plan that its size makes; the strategy's topology gets the weights (every rank)."""
    settings = {name: value for name, value in config.dataset.items() if name != "uneven"}
    source: Source = strategy.together(lambda: build("dataset", settings))
    batch_sizes = size_of_each_rank(config.train.batch_size, strategy.gather(strategy.topology.host))
    weights = reduced(batch_sizes)
    shards = strategy.together(lambda: source.shard_sizes("train", strategy.topology.size, weights))
    rate = config.optimizer["learning_rate"]
    plan = make_plan(config.train, rate, shards, source.name, batch_sizes, config.dataset["uneven"])
    strategy.topology = replace(strategy.topology, weights=weights)
    return source, plan


def training_batches(source: Source, plan: StepPlan, topology: Topology, seed: int, step: int) -> tf.data.Dataset:
    """This rank's endless stream of the plan's batches, from a step of the run on."""
    share = plan.shares[topology.rank]
    cut = {} if share.is_full else {"num_examples": share.num_examples}
    return source.training(topology, share.batch_size, seed, step, share.steps, **cut)


def build_model(config: RunConfig, source: Source, plan: StepPlan, strategy: Strategy) -> keras.Model:
    """The compiled model with its optimizer built, so that its slots exist before restore and broadcast."""
    if config.train.jit_compile and plan.size > 1:
        raise ConfigError("train.jit_compile=true works with one rank only: XLA cannot compile the reduction")
    model = build("model", config.model, image_shape=source.image_shape, num_classes=source.num_classes)
    optimizer = strategy.distribute(build_optimizer(config, plan), check_finite=config.guard.finite)
    compile_model(model, optimizer, config.train.jit_compile, weighted=not plan.is_even)
    model.optimizer.build(model.trainable_variables)
    return model


def build_optimizer(config: RunConfig, plan: StepPlan) -> keras.optimizers.Optimizer:
    """The optimizer of one process, with the run's learning rate."""
    schedule = build(
        "schedule",
        config.schedule,
        base=plan.base_learning_rate,
        peak=plan.peak_learning_rate,
        steps_per_epoch=plan.steps_per_epoch,
        num_steps=plan.num_steps,
    )
    rate = LearningRate(schedule)
    optimizer = build("optimizer", config.optimizer, learning_rate=rate)
    rate.follow(getattr(optimizer, "inner_optimizer", optimizer))
    return optimizer


def compile_model(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, jit_compile: bool = False, weighted: bool = False
) -> None:
    """Classification: logits against class indices; weighted: for batches that carry their rank's weight."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Never "auto", which is on where there is a GPU: XLA cannot compile a Horovod op (horovod#2590).
    model.compile(
        optimizer=optimizer,
        loss=RankWeighted(loss) if weighted else loss,
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        jit_compile=jit_compile,
    )


@dataclass(frozen=True)
class Start:
    """Where a run begins: at nothing, or at a checkpoint. rank_state is this rank's own."""

    name: str | None = None
    step: int = 0
    ended: bool = False
    rank_state: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def resume(config: RunConfig, folder: Path, model: keras.Model, plan: StepPlan, strategy: Strategy) -> Start:
    """Restores on the chief; returns, on every rank, where the run stands."""

    def restore() -> tuple[Start, list[dict[str, Any]]]:
        newest, damaged = checkpoint.read_newest(folder / "checkpoints")
        for line in damaged:
            log.warning("%s; the one before is taken", line)
        if newest is None:
            return Start(), [{}] * plan.size
        wanted = checkpoint_meta(config, plan)
        names = ("num_ranks", "batch_sizes", "steps_per_epoch", "uneven")
        different = [
            f"{name} {newest.meta.get(name)}, now {wanted[name]}"
            for name in names
            if newest.meta.get(name) != wanted[name]
        ]
        if different:
            raise CheckpointError(
                f"checkpoint {newest.path.name} was made with {'; '.join(different)}; "
                "start with the same numbers, or choose another run.dir"
            )
        checkpoint.restore(newest, model)
        callbacks = saved_state(newest.meta, newest.arrays)
        start = Start(newest.path.name, newest.step, newest.meta.get("ended", False), callbacks=callbacks)
        return start, [newest.rank_state(rank) for rank in range(plan.size)]

    start, states = strategy.on_chief(restore)
    start = replace(start, rank_state=states[strategy.topology.rank])
    checkpoint.restore_rank(start.rank_state, model)
    return start


def checkpoint_meta(config: RunConfig, plan: StepPlan) -> dict[str, Any]:
    """What every checkpoint of the run says about it."""
    return {
        "num_ranks": plan.size,
        "batch_sizes": plan.batch_sizes,
        "steps_per_epoch": plan.steps_per_epoch,
        "uneven": config.dataset["uneven"],
        "versions": versions(),
        "config": to_dict(config),
    }


# They only write, and ranks would write over each other.
_WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)


def own_callbacks(config: RunConfig, is_chief: bool, validates: bool) -> dict[str, keras.callbacks.Callback]:
    """The user's callbacks by name: on every rank, but those of Keras's that only write on the chief alone."""
    built = {name: build(f"callbacks.{name}", settings) for name, settings in config.callbacks.items()}
    for name, callback in built.items():
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigError(f"callbacks.{name} made a {type(callback).__name__}; a Keras callback is needed")
        monitor = str(getattr(callback, "monitor", ""))
        if monitor.startswith("val_") and not validates:
            raise ConfigError(
                f"callbacks.{name}.monitor={monitor} needs validation data and there is none; take some out of the "
                f"training data (dataset.num_validation=N) or choose callbacks.{name}.monitor={monitor[4:]}"
            )
    return {name: built[name] for name in built if is_chief or not isinstance(built[name], _WRITERS)}
