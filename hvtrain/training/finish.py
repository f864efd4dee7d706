"""Writes the results of a run: its record, the trained and the best model, and predictions for the report."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvtrain.checkpoint import model_state, store, writer
from hvtrain.config.schema import RunConfig
from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import IndexedSource
from hvtrain.errors import StorageError, TakenOverError, UserError, in_one_line
from hvtrain.keras.optimizer import num_reductions, sent_bytes
from hvtrain.models.parts import num_parameters
from hvtrain.system.files import read_json, write_json
from hvtrain.system.run_files import (
    RESULT_FILE,
    REVIEW_FILE,
    RunRecord,
    proof_in_words,
    write_result,
)
from hvtrain.tasks.examples import ReviewedExamples, as_numpy
from hvtrain.training.callbacks.run_context import RunContext, goodput_in_words
from hvtrain.training.run import Run, versions
from hvtrain.training.saved_model import BEST_FILE, export, save

log = logging.getLogger(__name__)

MAX_SECONDS = 10.0  # For the predictions, during which the other ranks wait.
MAX_BYTES = 256 << 20  # For examples and outputs together.


def make_record(context: RunContext, metrics: dict[str, float]) -> RunRecord:
    """Returns the run's figures. They are equal on all ranks, except for times and counts of this process.

    Args:
        context: The run's context, with its report complete.
        metrics: Results of test_metrics; empty if there is no test data.
    """
    run = context.run
    report = context.report
    position = context.position
    optimizer = context.model.optimizer
    # Proves that the ranks trained together. Its reductions are those of this process.
    proof: dict[str, Any] = {
        "reductions": num_reductions(optimizer),
        "synchronizations": run.strategy.num_synchronizations,
        "sent_bytes": sent_bytes(optimizer),
        "steps": (position.step - position.start_step) // run.plan.accumulate,
        "ranks": run.plan.size,
        "weight_checks": context.weights.num_checks,
        "steps_by_worker": list(run.strategy.steps_by_worker),
        "examples_each_epoch": report.examples_each_epoch,
        "examples": run.plan.num_examples,
        "skipped": report.num_skipped,
    }
    unit = run.task.unit(run.source)
    per_second = {}
    if unit and report.examples_per_second:
        name, per_example = unit
        per_second = {name: report.examples_per_second * per_example}

    return RunRecord(
        test_accuracy=metrics.get("test_accuracy"),
        test_loss=metrics.get("test_loss"),
        examples_per_second=report.examples_per_second,
        step_seconds=report.step_seconds,
        num_ranks=run.topology.size,
        num_parameters=num_parameters(context.model),
        num_steps=position.step,
        global_batch=run.plan.global_batch,
        # Of this start of the run, including restarts of its ranks.
        seconds=time.monotonic() - run.state.began,
        reductions=proof["reductions"],
        first_step=position.start_step,
        proof=proof,
        metrics=metrics,
        versions=versions(),
        config=run.config.record,
        split=asdict(report.split) if report.split else None,
        skipped_examples=report.num_skipped,
        per_second=per_second,
        changes=run.meta["changes"],
        differences=list(run.strategy.differences),
        num_replicas=run.strategy.num_computing,
        goodput=report.goodput.summary(time.time()),
        data=run.described,
    )


def steps_of_result(folder: Path) -> int | None:
    """Returns the number of steps in result.json; None if the file is missing or unreadable."""
    return read_json(folder / RESULT_FILE, dict).get("num_steps")


def write_results(run: Run, model: keras.Model, record: RunRecord) -> RunRecord:
    """Writes result.json, model.keras and best.keras (every rank).

    Returns the record, completed with the best checkpoint's figures and a sample. The saved models have
    no optimizer state, which is in the checkpoints. A run that was complete already keeps its old
    results, since they include its speed.
    """
    comm = run.strategy.comm
    folder = run.folder
    # A start that trained nothing has no speed, so older results are kept if they are of the same step.
    steps_before = comm.on_chief(lambda: steps_of_result(folder))
    log.info("test: %s", metrics_in_words(record.metrics))
    if record.first_step == record.num_steps == steps_before:
        log.info(
            f"this run had already finished and has been tested again; its results in {folder} stay as they are"
        )
        return record

    record = replace(record, best=_test_best(run, model, record))

    def write():
        export(model, run.source, run.task, run.topology, folder)
        complete = replace(record, sample=run.task.sample(model, run.source, run.topology))
        write_result(folder, complete)
        return complete

    with comm.whole_tables(model, folder):
        record = comm.on_chief(write)
    _log_results(record, folder)
    return record


def send_results(run: Run) -> None:
    """Uploads the results if run.dir is an address (chief only).

    Raises StorageError if the upload fails; with checkpoint.on_error=warn, only logs a warning, since the
    results are on this host.
    """
    try:
        run.state.store.send()
    except StorageError as error:
        if run.config.checkpoint.on_error == "stop" or isinstance(error, TakenOverError):
            raise
        log.warning(
            "%s; the results are in %s on this host (checkpoint.on_error=warn)", error, run.folder
        )


def _log_results(record: RunRecord, folder: Path) -> None:
    best = record.best
    if best and best["step"] != record.num_steps:
        log.info(
            f"best: step {best['step']:,} ({best['metric']} {best['value']:.4f}), in {BEST_FILE}; "
            f"{metrics_in_words(best['metrics'])}"
        )
    log.info("proof: %s", proof_in_words(record.proof))
    if record.sample:
        log.info("sample: %s", record.sample)

    speed = ""
    if record.step_seconds:
        rates = {"examples": record.examples_per_second, **record.per_second}
        # Replicas in one process, and workers with parameter servers, count like ranks.
        number = record.num_replicas
        kind = "rank" if number == record.num_ranks else "replica"
        speeds = ", ".join(f"{rate:,.0f} {unit}/s" for unit, rate in rates.items())
        speed = f"{speeds} over {number} {kind}(s), "
    log.info("goodput: %s", goodput_in_words(record.goodput))
    log.info("%s%.1f s in all; results in %s", speed, record.seconds, folder)


def test_metrics(run: Run, model: keras.Model) -> dict[str, float]:
    """Returns the metrics on the test data as "test_NAME"; empty if there is no test data (every rank)."""
    dataset = run.evaluation_data("test")
    if dataset is None:
        return {}
    metrics = run.strategy.evaluate(model, dataset)
    if metrics:
        metrics = run.task.results(metrics)
    return {f"test_{name}": value for name, value in metrics.items()}


def _test_best(run: Run, model: keras.Model, record: RunRecord) -> dict[str, Any] | None:
    """Tests the best checkpoint, saves it as best.keras and returns its figures (every rank).

    Returns None if there is none or, with a warning, if it cannot be read. The model keeps its last weights.
    """
    comm = run.strategy.comm
    checkpoints = run.folder / "checkpoints"
    best = comm.on_chief(lambda: _read_or_warn(writer.read_best, checkpoints))
    if best is None:
        return None

    def load():
        if "host" in best:
            raise UserError(f"it is on host {best['host']}")
        load_weights(run.config, model, checkpoints / store.folder_name(best["step"]))
        return True

    metrics = record.metrics
    last_weights = None
    # Even if the last checkpoint is the best: callbacks such as EarlyStopping may have
    # restored other weights after it.
    if best["step"] != record.num_steps or run.config.callbacks:
        # On every rank, since all of them test the best weights, each on its own shard.
        last_weights = model.get_weights()
        if not comm.on_chief(lambda: _read_or_warn(load)):
            return None
        comm.broadcast_model(model)
        metrics = test_metrics(run, model)
    with comm.whole_tables(model, run.folder):
        comm.on_chief(
            lambda: save(model, run.task, run.source.preprocessing(), run.folder / BEST_FILE)
        )

    if last_weights is not None:
        model.set_weights(last_weights)
    return {**best, "metrics": metrics}


def _read_or_warn(read: Callable[..., Any], *args: Any) -> Any:
    """Returns read(*args); None, with a warning, if the best checkpoint or its record cannot be read."""
    try:
        return read(*args)
    except UserError as error:
        log.warning(
            f"{BEST_FILE} is not written, because the best checkpoint cannot be read: {error}"
        )
        return None


def load_weights(
    config: RunConfig, model: keras.Model, path: Path, is_last: bool = False
) -> dict[str, Any] | None:
    """Sets the weights to those of a checkpoint or, with train.ema, to their averages (chief only).

    With is_last, a finished run's model gets the weights that it was tested with, which callbacks may have restored.
    Returns the manifest of the training data, if the checkpoint has it.

    Raises:
        UserError: The checkpoint is damaged, cannot be read, or belongs to another model.
    """
    checkpoint = store.read(path)
    if config.train.ema is None:
        model_state.restore(checkpoint, model, ("model/",))
    else:  # The averages are optimizer variables. Overwriting those is harmless, since no step follows.
        model_state.restore(checkpoint, model)
        model.optimizer.finalize_variable_values(model.trainable_variables)
    if is_last and steps_of_result(path.parents[1]) == checkpoint.step:
        restore_best(config, model, checkpoint.callbacks())
    return checkpoint.meta.get("data")


def restore_best(
    config: RunConfig, model: keras.Model, callbacks: dict[str, dict[str, Any]]
) -> None:
    """Sets the best weights that a callback kept, as EarlyStopping does at the end of training.

    Args:
        config: The run's settings, which name its callbacks.
        model: The model.
        callbacks: The state of the callbacks, from Checkpoint.callbacks().
    """
    for name, values in callbacks.items():
        if name in config.callbacks and "best_weights" in values:
            model.set_weights(values["best_weights"])


def metrics_in_words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()) or "no test data"


def write_review(run: Run, model: keras.Model) -> None:
    """Writes review.json, the report's predictions for some test examples (chief only).

    An error becomes a warning, since the run itself has finished.
    """
    if not run.config.run.report or not run.task.num_reviewed:
        return
    try:
        reviewed = _predict_some(run, model)
        figures = []
        if reviewed:
            figures = [asdict(figure) for figure in run.task.review(reviewed, model, run.source)]
        write_json(run.folder / REVIEW_FILE, figures, indent=None)
    except Exception as error:
        log.warning("the report will show no predictions: %s", in_one_line(error))


def _predict_some(run: Run, model: keras.Model) -> ReviewedExamples | None:
    """Returns test examples, or else validation examples, with the model's outputs; None if there are none.

    There are as many as the task reviews, or fewer if time or memory runs out. They are the first ones or,
    if single examples can be opened, spread evenly over the split; there may then be only half as many.
    """
    source = run.source
    limit = run.task.num_reviewed
    split = next((split for split in ("test", "validation") if source.num_examples(split)), None)
    if split is None:
        return None

    total = source.num_examples(split)
    batch_size = min(run.plan.batch_sizes[0], limit)
    # The chief reads examples of all ranks, like a single process. Files are often listed class by
    # class, so the first examples may all be of one class.
    if isinstance(source, IndexedSource):
        step = math.ceil(total / limit)
        data = source.spread(split, step, batch_size)
    else:
        step = 1
        data = source.evaluation(split, Topology(), batch_size)

    batches = []
    num_examples = 0
    num_bytes = 0
    began = time.monotonic()
    for inputs, targets, *_ in data.as_numpy_iterator():
        run.strategy.watchdog.progress.beat()
        outputs = keras.tree.map_structure(as_numpy, model(inputs, training=False))
        batches.append((inputs, targets, outputs))
        leaves = keras.tree.flatten(batches[-1])
        num_examples += len(leaves[0])
        num_bytes += sum(leaf.nbytes for leaf in leaves)
        if num_examples >= limit or num_bytes > MAX_BYTES or time.monotonic() - began > MAX_SECONDS:
            break

    if not batches:
        return None
    inputs, targets, outputs = keras.tree.map_structure(
        lambda *parts: np.concatenate(parts)[:limit], *batches
    )
    num_examples = min(num_examples, limit)
    return ReviewedExamples(inputs, targets, outputs, num_examples, split, total, step)
