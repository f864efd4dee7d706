"""What stands before the first step: folder made, seeds set, data opened, model and callbacks built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvtrain.checkpoint import store, writer
from hvtrain.config.instantiate import build
from hvtrain.config.schema import OF_EVERY_DATASET, RunConfig, default_run_dir, to_dict
from hvtrain.core.planning import dealt_batch_sizes, going_on, make_plan
from hvtrain.core.records import TEMPORARY
from hvtrain.core.schedule import Schedule
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology, reduced
from hvtrain.data.pipeline.regroup import regrouped
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.strategies.base import Strategy
from hvtrain.system.run_lock import RunLock
from hvtrain.system.versions import versions
from hvtrain.training.batch_weights import RankWeighted
from hvtrain.training.learning_rate import LearningRate


def open_run_folder(config: RunConfig, lock: RunLock, begun: Path | None = None) -> Path:
    """Makes the run folder, or takes the one where this run has begun; sees that it can be written, and that no other
    run is in it (chief only).

    What killed runs left there is removed.
    """
    folder = begun or Path(config.run.dir or default_run_dir(config)).absolute()
    checkpoints = folder / "checkpoints"
    if checkpoints.is_symlink():
        raise ConfigError(
            f"{checkpoints} is a symbolic link, and may lead out of the run folder; make it a folder, or keep the "
            "whole run where it leads and give that as run.dir"
        )
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        lock.take(folder)
        for place in (folder, checkpoints):
            writer.sweep(place)
            probe = place / f"{TEMPORARY}probe"
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise ConfigError(f"run.dir={folder} cannot be written: {error.strerror}; choose another run.dir") from error
    if config.resume == "never" and not begun and store.listed(checkpoints):
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


def open_data(config: RunConfig, strategy: Strategy, saved: dict[str, Any] | None = None) -> tuple[Source, StepPlan]:
    """The data set, and the plan that its size makes; the strategy's topology gets the weights (every rank).

    saved is what the checkpoint says, if any, that the run goes on from: its plan goes on.
    """
    settings = {name: value for name, value in config.dataset.items() if name not in OF_EVERY_DATASET}
    source: Source = strategy.all_or_raise(lambda: build("dataset", settings))
    source.on_error = config.dataset["on_error"]
    hosts = strategy.gather(strategy.topology.host)
    batch_sizes = dealt_batch_sizes(saved, config.train, hosts)
    shards = strategy.all_or_raise(lambda: source.shard_sizes("train", len(batch_sizes), reduced(batch_sizes)))
    rate = config.optimizer["learning_rate"]
    plan = make_plan(config.train, rate, shards, source.name, batch_sizes, config.dataset["uneven"])
    plan = going_on(plan, saved, config.train, len(hosts))
    strategy.topology = replace(strategy.topology, weights=() if plan.is_cut_anew else plan.weights)
    return source, plan


def training_batches(source: Source, plan: StepPlan, topology: Topology, seed: int, step: int) -> tf.data.Dataset:
    """This rank's endless stream of the plan's batches, from a step of the run on."""

    def stream_of(rank: int) -> tf.data.Dataset:
        share = plan.shares[rank]
        place = replace(topology, rank=rank, size=len(plan.shares), weights=plan.weights)
        cut = {} if share.is_full else {"num_examples": share.num_examples}
        return source.training(place, share.batch_size, seed, step - plan.shift, share.steps, **cut)

    if plan.is_cut_anew:
        return regrouped(stream_of, plan, topology, step - plan.shift)
    return stream_of(topology.rank)


def evaluation_data(config: RunConfig, source: Source, split: str, topology: Topology) -> tf.data.Dataset | None:
    """This rank's part of a split, of known length; None when no rank has any."""
    if not source.num_examples(split):
        return None
    batch_size = config.train.evaluation_batch_size
    num_batches = -(-source.shard_sizes(split, topology.size, topology.weights)[topology.rank] // batch_size)
    dataset = source.evaluation(split, topology, batch_size)
    if num_batches and source.on_error == "skip":
        return dataset  # Of fewer batches, perhaps.
    return dataset.apply(tf.data.experimental.assert_cardinality(num_batches))


def build_model(config: RunConfig, source: Source, plan: StepPlan, strategy: Strategy) -> keras.Model:
    """The compiled model with its optimizer built, so that its slots exist before restore and broadcast."""
    model = build("model", config.model, image_shape=source.image_shape, num_classes=source.num_classes)
    for layer in model._flatten_layers() if config.train.jit_compile else ():
        if not getattr(layer, "supports_jit", True):
            raise ConfigError(
                f"train.jit_compile=true and the layer {layer.name}, which XLA cannot compile; leave one of them out"
            )
    optimizer = strategy.distribute(
        build_optimizer(config, plan),
        check_finite=config.guard.finite,
        divide_losses=type(model).train_step is keras.Model.train_step,
    )
    compile_model(model, optimizer, config.train.jit_compile, weighted=not plan.is_even)
    model.optimizer.build(model.trainable_variables)
    return model


def build_schedule(config: RunConfig, plan: StepPlan) -> Schedule:
    """The learning rate over the plan's own steps."""
    schedule: Schedule = build(
        "schedule",
        config.schedule,
        base=plan.base_learning_rate,
        peak=plan.peak_learning_rate,
        steps_per_epoch=plan.steps_per_epoch,
        num_steps=plan.scheduled_steps,
    )
    return schedule


def build_optimizer(config: RunConfig, plan: StepPlan) -> keras.optimizers.Optimizer:
    """The optimizer of one process, with the run's learning rate."""
    rate = LearningRate(build_schedule(config, plan), plan.shift)
    accumulated = {"gradient_accumulation_steps": config.train.accumulate} if config.train.accumulate > 1 else {}
    optimizer = build("optimizer", config.optimizer, learning_rate=rate, **accumulated)
    rate.follow(getattr(optimizer, "inner_optimizer", optimizer))
    return optimizer


def compile_model(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, jit_compile: bool = False, weighted: bool = False
) -> None:
    """Classification: logits against class indices; weighted: for batches that carry their rank's weight."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Never "auto", which is on where there is a GPU: what compiles with XLA is the user's to say.
    model.compile(
        optimizer=optimizer,
        loss=RankWeighted(loss) if weighted else loss,
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        jit_compile=jit_compile,
    )


def checkpoint_meta(
    config: RunConfig, plan: StepPlan, data: dict[str, Any], run_id: str | None = None
) -> dict[str, Any]:
    """What every checkpoint of the run says about it: how its data are dealt, how many ranks work on it now.

    data is the data set's manifest; run_id is the same for all starts of a run.
    """
    return {
        "num_ranks": len(plan.shares),
        "batch_size": config.train.batch_size,
        "batch_sizes": [share.batch_size for share in plan.shares],
        "steps_per_epoch": plan.steps_per_epoch,
        "uneven": config.dataset["uneven"],
        "world_size": plan.size,
        "data": data,
        "run_id": run_id,
        "versions": versions(),
        "config": to_dict(config),
    }
