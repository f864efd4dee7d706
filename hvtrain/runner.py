"""A run from beginning to end, on every rank alike: train(config) -> RunRecord."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvtrain import checkpoint, console
from hvtrain.callbacks.checkpointing import Checkpointing, ResumedMetrics
from hvtrain.callbacks.metrics import EpochMetrics, evaluate
from hvtrain.callbacks.position import Position
from hvtrain.callbacks.progress import Progress, verbosity
from hvtrain.callbacks.recording import Recording
from hvtrain.callbacks.throughput import Throughput
from hvtrain.callbacks.validation import Validation
from hvtrain.config import RunConfig, flatten, to_dict
from hvtrain.data.source import Source
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.header import header, versions
from hvtrain.instantiate import build
from hvtrain.learning_rate import LearningRate
from hvtrain.plan import StepPlan, make_plan
from hvtrain.records import RunRecord, write_result
from hvtrain.strategies.base import Strategy
from hvtrain.topology import Topology

log = logging.getLogger(__name__)


def train(config: RunConfig) -> RunRecord:
    """Trains, evaluates and writes the results; returns the same record on every rank.

    Raises UserError, on all ranks at once where it can, for what the user can mend.
    """
    strategy: Strategy = build("strategy", config.strategy)
    try:
        return run(config, strategy)
    except BaseException:
        leave(strategy)
        raise


def run(config: RunConfig, strategy: Strategy) -> RunRecord:
    """The story of a run (every rank)."""
    began = time.monotonic()
    topology = strategy.start()
    console.start_log(topology.is_chief)
    check_same_config(strategy, config)
    folder = strategy.on_chief(lambda: open_run_folder(config))
    console.log_to_file(folder / "logs", topology.rank)
    seed_everything(config, topology.rank)

    source: Source = strategy.together(lambda: build("dataset", config.dataset))
    shards = strategy.together(lambda: source.shard_sizes("train", topology.size))
    plan = make_plan(config.train, config.optimizer["learning_rate"], shards, source.name)
    with strategy.scope():
        model = strategy.together(lambda: build_model(config, source, plan, strategy))
    saved, start_step, rank_state = resume(config, folder, model, plan, strategy)
    strategy.broadcast_model(model)
    log.info("%s", header(config, strategy, source, model, plan, folder, saved))

    position = Position(plan, start_step)
    throughput = Throughput(position)
    callbacks = make_callbacks(config, strategy, source, folder, position, throughput, rank_state)
    with explained(source):
        if start_step < plan.num_steps:
            strategy.fit(
                model,
                lambda step: source.training(topology, plan.batch_size, config.seed, step, plan.steps_per_epoch),
                plan,
                start_step,
                callbacks,
                verbosity(topology.is_chief),
            )
        test = evaluation_data(config, source, "test", topology)
        metrics = evaluate(model, test, strategy) if test is not None else {}
    record = RunRecord(
        test_accuracy=metrics.get("accuracy"),
        test_loss=metrics.get("loss"),
        images_per_second=throughput.images_per_second,
        step_seconds=throughput.step_seconds,
        num_ranks=topology.size,
        num_parameters=model.count_params(),
        num_steps=plan.num_steps,
        global_batch=plan.global_batch,
        seconds=time.monotonic() - began,
        reductions=strategy.num_reductions(model.optimizer),
        first_step=start_step,
        metrics={f"test_{name}": value for name, value in metrics.items()},
        versions=versions(),
        config=to_dict(config),
    )
    strategy.on_chief(lambda: write_outcome(config, folder, record, model))
    strategy.stop()
    return record


def leave(strategy: Strategy) -> None:
    """Tells the other ranks that this one fails, so that none waits for it; gives up after two seconds."""
    farewell = threading.Thread(target=strategy.stop, daemon=True)
    farewell.start()
    farewell.join(timeout=2.0)


@contextmanager
def explained(source: Source) -> Iterator[None]:
    """Turns TensorFlow's error about unreadable data into one that names the file."""
    try:
        yield
    except tf.errors.OpError as error:
        # Horovod's errors come as OpErrors too; a search through all files would find nothing.
        cause = error if "orovod" in str(error) else source.explain(error)
        if cause is error:
            raise
        raise cause from error


def evaluation_data(config: RunConfig, source: Source, split: str, topology: Topology) -> tf.data.Dataset | None:
    """This rank's part of a split, of known length; None when no rank has any."""
    if not source.num_examples(split):
        return None
    batch_size = config.train.evaluation_batch_size
    num_batches = -(-source.shard_sizes(split, topology.size)[topology.rank] // batch_size)
    dataset = source.evaluation(split, topology, batch_size)
    return dataset.apply(tf.data.experimental.assert_cardinality(num_batches))


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


def make_callbacks(
    config: RunConfig,
    strategy: Strategy,
    source: Source,
    folder: Path,
    position: Position,
    throughput: Throughput,
    rank_state: dict[str, Any],
) -> list[keras.callbacks.Callback]:
    """In this order: count the step; see that it was reduced; time it; make the epoch's metrics those of all
    ranks, then validate, so that whoever reads the logs after that reads the truth; save; and record."""
    is_chief = strategy.topology.is_chief
    plan = position.plan
    callbacks = [position, *strategy.callbacks(), throughput, ResumedMetrics(rank_state), EpochMetrics(strategy)]
    validation = None
    dataset = evaluation_data(config, source, "validation", strategy.topology)
    if dataset is not None:
        every = (config.train.validate_every_epochs, config.train.validate_every_steps)
        validation = Validation(dataset, strategy, position, *every)
        callbacks.append(validation)
    meta = {
        "num_ranks": plan.size,
        "batch_size": plan.batch_size,
        "steps_per_epoch": plan.steps_per_epoch,
        "versions": versions(),
        "config": to_dict(config),
    }
    callbacks.append(Checkpointing(folder / "checkpoints", config.checkpoint, meta, strategy, position, validation))
    if is_chief:
        callbacks += [Recording(folder, position, throughput), Progress(position)]
    return callbacks


def write_outcome(config: RunConfig, folder: Path, record: RunRecord, model: keras.Model) -> None:
    """result.json and model.keras, which plain Keras loads and evaluates anywhere (chief only).

    The optimizer's slots are in the last checkpoint; the model gets a plain optimizer at the base rate.
    """
    compile_model(model, build("optimizer", config.optimizer))
    temporary = folder / ".model.tmp.keras"
    model.save(temporary)
    temporary.replace(folder / "model.keras")
    write_result(folder, record)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
    speed = f"{record.images_per_second:,.0f} images/s over {record.num_ranks} rank(s), " if record.step_seconds else ""
    log.info("test: %s", shown or "no test data")
    log.info("%s%.1f s in all; results in %s", speed, record.seconds, folder)
