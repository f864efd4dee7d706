"""Trains a model from beginning to end, the same on every rank: train(config) -> RunRecord."""

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from hvtrain.checkpoint.receipts import ReceiptWriter
from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.data import fitted
from hvtrain.data.description import describe as describe_data
from hvtrain.errors import Stopped
from hvtrain.models.first_weights import begin_with
from hvtrain.report.page import CURVES_FILE, REPORT_FILE, write_report
from hvtrain.strategies.base import Strategy, report_failures
from hvtrain.strategies.loop import add_batch_axis, build_metrics
from hvtrain.system import console, secrets
from hvtrain.system.files import write_atomic
from hvtrain.system.run_files import CONFIG_FILE, RESULT_FILE, RunRecord, remove_if_empty
from hvtrain.system.storage.runs import open_store
from hvtrain.system.text import duration
from hvtrain.training import comm_tuning
from hvtrain.training.callbacks.checkpointing import Interruption
from hvtrain.training.callbacks.epochs import report_skipped
from hvtrain.training.callbacks.guard import explain_errors
from hvtrain.training.callbacks.make_callbacks import call_steps, make_callbacks
from hvtrain.training.callbacks.publishing import Metrics, Tracking
from hvtrain.training.callbacks.repeated_step import LayerSearch
from hvtrain.training.callbacks.run_context import RunContext
from hvtrain.training.consistency import (
    check_first_batches,
    check_same_data,
    check_same_run,
    facts_of,
)
from hvtrain.training.copies import begin_copies
from hvtrain.training.find_checkpoint import find_checkpoint
from hvtrain.training.finish import (
    make_record,
    metrics_in_words,
    restore_best,
    send_results,
    steps_of_result,
    test_metrics,
    write_results,
    write_review,
)
from hvtrain.training.resume import changed_since, check_fits, checkpoint_meta, resume
from hvtrain.training.run import ResumePoint, Run, RunState, Start, describe, summary
from hvtrain.training.run_folder import note_start, open_run_folder
from hvtrain.training.saved_model import MODEL_FILE
from hvtrain.training.setup import build_model, open_data, open_task_and_layers, plan_run

log = logging.getLogger(__name__)

# One attempt at a run. Returns its result, or None if another attempt must continue.
Attempt = Callable[[RunConfig, Strategy, RunState], Any]


def train(config: RunConfig) -> RunRecord:
    """Trains, evaluates and writes the results; returns the same record on every rank.

    Raises UserError for what the user can fix, on all ranks where possible, and Stopped after a signal,
    with the run saved.
    """
    return run_attempts(config, whole_run)


def run_attempts(config: RunConfig, attempt: Attempt) -> Any:
    """Repeats attempts at a run, or at a command that needs part of a run, and returns the first result (every rank).

    If this rank fails, it tells the others why.
    """
    strategy: Strategy = build(config, "strategy", Strategy)
    state = RunState(time.monotonic())
    if config.comm.tune:
        strategy.expect_restart()
    if config.profile.timeline:
        # Horovod can start a timeline later only if this is set before hvd.init().
        os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    try:
        with report_failures(strategy, state.notice.send_failure):
            return run_to_end(config, strategy, attempt, state)
    finally:
        state.notice.wait()


def run_to_end(
    config: RunConfig,
    strategy: Strategy,
    attempt: Attempt,
    state: RunState,
) -> Any:
    """Repeats attempts until one has a result, and returns it (every rank).

    Raises Stopped after a signal, with the run saved.
    """
    record = None
    with state.lock:
        try:
            while record is None:
                record = strategy.membership.run_with_restarts(
                    lambda: attempt(config, strategy, state)
                )
        except BaseException:  # Includes Ctrl-C.
            if state.is_new_folder and state.folder and strategy.comm.topology.is_chief:
                remove_if_empty(state.folder)
            raise
    return record


def whole_run(config: RunConfig, strategy: Strategy, state: RunState) -> RunRecord | None:
    """Runs from the newest checkpoint, or from step 0, to the end.

    Returns None if another attempt, with another plan, has to continue.
    """
    run, saved = open_run(config, strategy, state)
    model = make_model(run)
    start = restore(run, model, saved)
    del saved  # Frees the checkpoint, which is as large as the model and the optimizer.
    context = RunContext.begin(run, model, start.step)
    with Tracking(context) as tracking:
        fit(context, start, tracking)
        return finish(context, tracking)


def open_run(
    config: RunConfig, strategy: Strategy, state: RunState, parent: str = "runs"
) -> tuple[Run, ResumePoint | None]:
    """Joins the ranks, agrees on the run folder and the checkpoint to resume, opens the data and makes the plan.

    Args:
        parent: The folder in which the run folder is created if run.dir is not set.

    Returns:
        The run, and the checkpoint from which it resumes, or None if it begins at step 0.
    """
    join_ranks(config, strategy)
    config = claim_folder(config, strategy, state, parent)
    # Elastic ranks continue from memory, but a rank that has just joined has no state in memory.
    is_elastic = strategy.membership.commit_steps > 0
    folder = Path(str(config.run.dir))
    saved = find_checkpoint(
        folder, strategy.comm, state, config.resume, is_elastic, config.checkpoint.copies
    )
    return open_inputs(config, strategy, state, saved), saved


def join_ranks(config: RunConfig, strategy: Strategy) -> None:
    """Starts the strategy, rank 0's log and the watchdog, and refuses ranks whose runs differ (every rank)."""
    topology = strategy.start()
    strategy.marks.timed = not config.train.deterministic
    console.start_log(topology.is_chief)
    strategy.start_watchdog(config.watchdog.abort_seconds)
    check_same_run(strategy.comm, config)


def claim_folder(config: RunConfig, strategy: Strategy, state: RunState, parent: str) -> RunConfig:
    """Opens and locks the run folder on rank 0, and returns the config with its path on every rank."""
    comm = strategy.comm
    if not comm.topology.is_chief:
        state.lock.release()  # This rank may have been the chief before ranks left or joined.
    # After ranks left or joined, a store that is already open is kept.
    state.store = comm.all_or_raise(
        lambda: state.store if state.folder else open_store(config.run.dir)
    )
    folder, stored_run = comm.on_chief(
        lambda: (open_run_folder(config, state, parent), state.store.run)
    )
    if stored_run:
        joins = comm.topology.local_rank == 0 and not comm.topology.is_chief
        # Every rank waits, since it looks for checkpoints on its host next.
        comm.all_or_raise(lambda: state.store.join(stored_run) if joins else None)
    state.folder = folder
    strategy.watchdog.folder = folder
    strategy.watchdog.tell = state.notice.note
    console.log_to_file(folder / "logs", comm.topology.rank)
    comm.on_chief(
        lambda: state.notice.begin(secrets.chosen_addresses(config.notify, os.environ), folder)
    )
    # A copy of config.data too: the plan sets data.uneven, and another attempt may need another choice.
    return replace(config, run=replace(config.run, dir=str(folder)), data=replace(config.data))


def open_inputs(
    config: RunConfig, strategy: Strategy, state: RunState, saved: ResumePoint | None
) -> Run:
    """Opens the data set and the task, and plans the run; returns the Run (every rank)."""
    comm = strategy.comm
    folder = Path(str(config.run.dir))
    saved_meta = saved.meta if saved else {}
    changed = changed_since(saved_meta, config)
    fitted_files = None
    # On a resume, a tokenizer, for example, must not be fitted again, not even to other files.
    if saved and not any(re.match(r"dataset\.(?!(\w+_)?(dir|file)$)", name) for name in changed):
        fitted_files = comm.on_chief(lambda: fitted.read(folder))

    source = comm.all_or_raise(lambda: open_data(config, strategy.topology.rank, fitted_files))
    plan, topology = plan_run(config, source, strategy, saved_meta or None)
    # After the plan, which refuses too few examples: the task might blame something
    # else, such as missing classes.
    in_pipeline = plan.is_resized or strategy.cuts_batches or not strategy.augments_in_step
    task = comm.all_or_raise(lambda: open_task_and_layers(config, source, in_pipeline))
    manifest = check_same_data(comm, source, config.guard.data)
    meta = checkpoint_meta(config, plan, manifest, state.run_id, saved, changed)
    if saved:
        comm.on_chief(lambda: check_fits(saved, meta, config.guard.data))
    described = comm.all_or_raise(lambda: describe_data(source))
    return Run(
        config,
        strategy,
        topology,
        source,
        task,
        plan,
        folder,
        meta,
        state,
        changed,
        described,
    )


def make_model(run: Run) -> keras.Model:
    """Builds the model (every rank); with comm.tune, first chooses how its gradients are sent."""
    strategy = run.strategy

    def new_model():
        return build_model(run.config, run.source, run.task, run.plan, strategy)

    if run.config.comm.tune and run.topology.size > 1:
        comm_tuning.tune(run, new_model)
    return strategy.comm.all_or_raise(new_model)


def restore(run: Run, model: keras.Model, saved: ResumePoint | None) -> Start:
    """Sets all ranks' weights to the checkpoint's, or else to the initial ones; returns where to start (every rank)."""
    comm = run.strategy.comm
    options = run.config.model_options
    weights = options.weights
    if saved is None and weights:
        comm.on_chief(lambda: begin_with(model, weights, options.weights_except or ()))
    return resume(model, saved, comm)


def fit(context: RunContext, start: Start, tracking: Tracking) -> None:
    """Trains from the start to the end of the plan, unless training was complete already (every rank)."""
    run = context.run
    model = context.model
    config = run.config
    strategy = run.strategy
    search = LayerSearch(context) if config.guard.layers else None
    # From here on a signal waits until the run can be saved.
    interruption = Interruption(context)
    copies = begin_copies(run)

    def send():
        copies.send()
        run.state.store.send()

    writer = ReceiptWriter(
        run.folder / "checkpoints", config.checkpoint, run.best, run.task.sign(run.best), send
    )

    context.weights("at the start", everything=True)
    writer.begin(start.step, lambda: facts_of(run))
    lines = describe(run, model, start)
    log.info(summary(lines))
    hosts = strategy.hosts()
    has_steps_left = start.step < run.plan.num_steps and not start.ended
    if has_steps_left:
        fitted_parts = strategy.comm.all_or_raise(lambda: fitted.collect(run.source))
        strategy.comm.on_chief(lambda: fitted.write(fitted_parts, run.folder))

    metrics = Metrics(context, writer)
    callbacks = make_callbacks(context, start, interruption, writer, tracking, search, metrics)
    with copies, writer, metrics, explain_errors(context, search.find_origin if search else None):
        if not has_steps_left:
            end_training(context, start, tracking)
            return
        if config.checkpoint.copies and run.topology.is_chief:
            writer.send_missing()
        check_first_batches(run, start.step)
        if context.position.in_epoch:
            build_metrics(model, add_batch_axis(run.source.element_spec))
        steps = call_steps(run, callbacks)
        strategy.check_plan(run.plan)
        # Written only now, so that a run that is refused earlier leaves neither a folder nor settings.
        strategy.comm.on_chief(lambda: write_atomic(run.folder / CONFIG_FILE, run.state.settings))
        if run.topology.is_chief:
            note_start(run, hosts, lines, start.step)
        strategy.fit(model, run.batches_from, run.plan, start.step, callbacks, steps)


def end_training(context: RunContext, start: Start, tracking: Tracking) -> None:
    """Restores the final weights of a run whose training was complete before this start (every rank)."""
    run = context.run
    model = context.model
    # With train.ema, the weights become their averages.
    model.optimizer.finalize_variable_values(model.trainable_variables)
    restore_best(run.config, model, start.callbacks)
    # The start that completed the training may have ended before its trackers received the results.
    lacks_results = run.topology.is_chief and steps_of_result(run.folder) != start.step
    if lacks_results and run.config.tracker:
        tracking.on_train_begin()


def finish(context: RunContext, tracking: Tracking) -> RunRecord | None:
    """Evaluates on the test data and writes the results (every rank).

    Returns None if another attempt, with another plan, has to continue. Raises Stopped after a signal.
    """
    run = context.run
    model = context.model
    plan = run.plan
    report = context.report
    step = context.position.step
    continues = report.rebalanced or (plan.ends_early and step == plan.num_steps)
    if continues and not report.stopped_by:
        return None

    metrics = {}
    with explain_errors(context):
        context.weights.average_untrained()
        if not report.stopped_by:
            metrics = test_metrics(run, model)
        report_skipped(run, report)
    record = make_record(context, metrics)

    if report.stopped_by:
        message = (
            f"stopped by {report.stopped_by} after step {step:,} of {plan.run_steps:,}; "
            f"run the same command with run.dir={run.state.store.address or run.folder} to continue"
        )
        log.info(message)
        run.state.notice.send_stop(message)
    else:
        record = write_results(run, model, record)
        comm = run.strategy.comm
        with comm.whole_tables(model, run.folder):
            comm.on_chief(lambda: write_review(run, model))
        if report.split:
            log.info(report.split.in_words(run.topology.size))
    run.strategy.stop()

    if not report.stopped_by:
        if run.topology.is_chief and run.config.run.report:
            write_report(run.folder, with_diff=not run.config.tracker)
        tracking.finish("finished", record.metrics, result_files(run.folder))
        seconds = duration(record.seconds)
        run.state.notice.send_success(
            f"{metrics_in_words(record.metrics)}; {seconds} on {plan.size} rank(s)"
        )
    if run.topology.is_chief:
        send_results(run)
    run.state.notice.wait()
    if report.exit_code:
        raise Stopped(report.exit_code)
    return record


def result_files(folder: Path) -> list[Path]:
    """Returns the files that a finished run's trackers receive, without those that do not exist.

    These are the settings, the results, the report, its curves, and the best model or else the last one.
    """
    model = next(folder.glob("best.*"), folder / MODEL_FILE)
    files = [
        *(folder / name for name in (CONFIG_FILE, RESULT_FILE, REPORT_FILE, CURVES_FILE)),
        model,
    ]
    return [path for path in files if path.exists()]
