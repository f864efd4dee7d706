"""What a finished run leaves: its results, the trained model, and the model of its best checkpoint."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from hvtrain.checkpoint import store, writer
from hvtrain.config.schema import RunConfig
from hvtrain.core.proof import proof_in_words
from hvtrain.core.records import RESULT_FILE, RunRecord, write_result
from hvtrain.errors import UserError
from hvtrain.models.averages import take_averages
from hvtrain.training.run import Run
from hvtrain.training.saved_model import BEST_FILE, export, save

log = logging.getLogger(__name__)


def write_outcome(run: Run, model: keras.Model, record: RunRecord) -> RunRecord:
    """Writes result.json, model.keras and best.keras; returns the record with the best checkpoint's (every rank).

    Of the models only the weights are kept; the optimizer's state is in the checkpoints. A run that was complete
    already keeps its results, for their speed.
    """
    comm, folder = run.strategy.comm, run.folder
    if record.first_step == record.num_steps and comm.on_chief((folder / RESULT_FILE).exists):
        log.info("test: %s", in_words(record.metrics))
        log.info("this run was finished already and has been tested again; its results in %s stay as they are", folder)
        return record
    record = replace(record, best=_test_best(run, model, record))

    def write() -> RunRecord:
        export(model, run.source, run.task, run.topology, folder)
        complete = replace(record, sample=run.task.sample(model, run.source, run.topology))
        write_result(folder, complete)
        return complete

    record = comm.on_chief(write)
    log.info("test: %s", in_words(record.metrics))
    if record.best and record.best["step"] != record.num_steps:
        why = "step {step:,} ({metric} {value:.4f})".format(**record.best)
        log.info("best: %s, in %s; %s", why, BEST_FILE, in_words(record.best["metrics"]))
    log.info("proof: %s", proof_in_words(record.proof))
    if record.sample:
        log.info("sample: %s", record.sample)
    speed = f"{_speed(record)} over {_trained(record)}, " if record.step_seconds else ""
    log.info("%s%.1f s in all; results in %s", speed, record.seconds, folder)
    return record


def test_metrics(run: Run, model: keras.Model) -> dict[str, float]:
    """The metrics of the test data by "test_NAME"; empty if there are none (every rank)."""
    test = run.evaluation_data("test")
    found = run.strategy.evaluate(model, test) if test is not None else {}
    return {f"test_{name}": value for name, value in (run.task.results(found) if found else found).items()}


def _test_best(run: Run, model: keras.Model, record: RunRecord) -> dict[str, Any] | None:
    """Tests the best checkpoint and saves it as best.keras; None if this run has none (every rank).

    The model's weights are the same afterwards. A finished run does not fail for a checkpoint that cannot be read.
    """
    comm, last = run.strategy.comm, None
    best = comm.on_chief(lambda: writer.read_best(run.folder / "checkpoints"))
    if best is None:
        return None
    metrics = record.metrics
    if best["step"] != record.num_steps:
        last = model.get_weights()
        if not comm.on_chief(lambda: _load(run, model, best)):
            return None
        comm.broadcast_model(model)
        metrics = test_metrics(run, model)
    comm.on_chief(lambda: save(model, run.task, run.source.preprocessing(), run.folder / BEST_FILE))
    if last is not None:
        model.set_weights(last)
    return {**best, "metrics": metrics}


def _load(run: Run, model: keras.Model, best: dict[str, Any]) -> bool:
    """Sets the weights to those of the best checkpoint; False, with a warning, if it cannot be read (chief only)."""
    try:
        if "host" in best:
            raise UserError(f"it is on host {best['host']}")
        load_weights(run.config, model, run.folder / "checkpoints" / store.folder_name(best["step"]))
    except UserError as error:
        log.warning("%s is not written, for the best checkpoint cannot be read: %s", BEST_FILE, error)
        return False
    return True


def load_weights(config: RunConfig, model: keras.Model, path: Path) -> dict[str, Any] | None:
    """Sets the weights to those of a checkpoint, or to their averages (chief only). Raises UserError.

    Returns the manifest of the data on which it was trained, if the checkpoint has it.
    """
    saved = store.read(path)
    if config.train.ema is None:
        store.restore(saved, model, ("model",))
    else:  # The averages are the optimizer's, which has no step left to do.
        store.restore(saved, model)
        take_averages(model)
    return saved.meta.get("data")


def _speed(record: RunRecord) -> str:
    rates = {"examples": record.examples_per_second, **record.per_second}
    return ", ".join(f"{rate:,.0f} {unit}/s" for unit, rate in rates.items())


def _trained(record: RunRecord) -> str:
    """Who trained, in words: the ranks, or the replicas of one process or of parameter servers."""
    number = record.num_replicas or record.num_ranks
    return f"{number} {'rank' if number == record.num_ranks else 'replica'}(s)"


def in_words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()) or "no test data"
