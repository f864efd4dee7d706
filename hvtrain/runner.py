"""A run from beginning to end, on every rank alike: train(config) -> RunRecord."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict
from pathlib import Path

import keras
import tensorflow as tf

from hvtrain.checkpoint.writer import Writer
from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig, to_dict
from hvtrain.core.records import RESULT_FILE, RunRecord, write_result
from hvtrain.core.topology import Topology
from hvtrain.data.source import Source
from hvtrain.errors import Preempted
from hvtrain.restore.newest import find
from hvtrain.restore.resume import RunState, resume
from hvtrain.strategies import loop
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.evaluation import build_metrics, evaluate
from hvtrain.system import console
from hvtrain.system.versions import versions
from hvtrain.training import comm_tuning
from hvtrain.training.batch_weights import weigh
from hvtrain.training.callbacks.interruption import Interruption
from hvtrain.training.callbacks.order import make_callbacks, periods, steps_per_call
from hvtrain.training.callbacks.position import Position
from hvtrain.training.callbacks.progress_bar import verbosity
from hvtrain.training.callbacks.proof import Proof, in_words
from hvtrain.training.callbacks.skipped import Skipped
from hvtrain.training.callbacks.step_split import StepSplit
from hvtrain.training.callbacks.throughput import Throughput
from hvtrain.training.consistency import check_first_batches, check_same_data, check_same_run
from hvtrain.training.failures import explained, leave
from hvtrain.training.saved_model import export
from hvtrain.training.setup import (
    build_model,
    checkpoint_meta,
    evaluation_data,
    open_data,
    open_run_folder,
    seed_everything,
    training_batches,
)
from hvtrain.training.summary import header

log = logging.getLogger(__name__)


def train(config: RunConfig) -> RunRecord:
    """Trains, evaluates and writes the results; returns the same record on every rank.

    Raises UserError, on all ranks at once where it can, for what the user can mend.
    """
    strategy: Strategy = build("strategy", config.strategy)
    if config.comm == "auto":
        strategy.expect_restart()
    if config.profile:
        os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")  # It traces nothing later that it was not started for.
    try:
        return run(config, strategy)
    except BaseException as error:
        console.take_signals(console.note_signal)
        cause = strategy.cause_of(error)
        leave(strategy, cause or error)
        if cause:
            raise cause from error
        raise


def run(config: RunConfig, strategy: Strategy) -> RunRecord:
    """A run, in attempts where another plan takes over (every rank). Raises Preempted after a signal, saved."""
    run_state = RunState(time.monotonic())
    record = None
    with run_state.lock:
        while record is None:
            record = strategy.run_with_restarts(lambda: attempt(config, strategy, run_state))
    return record


def attempt(config: RunConfig, strategy: Strategy, run_state: RunState) -> RunRecord | None:
    """The story of a run, to its end; or, without a record, to where another plan goes on from the checkpoint."""
    topology = strategy.start()
    strategy.marks.timed = not config.train.deterministic
    console.start_log(topology.is_chief)
    strategy.watch_over(config.watchdog.abort_seconds)
    check_same_run(strategy, config)
    if not topology.is_chief:
        run_state.lock.release()  # Where ranks come and go, it may have been the chief.
    folder = run_state.folder = strategy.on_chief(lambda: open_run_folder(config, run_state.lock, run_state.folder))
    strategy.watchdog.folder = folder
    console.log_to_file(folder / "logs", topology.rank)
    keras.utils.clear_session()  # Or Keras names what a later attempt makes otherwise than the checkpoint does.
    seed_everything(config, topology.rank)

    found = find(folder, strategy, run_state, config.resume)
    source, plan = open_data(config, strategy, found.meta if found else None)
    meta = checkpoint_meta(config, plan, check_same_data(strategy, source, config.guard.data), run_state.run_id)
    topology = strategy.topology

    def batches_from(step: int) -> tf.data.Dataset:
        batches = training_batches(source, plan, topology, config.seed, step)
        return batches if plan.is_even else weigh(batches, plan, topology.rank, step)

    if config.comm == "auto" and topology.size > 1:
        first = comm_tuning.default(config)
        comm_tuning.tune(folder, strategy, lambda: build_model(config, source, plan, strategy), batches_from(0), first)
        keras.utils.clear_session()
        seed_everything(config, topology.rank)
    with strategy.scope():
        model = strategy.all_or_raise(lambda: build_model(config, source, plan, strategy))
    start = resume(found, model, plan, meta, config.guard.data, strategy)
    del found  # It is as large as the model and the optimizer.
    strategy.broadcast_model(model)
    weights = strategy.weight_check(model, enabled=config.guard.every > 0)
    weights("at the start", everything=True)
    log.info("%s", header(config, strategy, source, model, plan, folder, start))

    position = Position(plan, start.step)
    split = StepSplit(strategy, Throughput(position))
    accumulate = getattr(model.optimizer, "inner_optimizer", model.optimizer).gradient_accumulation_steps
    proof = Proof(strategy, position, weights, accumulate or 1)
    interruption = Interruption(config.train.max_time, run_state.began, strategy, run_state.signals)
    writer = Writer(folder / "checkpoints", config.checkpoint)
    skipped = Skipped(source, strategy)
    more = (split, proof, interruption, skipped, writer)
    callbacks = make_callbacks(config, strategy, source, meta, run_state, start, *more)
    calls = loop.Calls(steps_per_call(config, callbacks), periods(config, strategy), strategy.broadcast)

    with writer, explained(source, strategy, model, position):
        if start.step < plan.num_steps and not start.ended:
            if config.guard.batches:
                check_first_batches(strategy, source, batches_from(start.step))
            if position.in_epoch:
                build_metrics(model, batches_from(start.step))
            verbose = verbosity(topology.is_chief)
            loop.train(model, batches_from, plan, start.step, callbacks, verbose, calls, strategy.marks)
        cut_short = interruption.reason
        if plan.hands_over and position.step == plan.num_steps and not cut_short:
            return None
        test = evaluation_data(config, source, "test", topology) if not cut_short else None
        weights.average_untrained()
        metrics = evaluate(model, test, strategy) if test is not None else {}
        skipped.tell()
    record = RunRecord(
        test_accuracy=metrics.get("accuracy"),
        test_loss=metrics.get("loss"),
        images_per_second=split.throughput.images_per_second,
        step_seconds=split.throughput.step_seconds,
        num_ranks=topology.size,
        num_parameters=model.count_params(),
        num_steps=position.step,
        global_batch=plan.global_batch,
        seconds=time.monotonic() - run_state.began,
        reductions=strategy.num_reductions(model.optimizer),
        first_step=start.step,
        proof=proof.numbers(strategy.num_reductions(model.optimizer)),
        metrics={f"test_{name}": value for name, value in metrics.items()},
        versions=versions(),
        config=to_dict(config),
        split=asdict(split.split) if split.split else None,
        skipped_examples=skipped.num_examples,
    )
    if cut_short:
        done = f"{position.step:,} of {plan.num_steps:,}"
        log.info("stopped by %s after step %s; the same line with run.dir=%s goes on", cut_short, done, folder)
    else:
        strategy.on_chief(lambda: write_outcome(folder, record, model, source, topology))
        if split.split:
            log.info("%s", split.split.in_words(topology.size))
    strategy.stop()
    if interruption.by_signal:
        raise Preempted
    return record


def write_outcome(folder: Path, record: RunRecord, model: keras.Model, source: Source, topology: Topology) -> None:
    """result.json, and the model for plain Keras (chief only).

    The optimizer's state is in the last checkpoint. A run that was finished already keeps what it wrote then, with
    its speed.
    """
    finished_before = record.first_step == record.num_steps and (folder / RESULT_FILE).exists()
    if not finished_before:
        export(model, source, topology, folder)
        write_result(folder, record)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
    speed = f"{record.images_per_second:,.0f} images/s over {record.num_ranks} rank(s), " if record.step_seconds else ""
    log.info("test: %s", shown or "no test data")
    log.info("proof: %s", in_words(record.proof))
    log.info("%s%.1f s in all; results in %s", speed, record.seconds, folder)
