"""A run from beginning to end, on every rank alike: train(config) -> RunRecord."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import keras
import tensorflow as tf

from hvtrain import console
from hvtrain.callbacks.callback_state import CallbackState
from hvtrain.callbacks.checkpointing import Checkpointing
from hvtrain.callbacks.guard import ADVICE, Guard, named
from hvtrain.callbacks.interruption import Interruption
from hvtrain.callbacks.metrics import EpochMetrics, build_metrics, evaluate
from hvtrain.callbacks.position import Position
from hvtrain.callbacks.progress import Progress, verbosity
from hvtrain.callbacks.proof import Proof, in_words
from hvtrain.callbacks.recording import Recording
from hvtrain.callbacks.resumed_metrics import ResumedMetrics
from hvtrain.callbacks.same_logs import SameLogs
from hvtrain.callbacks.throughput import Throughput
from hvtrain.callbacks.validation import Validation
from hvtrain.config import RunConfig, to_dict
from hvtrain.data.source import Source
from hvtrain.errors import Preempted, StorageError, TrainingError
from hvtrain.header import header, versions
from hvtrain.instantiate import build
from hvtrain.prepare import (
    Start,
    build_model,
    checkpoint_meta,
    compile_model,
    open_data,
    open_run_folder,
    own_callbacks,
    resume,
    seed_everything,
    training_batches,
)
from hvtrain.records import RESULT_FILE, RunRecord, write_result
from hvtrain.sameness import check_first_batches, check_same_run
from hvtrain.strategies.base import Strategy
from hvtrain.topology import Topology
from hvtrain.weighting import weigh

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
    """The story of a run (every rank). Raises Preempted after a signal, saved."""
    began = time.monotonic()
    topology = strategy.start()
    console.start_log(topology.is_chief)
    check_same_run(strategy, config)
    folder = strategy.on_chief(lambda: open_run_folder(config))
    console.log_to_file(folder / "logs", topology.rank)
    seed_everything(config, topology.rank)

    source, plan = open_data(config, strategy)
    topology = strategy.topology
    with strategy.scope():
        model = strategy.together(lambda: build_model(config, source, plan, strategy))
    start = resume(config, folder, model, plan, strategy)
    strategy.broadcast_model(model)
    weights = strategy.weight_check(model, enabled=config.guard.every > 0)
    weights("at the start", everything=True)
    log.info("%s", header(config, strategy, source, model, plan, folder, start.name))

    position = Position(plan, start.step)
    throughput = Throughput(position)
    accumulate = getattr(model.optimizer, "inner_optimizer", model.optimizer).gradient_accumulation_steps
    proof = Proof(strategy, position, weights, accumulate or 1)
    interruption = Interruption(config.train.max_time, began, strategy)
    callbacks = make_callbacks(config, strategy, source, folder, start, throughput, proof, interruption)

    def batches_from(step: int) -> tf.data.Dataset:
        batches = training_batches(source, plan, topology, config.seed, step)
        return batches if plan.is_even else weigh(batches, plan, topology.rank, step)

    with explained(source, strategy, model, position):
        if start.step < plan.num_steps and not start.ended:
            if config.guard.batches:
                check_first_batches(strategy, source, batches_from(start.step))
            if position.in_epoch:
                build_metrics(model, batches_from(start.step))
            strategy.fit(model, batches_from, plan, start.step, callbacks, verbosity(topology.is_chief))
        cut_short = interruption.reason
        test = evaluation_data(config, source, "test", topology) if not cut_short else None
        weights.level()
        metrics = evaluate(model, test, strategy) if test is not None else {}
    record = RunRecord(
        test_accuracy=metrics.get("accuracy"),
        test_loss=metrics.get("loss"),
        images_per_second=throughput.images_per_second,
        step_seconds=throughput.step_seconds,
        num_ranks=topology.size,
        num_parameters=model.count_params(),
        num_steps=position.step,
        global_batch=plan.global_batch,
        seconds=time.monotonic() - began,
        reductions=strategy.num_reductions(model.optimizer),
        first_step=start.step,
        proof=proof.numbers(strategy.num_reductions(model.optimizer)),
        metrics={f"test_{name}": value for name, value in metrics.items()},
        versions=versions(),
        config=to_dict(config),
    )
    if cut_short:
        log.info(
            "stopped by %s after step %s of %s; the same line with run.dir=%s goes on",
            cut_short,
            f"{position.step:,}",
            f"{plan.num_steps:,}",
            folder,
        )
    else:
        strategy.on_chief(lambda: write_outcome(config, folder, record, model))
    strategy.stop()
    if interruption.by_signal:
        raise Preempted
    return record


def leave(strategy: Strategy) -> None:
    """Tells the other ranks that this one fails, so that none waits for it; gives up after two seconds."""
    farewell = threading.Thread(target=strategy.stop, daemon=True)
    farewell.start()
    farewell.join(timeout=2.0)


@contextmanager
def explained(source: Source, strategy: Strategy, model: keras.Model, position: Position) -> Iterator[None]:
    """Turns TensorFlow's error about unreadable data, or a gradient that is not finite, into one that helps."""
    try:
        yield
    except tf.errors.OpError as error:
        ranks = strategy.ranks_at_fault(error, model.optimizer)
        if ranks:
            raise TrainingError(
                f"the gradient of step {position.step + 1:,} is not finite on {named(ranks)}; "
                f"nothing of it reached the weights; {ADVICE}"
            ) from error
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
    num_batches = -(-source.shard_sizes(split, topology.size, topology.weights)[topology.rank] // batch_size)
    dataset = source.evaluation(split, topology, batch_size)
    return dataset.apply(tf.data.experimental.assert_cardinality(num_batches))


def make_callbacks(
    config: RunConfig,
    strategy: Strategy,
    source: Source,
    folder: Path,
    start: Start,
    throughput: Throughput,
    proof: Proof,
    interruption: Interruption,
) -> list[keras.callbacks.Callback]:
    """In this order: count the step; see that it was reduced; time it; make the epoch's metrics those of all ranks,
    look at them and validate, so that whoever reads the logs after that reads the truth; let the user's callbacks
    act, and all ranks stop if one of them wishes to; then save, and record."""
    position, weights = proof.position, proof.weights
    callbacks = [position, *strategy.callbacks(), throughput, proof, EpochMetrics(strategy)]
    callbacks.append(Guard(weights, config.guard.every, strategy, position))
    if position.in_epoch:
        callbacks.append(ResumedMetrics(start.rank_state))
    validation = None
    dataset = evaluation_data(config, source, "validation", strategy.topology)
    if dataset is not None:
        every = (config.train.validate_every_epochs, config.train.validate_every_steps)
        validation = Validation(dataset, strategy, position, *every, weights)
        callbacks.append(validation)
    own = strategy.together(lambda: own_callbacks(config, strategy.topology.is_chief, dataset is not None))
    state = CallbackState(own, start.callbacks, strategy)
    callbacks += [SameLogs(strategy), *own.values(), interruption, state, *strategy.agreement()]
    meta = checkpoint_meta(config, position.plan)
    saving = (folder / "checkpoints", config.checkpoint, meta, strategy, position, validation, weights, state)
    callbacks.append(Checkpointing(*saving, interruption))
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
    log.info("proof: %s", in_words(record.proof))
    log.info("%s%.1f s in all; results in %s", speed, record.seconds, folder)
