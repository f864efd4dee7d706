"""All callbacks of a run, in their order."""

from dataclasses import dataclass

import keras
from keras.callbacks import LambdaCallback

from hvtrain.checkpoint.writer import Writer
from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.errors import ConfigError
from hvtrain.restore.resume import Start
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.parts import WeightCheck
from hvtrain.training.callbacks.callback_state import CallbackState
from hvtrain.training.callbacks.checkpointing import STEPS_BETWEEN_CLOCK_CHECKS, Checkpointing, MemoryCommit
from hvtrain.training.callbacks.epoch_metrics import EpochMetrics, SameLogs
from hvtrain.training.callbacks.guard import Guard
from hvtrain.training.callbacks.interruption import Interruption
from hvtrain.training.callbacks.position import Position
from hvtrain.training.callbacks.progress_bar import Progress, verbosity
from hvtrain.training.callbacks.proof import Proof
from hvtrain.training.callbacks.recording import Recording
from hvtrain.training.callbacks.skipped import Skipped
from hvtrain.training.callbacks.speed import StepSplit, Throughput
from hvtrain.training.callbacks.timeline import TimelineTrace
from hvtrain.training.callbacks.validation import Validation
from hvtrain.training.run import Run


@dataclass(frozen=True)
class Monitors:
    """Callbacks and their parts that are read at the end of a run."""

    position: Position
    split: StepSplit
    weights: WeightCheck
    proof: Proof
    interruption: Interruption
    skipped: Skipped
    writer: Writer


def make_monitors(run: Run, model: keras.Model, start: Start) -> Monitors:
    """Makes the monitors of a run that begins at start."""
    position = Position(run.plan, start.step)
    weights = run.strategy.guards.weight_check(model, enabled=run.config.guard.every > 0)
    return Monitors(
        position,
        StepSplit(run, Throughput(position)),
        weights,
        Proof(run, position, weights),
        Interruption(run),
        Skipped(run),
        Writer(run.folder / "checkpoints", run.config.checkpoint),
    )


def make_callbacks(run: Run, start: Start, monitors: Monitors) -> list[keras.callbacks.Callback]:
    """Makes all callbacks, in this order.

    Count the step; check that it was reduced; time it. Make the epoch's metrics those of all ranks, check them and
    validate, so that later callbacks read true logs. Let the user's callbacks act, and stop all ranks if one requests
    it. Then record, save, and commit. The record comes before the checkpoint: a run that is killed continues from the
    checkpoint, and rows written after it would be missing.
    """
    config, strategy, position, weights = run.config, run.strategy, monitors.position, monitors.weights
    throughput, progress = monitors.split.throughput, strategy.watchdog.progress
    # First at the end of a step and last at its beginning, so that the watchdog can tell a step from a callback.
    step_ends = LambdaCallback(on_train_batch_end=lambda batch, logs: progress.end_step(position.step))
    step_begins = LambdaCallback(on_train_batch_begin=lambda batch, logs: progress.begin_step(position.step))

    callbacks = [position, step_ends, *strategy.guards.callbacks(), throughput, monitors.proof]
    resumed = start.rank_state if position.in_epoch else {}
    callbacks += [EpochMetrics(strategy.comm, resumed), Guard(run, position, weights)]
    dataset = run.evaluation_data("validation")
    validation = Validation(run, position, weights, dataset) if dataset is not None else None
    if validation:
        callbacks.append(validation)
    own = strategy.comm.all_or_raise(lambda: own_callbacks(config, run.topology.is_chief, validation is not None))
    state = CallbackState(own, start.callbacks, strategy.comm)
    callbacks += [SameLogs(strategy.comm), *own.values(), monitors.interruption, state]
    callbacks += [*strategy.guards.stop_callbacks(), monitors.split, Recording(run, position, throughput)]
    callbacks.append(Checkpointing(run, position, weights, state, monitors.writer, validation, monitors.interruption))
    if verbosity(run.topology.is_chief) == 2:
        callbacks.append(Progress(position))
    callbacks.append(monitors.skipped)
    if config.profile.timeline:
        callbacks.append(TimelineTrace(run, position))
    if strategy.membership.commit_steps:
        callbacks.append(MemoryCommit(run, position, weights, state))
    return [*callbacks, step_begins]


def step_intervals(config: RunConfig, strategy: Strategy) -> list[int]:
    """Step intervals that a call of the graph must not cross, because a callback acts after each of them."""
    clock = STEPS_BETWEEN_CLOCK_CHECKS * config.train.accumulate if config.checkpoint.every_minutes else None
    traced = config.profile.steps if config.profile.timeline else None
    configured = [config.checkpoint.every_steps, config.train.validate_every_steps, config.guard.every]
    return [steps for steps in (*configured, strategy.membership.commit_steps, clock, traced) if steps]


def steps_per_call(config: RunConfig, callbacks: list[keras.callbacks.Callback]) -> int | None:
    """train.steps_per_execution; if it is not set, 1 for a user's callback that acts on batches, else None."""
    hooks = [f"on_{prefix}batch_{when}" for prefix in ("", "train_") for when in ("begin", "end")]
    own = [type(item) for item in callbacks if type(item).__module__.split(".")[0] not in ("hvtrain", "keras")]
    by_batch = any(getattr(kind, hook) is not getattr(keras.callbacks.Callback, hook) for kind in own for hook in hooks)
    return config.train.steps_per_execution or (1 if by_batch else None)


# They only write, and ranks would overwrite each other's files.
_WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)


def own_callbacks(config: RunConfig, is_chief: bool, validates: bool) -> dict[str, keras.callbacks.Callback]:
    """The user's callbacks by name, on every rank; those of Keras that only write are on the chief alone."""
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
    return {name: callback for name, callback in built.items() if is_chief or not isinstance(callback, _WRITERS)}
