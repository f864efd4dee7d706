"""A run from beginning to end, on every rank alike: train(config) -> RunRecord."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvtrain import console
from hvtrain.callbacks.checkpointing import Checkpointing
from hvtrain.callbacks.metrics import EpochMetrics, build_metrics, evaluate
from hvtrain.callbacks.position import Position
from hvtrain.callbacks.progress import Progress, verbosity
from hvtrain.callbacks.recording import Recording
from hvtrain.callbacks.resumed_metrics import ResumedMetrics
from hvtrain.callbacks.throughput import Throughput
from hvtrain.callbacks.validation import Validation
from hvtrain.config import RunConfig, to_dict
from hvtrain.data.source import Source
from hvtrain.errors import StorageError
from hvtrain.header import header, versions
from hvtrain.instantiate import build
from hvtrain.plan import make_plan
from hvtrain.prepare import (
    build_model,
    check_same_config,
    compile_model,
    open_run_folder,
    resume,
    seed_everything,
)
from hvtrain.records import RESULT_FILE, RunRecord, write_result
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

    def batches_from(step: int) -> tf.data.Dataset:
        return source.training(topology, plan.batch_size, config.seed, step, plan.steps_per_epoch)

    with explained(source):
        if start_step < plan.num_steps:
            if position.in_epoch:
                build_metrics(model, batches_from(start_step))
            strategy.fit(model, batches_from, plan, start_step, callbacks, verbosity(topology.is_chief))
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
    plan = position.plan
    callbacks = [position, *strategy.callbacks(), throughput, EpochMetrics(strategy)]
    if position.in_epoch:
        callbacks.append(ResumedMetrics(rank_state))
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
    callbacks.append(Recording(folder, strategy, position, throughput))
    if verbosity(strategy.topology.is_chief) == 2:
        callbacks.append(Progress(position))
    return callbacks


def write_outcome(config: RunConfig, folder: Path, record: RunRecord, model: keras.Model) -> None:
    """result.json and model.keras, which plain Keras loads and evaluates anywhere (chief only).

    The optimizer's slots are in the last checkpoint; the model gets a plain optimizer at the base rate. A run
    that was finished already keeps what it wrote then, with its speed.
    """
    finished_before = record.first_step == record.num_steps and (folder / RESULT_FILE).exists()
    if not finished_before:
        compile_model(model, build("optimizer", config.optimizer))
        temporary = folder / ".model.tmp.keras"
        try:
            model.save(temporary)
            temporary.replace(folder / "model.keras")
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(
                f"{folder / 'model.keras'} was not written: {error}; make room, then start again"
            ) from error
        write_result(folder, record)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
    speed = f"{record.images_per_second:,.0f} images/s over {record.num_ranks} rank(s), " if record.step_seconds else ""
    log.info("test: %s", shown or "no test data")
    log.info("%s%.1f s in all; results in %s", speed, record.seconds, folder)
