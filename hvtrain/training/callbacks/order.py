"""All callbacks of a run, in their order."""

from __future__ import annotations

from dataclasses import dataclass

import keras

from hvtrain.checkpoint.writer import Writer
from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.errors import ConfigError
from hvtrain.restore.resume import Start
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.parts import WeightCheck
from hvtrain.training.callbacks.callback_state import CallbackState
from hvtrain.training.callbacks.checkpointing import STEPS_BETWEEN_CLOCK_CHECKS, Checkpointing
from hvtrain.training.callbacks.epoch_metrics import EpochMetrics
from hvtrain.training.callbacks.guard import Guard
from hvtrain.training.callbacks.heartbeat import StepBegins, StepEnds
from hvtrain.training.callbacks.interruption import Interruption
from hvtrain.training.callbacks.memory_commit import MemoryCommit
from hvtrain.training.callbacks.position import Position
from hvtrain.training.callbacks.progress_bar import Progress, verbosity
from hvtrain.training.callbacks.proof import Proof
from hvtrain.training.callbacks.recording import Recording
from hvtrain.training.callbacks.resumed_metrics import ResumedMetrics
from hvtrain.training.callbacks.same_logs import SameLogs
from hvtrain.training.callbacks.skipped import Skipped
from hvtrain.training.callbacks.step_split import StepSplit
from hvtrain.training.callbacks.throughput import Throughput
from hvtrain.training.callbacks.timeline import TimelineTrace
from hvtrain.training.callbacks.validation import Validation
from hvtrain.training.run import Run


@dataclass(frozen=True)
class Monitors:
    """Callbacks, and parts of them, whose counts the end of a run reads."""

    position: Position
    split: StepSplit
    weights: WeightCheck
    proof: Proof
    interruption: Interruption
    skipped: Skipped
    writer: Writer


def make_monitors(run: Run, model: keras.Model, start: Start) -> Monitors:
    """Those of a run that begins at start."""
    strategy, position = run.strategy, Position(run.plan, start.step)
    weights = strategy.guards.weight_check(model, enabled=run.config.guard.every > 0)
    accumulate = getattr(model.optimizer, "inner_optimizer", model.optimizer).gradient_accumulation_steps
    return Monitors(
        position,
        StepSplit(strategy, Throughput(position)),
        weights,
        Proof(strategy, position, weights, accumulate or 1),
        Interruption(run.config.train.max_time, run.state.began, strategy, run.state.signals),
        Skipped(run.source, strategy),
        Writer(run.folder / "checkpoints", run.config.checkpoint),
    )


def make_callbacks(run: Run, start: Start, monitors: Monitors) -> list[keras.callbacks.Callback]:
    """All callbacks, in this order: count the step; check that it was reduced; time it; make the epoch's metrics those
    of all ranks, check them and validate, so that later callbacks read true logs; let the user's callbacks act, and
    stop all ranks if one of them requests it; then record, save, and commit. A run that is killed continues from
    what was saved: what was recorded later than that would be missing."""
    config, strategy, position, weights = run.config, run.strategy, monitors.position, monitors.weights
    throughput = monitors.split.throughput
    callbacks = [position, StepEnds(strategy, position), *strategy.guards.callbacks(), throughput, monitors.proof]
    callbacks.append(EpochMetrics(strategy.comm))
    callbacks.append(Guard(weights, config.guard.every, strategy, position))
    if position.in_epoch:
        callbacks.append(ResumedMetrics(start.rank_state))
    validation = None
    dataset = run.evaluation_data("validation")
    if dataset is not None:
        every = (config.train.validate_every_epochs, config.train.validate_every_steps)
        validation = Validation(dataset, strategy, position, *every, weights)
        callbacks.append(validation)
    own = strategy.comm.all_or_raise(lambda: own_callbacks(config, run.topology.is_chief, dataset is not None))
    state = CallbackState(own, start.callbacks, strategy)
    callbacks += [SameLogs(strategy), *own.values(), monitors.interruption, state, *strategy.guards.stop_callbacks()]
    callbacks.append(monitors.split)
    callbacks.append(Recording(run.folder, strategy, position, throughput, config.checkpoint.on_error))
    callbacks.append(Checkpointing(run, monitors.writer, position, validation, weights, state, monitors.interruption))
    if verbosity(run.topology.is_chief) == 2:
        callbacks.append(Progress(position))
    callbacks.append(monitors.skipped)
    if config.profile.timeline:
        callbacks.append(TimelineTrace(strategy, position, run.folder, config.profile))
    if strategy.membership.commit_steps:
        callbacks.append(MemoryCommit(run, position, weights, state))
    return [*callbacks, StepBegins(strategy, position)]


def step_intervals(config: RunConfig, strategy: Strategy) -> list[int]:
    """Step intervals that a call of the graph must not cross, since something is due after each of them."""
    clock = STEPS_BETWEEN_CLOCK_CHECKS * config.train.accumulate if config.checkpoint.every_minutes else None
    traced = config.profile.steps if config.profile.timeline else None
    found = [config.checkpoint.every_steps, config.train.validate_every_steps, config.guard.every]
    return [number for number in (*found, strategy.membership.commit_steps, clock, traced) if number]


def steps_per_call(config: RunConfig, callbacks: list[keras.callbacks.Callback]) -> int | None:
    """train.steps_per_execution; 1 where it is not set and a callback that is not ours or Keras's looks at steps."""
    hooks = [f"on_{kind}batch_{when}" for kind in ("", "train_") for when in ("begin", "end")]
    others = [type(item) for item in callbacks if type(item).__module__.split(".")[0] not in ("hvtrain", "keras")]
    looks = any(getattr(item, hook) is not getattr(keras.callbacks.Callback, hook) for item in others for hook in hooks)
    return config.train.steps_per_execution or (1 if looks else None)


# They only write, and ranks would write over each other.
_WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)


def own_callbacks(config: RunConfig, is_chief: bool, validates: bool) -> dict[str, keras.callbacks.Callback]:
    """The user's callbacks by name: on every rank, but those of Keras's that only write on the chief alone."""
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
    return {name: built[name] for name in built if is_chief or not isinstance(built[name], _WRITERS)}
