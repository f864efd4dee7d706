"""All callbacks of a run, in their order."""

from __future__ import annotations

from typing import Any

import keras

from hvtrain.checkpoint.writer import Writer
from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.restore.resume import RunState, Start
from hvtrain.strategies.base import Strategy
from hvtrain.training.callbacks.callback_state import CallbackState
from hvtrain.training.callbacks.checkpointing import STEPS_BETWEEN_CLOCK_LOOKS, Checkpointing
from hvtrain.training.callbacks.epoch_metrics import EpochMetrics
from hvtrain.training.callbacks.guard import Guard
from hvtrain.training.callbacks.heartbeat import StepBegins, StepEnds
from hvtrain.training.callbacks.interruption import Interruption
from hvtrain.training.callbacks.memory_commit import Committing
from hvtrain.training.callbacks.progress_bar import Progress, verbosity
from hvtrain.training.callbacks.proof import Proof
from hvtrain.training.callbacks.recording import Recording
from hvtrain.training.callbacks.resumed_metrics import ResumedMetrics
from hvtrain.training.callbacks.same_logs import SameLogs
from hvtrain.training.callbacks.skipped import Skipped
from hvtrain.training.callbacks.step_split import StepSplit
from hvtrain.training.callbacks.timeline import Timeline
from hvtrain.training.callbacks.validation import Validation
from hvtrain.training.setup import evaluation_data


def make_callbacks(
    config: RunConfig,
    strategy: Strategy,
    source: Source,
    meta: dict[str, Any],
    run_state: RunState,
    start: Start,
    split: StepSplit,
    proof: Proof,
    interruption: Interruption,
    skipped: Skipped,
    writer: Writer,
) -> list[keras.callbacks.Callback]:
    """In this order: count the step; see that it was reduced; time it; make the epoch's metrics those of all ranks,
    look at them and validate, so that whoever reads the logs after that reads the truth; let the user's callbacks
    act, and all ranks stop if one of them wishes to; then record, save, and commit. A run that is killed goes on from
    what was saved: what was recorded later than that would be missing."""
    position, weights, folder = proof.position, proof.weights, run_state.folder
    assert folder is not None
    callbacks = [position, StepEnds(strategy, position), *strategy.callbacks(), split.throughput, proof]
    callbacks.append(EpochMetrics(strategy))
    callbacks.append(Guard(weights, config.guard.every, strategy, position))
    if position.in_epoch:
        callbacks.append(ResumedMetrics(start.rank_state))
    validation = None
    dataset = evaluation_data(config, source, "validation", strategy.topology)
    if dataset is not None:
        every = (config.train.validate_every_epochs, config.train.validate_every_steps)
        validation = Validation(dataset, strategy, position, *every, weights)
        callbacks.append(validation)
    own = strategy.all_or_raise(lambda: own_callbacks(config, strategy.topology.is_chief, dataset is not None))
    state = CallbackState(own, start.callbacks, strategy)
    callbacks += [SameLogs(strategy), *own.values(), interruption, state, *strategy.stop_callbacks()]
    callbacks += [split, Recording(folder, strategy, position, split.throughput, config.checkpoint.on_error)]
    saving = (writer, config.checkpoint, meta, strategy, position, validation, weights, state)
    callbacks.append(Checkpointing(*saving, interruption, run_state.noting))
    if verbosity(strategy.topology.is_chief) == 2:
        callbacks.append(Progress(position))
    callbacks.append(skipped)
    if config.profile:
        callbacks.append(Timeline(strategy, position, folder, config.profile_first_step, config.profile_steps))
    if strategy.commit_steps:
        callbacks.append(Committing(run_state, meta, strategy, position, weights, state))
    return [*callbacks, StepBegins(strategy, position)]


def periods(config: RunConfig, strategy: Strategy) -> list[int]:
    """What is due after every N steps of the run, by N: the graph goes on for no longer than to the next of them."""
    looks = STEPS_BETWEEN_CLOCK_LOOKS * config.train.accumulate
    minutes = looks if config.checkpoint.every_minutes else None
    traced = config.profile_steps if config.profile else None
    found = [config.checkpoint.every_steps, config.train.validate_every_steps, config.guard.every]
    return [number for number in (*found, strategy.commit_steps, minutes, traced) if number]


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
