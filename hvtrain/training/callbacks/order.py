"""All callbacks of a run, in their order."""

import re
import warnings
from importlib.util import find_spec
from typing import Any

import keras
from keras.callbacks import LambdaCallback

from hvtrain.checkpoint.writer import Writer
from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.config.validate import nearest
from hvtrain.errors import ConfigError
from hvtrain.keras.equality import WeightCheck
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.loop import CallSteps
from hvtrain.training.callbacks.checkpointing import (
    STEPS_BETWEEN_CLOCK_CHECKS,
    CallbackState,
    Checkpointing,
    Interruption,
    MemoryCommit,
)
from hvtrain.training.callbacks.console_progress import Progress
from hvtrain.training.callbacks.epoch_metrics import EpochMetrics, SameLogs, Validation
from hvtrain.training.callbacks.guard import Guard, Proof
from hvtrain.training.callbacks.layer_search import LayerSearch
from hvtrain.training.callbacks.one_batch import OneBatch
from hvtrain.training.callbacks.position import Position
from hvtrain.training.callbacks.recording import Recording, Skipped
from hvtrain.training.callbacks.speed import Throughput
from hvtrain.training.callbacks.timeline import TimelineTrace
from hvtrain.training.callbacks.tracking import Tracking
from hvtrain.training.resume import Start
from hvtrain.training.run import Run
from hvtrain.watchdog.progress import EXCHANGE


class Monitors:
    """Callbacks and their parts that are read at the end of a run, which begins at start."""

    def __init__(self, run: Run, model: keras.Model, start: Start) -> None:
        self.model, self.position = model, Position(run.plan, start.step)
        self.weights = WeightCheck(model, run.config.guard.every > 0, lambda: run.strategy.watchdog.phase(EXCHANGE))
        self.place = run, self.position, self.weights
        self.search = LayerSearch(*self.place) if run.config.guard.layers else None
        self.throughput, self.proof, self.skipped = Throughput(*self.place), Proof(*self.place), Skipped(*self.place)
        self.recording = Recording(*self.place, throughput=self.throughput)
        self.tracking = Tracking(*self.place, recording=self.recording)
        self.interruption = Interruption(run)
        self.writer = Writer(run.folder / "checkpoints", run.config.checkpoint, run.best, run.task.sign(run.best))


def make_callbacks(run: Run, start: Start, monitors: Monitors) -> list[keras.callbacks.Callback]:
    """Makes all callbacks, in this order.

    Count the step; check that it was reduced; time it. Make the epoch's metrics those of all ranks, check them and
    validate, so that later callbacks read true logs. Let the user's callbacks act, and stop all ranks if one requests
    it. Then record, save, track, and commit. The record comes before the checkpoint: a run that is killed continues
    from the checkpoint, and rows written after it would be missing.
    """
    config, strategy, place, position = run.config, run.strategy, monitors.place, monitors.position
    progress = strategy.watchdog.progress
    dataset = run.evaluation_data("validation")
    validation = Validation(*place, dataset=dataset, resumed=start.unlogged)
    own = strategy.comm.all_or_raise(lambda: own_callbacks(run, monitors.model, dataset is not None))
    state = CallbackState(own, start.callbacks, strategy.comm)
    interruption, writer = monitors.interruption, monitors.writer
    saved: dict[str, Any] = {"callback_state": state, "validation": validation}
    return [
        position,
        # First at the end of a step and last at its beginning, so that the watchdog can tell a step from a callback.
        LambdaCallback(on_train_batch_end=lambda batch, logs: progress.end_step(position.step)),
        *strategy.guards(),
        monitors.throughput,
        monitors.proof,
        *([monitors.search] if monitors.search else []),
        EpochMetrics(strategy, start.rank_state if position.in_epoch else {}, run.task.results),
        Guard(*place),
        validation,
        SameLogs(*place),
        *([OneBatch(*place)] if config.data.one_batch else []),
        *own.values(),
        interruption,
        state,
        *strategy.stop_callbacks(),
        monitors.recording,
        Checkpointing(*place, writer=writer, interruption=interruption, **saved),
        *([monitors.tracking] if run.topology.is_chief and config.tracker else []),
        *([Progress(*place, throughput=monitors.throughput)] if run.topology.is_chief else []),
        monitors.skipped,
        *([TimelineTrace(*place)] if config.profile.timeline else []),
        *([MemoryCommit(*place, **saved)] if strategy.membership.commit_steps else []),
        LambdaCallback(on_train_batch_begin=lambda batch, logs: progress.begin_step(position.step)),
    ]


def call_steps(config: RunConfig, strategy: Strategy, callbacks: list[keras.callbacks.Callback]) -> CallSteps:
    """Steps in one call of the graph: train.steps_per_execution, or 1 for a user's callback that acts on batches.

    A call must not cross the step intervals after which a callback acts.
    """
    hooks = [f"on_{prefix}batch_{when}" for prefix in ("", "train_") for when in ("begin", "end")]
    modules = {getattr(item, hook).__module__.split(".")[0] for item in callbacks for hook in hooks}
    # ModelCheckpoint and TensorBoard count batches themselves.
    counted = [getattr(item, name, None) for item in callbacks for name in ("save_freq", "update_freq")]
    # The chief alone has the callbacks that only write.
    by_batch, counts = strategy.comm.broadcast(
        (bool(modules - {"hvtrain", "keras"}), [steps for steps in counted if isinstance(steps, int)])
    )
    clock = STEPS_BETWEEN_CLOCK_CHECKS * config.train.accumulate if config.checkpoint.every_minutes else None
    traced = config.profile.steps if config.profile.timeline else None
    configured = [config.checkpoint.every_steps, config.train.validate_every_steps, config.guard.every, *counts]
    intervals = [steps for steps in (*configured, strategy.membership.commit_steps, clock, traced) if steps]
    fixed = 1 if config.guard.layers else config.train.steps_per_execution or (1 if by_batch else None)
    return CallSteps(fixed, intervals, strategy.comm.broadcast)


# They only write, and ranks would overwrite each other's files.
_WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
_REFUSED = {
    "BackupAndRestore": "would restore rank 0 alone; leave it out, since a run saves and resumes by itself",
    "SwapEMAWeights": "would exchange the weights that checkpoints save; leave it out and set "
    "train.ema=0.999, whose averages are validated and saved",
    "OrbaxCheckpoint": "is not made for several ranks of TensorFlow; use keras.callbacks.ModelCheckpoint",
}
"""Keras's callbacks that do harm in a run, and what to do instead."""


def own_callbacks(run: Run, model: keras.Model, validates: bool) -> dict[str, keras.callbacks.Callback]:
    """The user's callbacks by name, on every rank; those of Keras that only write are on the chief alone."""
    config, is_chief = run.config, run.topology.is_chief
    for name, settings in config.callbacks.items():
        package, _, kind = settings["_target_"].rpartition(".")
        if package.startswith("keras.") and kind in _REFUSED:
            raise ConfigError(f"callbacks.{name}: {kind} {_REFUSED[kind]}")
    built = {name: build(config, f"callbacks.{name}", keras.callbacks.Callback) for name in config.callbacks}
    # A model may have metrics of its own, beside the one object in which Keras keeps those of compile.
    names = dict.fromkeys([*run.task.metric_names, *(metric.name for metric in model.metrics)])
    names.pop("compile_metrics", None)
    metrics = [f"{prefix}{name}" for prefix in ("", "val_") for name in names]
    if run.best not in metrics and not built:  # Callbacks may add metrics.
        raise ConfigError(f"checkpoint.best={run.best} is not a metric of this run; {nearest(run.best, metrics)}")
    if validates and config.train.validate_every_epochs != 1:
        # Keras warns of these after each epoch without a validation.
        for name in metrics:
            warnings.filterwarnings("ignore", rf".*\bval_{re.escape(name.removeprefix('val_'))}\b.* available")
    for name, callback in built.items():
        if is_chief and isinstance(callback, keras.callbacks.TensorBoard) and not find_spec("tensorboard"):
            raise ConfigError(
                f"callbacks.{name} needs the package tensorboard, which is missing; pip install tensorboard"
            )
        monitor = str(getattr(callback, "monitor", ""))
        if monitor.startswith("val_") and not validates and getattr(callback, "save_best_only", True):
            takes = "dataset.num_validation=N" if "num_validation" in config.dataset else "as the split validation"
            raise ConfigError(
                f"callbacks.{name}.monitor={monitor} needs validation data and there is none; take some out of the "
                f"training data ({takes}) or choose ++callbacks.{name}.monitor={monitor[4:]}"
            )
    return {name: callback for name, callback in built.items() if is_chief or not isinstance(callback, _WRITERS)}
