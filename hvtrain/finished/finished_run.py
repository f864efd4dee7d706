"""Opens a finished run: its data, its task, and its model with a checkpoint's weights on every rank."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
from keras import Model

from hvtrain.checkpoint import store, writer
from hvtrain.config.schema import RunConfig
from hvtrain.data import fitted, kinds
from hvtrain.data.description import describe
from hvtrain.data.manifest import check_unchanged
from hvtrain.data.source import Source, Unreadable
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.finished.arguments import FinishedConfig, finished_config
from hvtrain.strategies.base import Strategy, report_failures
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.system import console
from hvtrain.tasks import Task
from hvtrain.training.finish import load_weights
from hvtrain.training.setup import (
    build_network,
    open_source,
    open_task,
    optimizer_at,
    seed_everything,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedRun:
    """A run with its trained model, the same on every rank.

    Attributes:
        config: the run's settings, with the overrides of the command line.
        strategy: a started strategy, whose ranks use the run.
        source: the run's data set, or another one.
        task: the run's task.
        model: the run's model, compiled, with the weights of the checkpoint.
        checkpoint: the name of the checkpoint, such as step-00000040.
        training_kinds: the kinds of the training inputs; empty if a split of the run's own data is used,
            whose kinds need no check.
    """

    config: RunConfig
    strategy: Strategy
    source: Source
    task: Task
    model: Model
    checkpoint: str
    training_kinds: kinds.Kinds

    @property
    def is_chief(self) -> bool:
        return self.strategy.topology.is_chief

    def in_float32(self) -> Model:
        """Returns the model if it was trained in float32, else a float32 copy with its weights."""
        if self.config.train.precision == "float32":
            return self.model
        config = replace(self.config, train=replace(self.config.train, precision="float32"))
        seed_everything(config, self.strategy.topology.rank)
        model = build_network(config, self.source, self.task, size=1)
        model.set_weights(self.model.get_weights())

        return model

    def skipped_items(self) -> list[Unreadable]:
        """Returns the items that on_error=skip left out on any rank since the last call (every rank)."""
        by_rank = self.strategy.comm.gather(self.source.unreadable())
        # Two ranks may have met the same damaged file.
        return list({item.location: item for items in by_rank for item in items}.values())

    def check_kind(self, name: str, inputs: Any) -> None:
        """Checks that inputs are of the same kind as in training.

        Raises DataError if they are not; with guard.data=false it only warns.
        """
        if self.training_kinds:
            actual_kinds = kinds.kinds_of(inputs)
            kinds.check(name, self.training_kinds, actual_kinds, self.config.guard.data)


@contextmanager
def opened(
    finished: FinishedConfig, alone: bool = False, uses_split: bool = True
) -> Iterator[FinishedRun]:
    """Opens a run for a `with` block, on Horovod's ranks or in this process alone (every rank)."""
    strategy = Strategy()
    if not alone:
        settings = finished.config.strategy
        names = ("share_gpus", "pin_cores")
        strategy = HorovodStrategy(**{name: settings[name] for name in names if name in settings})
    with report_failures(strategy):
        # Log lines about the start of a run would only bury the command's result.
        console.start_log(strategy.start().is_chief, logging.WARNING)
        strategy.start_watchdog(finished.config.watchdog.abort_seconds)
        yield open_run(finished, strategy, uses_split)
        strategy.stop()


def open_alone(arguments: Sequence[str], trust: bool, uses_split: bool = True) -> FinishedRun:
    """Opens a run in this process alone, outside a command.

    The arguments are those of finished_config and open_run.
    """
    finished = finished_config(arguments, trust=trust)
    strategy = Strategy()
    strategy.start()
    return open_run(finished, strategy, uses_split)


def open_run(finished: FinishedConfig, strategy: Strategy, uses_split: bool) -> FinishedRun:
    """Opens the run's data and task, builds its model, and loads the checkpoint's weights (every rank).

    Inputs are preprocessed as in the run's training, even if the data have changed since.

    Args:
        finished: the run, from finished_config.
        strategy: a started strategy.
        uses_split: True if the command uses a split of the run's data, which must then be the same
            as in training.

    Raises:
        UserError: on all ranks, if the run, its data or its checkpoint cannot be used.
    """
    comm = strategy.comm
    config = finished.config
    path, is_last = comm.on_chief(lambda: checkpoint_path(finished))
    fitted_files, training_kinds = comm.on_chief(
        lambda: (fitted.read(finished.folder), kinds.read(finished.folder))
    )
    # A split of the run's own data is compared with the manifest below, so its kinds need no check.
    if finished.has_own_data and uses_split:
        training_kinds = {}

    def open_as_in_training() -> Source:
        source = open_source(config)
        if fitted_files:
            fitted.apply(source, fitted_files)
        # Checked before a model is built: the checkpoint does not fit a model for other inputs.
        kinds.check(source.name, training_kinds, kinds.spec_kinds(source), config.guard.data)
        return source

    seed_everything(config, strategy.topology.rank)
    source = comm.all_or_raise(open_as_in_training)
    # Before the model is built: with another number of classes the weights would not fit.
    comm.all_or_raise(lambda: fitted.check_classes(source, fitted_files, config.guard.data))
    task = comm.all_or_raise(lambda: open_task(config, source))
    model = comm.all_or_raise(lambda: _compiled_model(config, source, task, strategy))

    def load_checkpoint():
        """Loads the checkpoint's weights; returns the manifest of its data (chief only)."""
        try:
            return load_weights(config, model, path, is_last)
        except CheckpointError as error:
            # A likely cause is the image size, on which the shapes of some layers' weights depend.
            raise CheckpointError(f"{error}{kinds.size_advice(training_kinds, source)}") from error

    manifest = comm.on_chief(load_checkpoint)
    # Only the chief has read the checkpoint, so its files need not be on the other hosts.
    comm.broadcast_model(model)

    # Another data set is expected to differ; the run's own is not.
    if not finished.has_own_data:
        if strategy.topology.is_chief:
            fitted.warn_of_unused(source, fitted_files)
        if uses_split:
            for warning in comm.all_or_raise(lambda: describe(source)).get("warnings", ()):
                log.warning("%s: %s", source.name, warning)
    # If the run saved no fitted values, the source has fitted its preprocessing to its data again,
    # so unchanged data matter for input= too.
    elif uses_split or not fitted_files:
        comm.all_or_raise(
            lambda: check_unchanged(path.name, manifest, source.manifest(), config.guard.data)
        )

    return FinishedRun(config, strategy, source, task, model, path.name, training_kinds)


def checkpoint_path(finished: FinishedConfig) -> tuple[Path, bool]:
    """Returns the folder of the checkpoint to load, and whether it is loaded as the last one (chief only).

    By default this is the best checkpoint, or the last one if none is marked as the best.

    Raises:
        CheckpointError: there is no checkpoint, or the best one is only on another host.
        ConfigError: checkpoint=best was given, and the run has no best checkpoint.
    """
    folder = finished.folder / "checkpoints"
    choice = finished.arguments.get("checkpoint")
    best = None if choice == "last" else writer.read_best(folder)
    if best:
        name = store.folder_name(best["step"])
        if "host" in best:
            raise CheckpointError(
                f"the best checkpoint is on host {best['host']}; copy {name} to {folder}, or give checkpoint=last"
            )
        return folder / name, False
    if choice == "best":
        raise ConfigError(
            f"checkpoint=best, but {folder} has none, as in a run without validation; give checkpoint=last"
        )

    checkpoints = store.list_checkpoints(folder)
    if not checkpoints:
        raise CheckpointError(f"{folder} holds no checkpoint; train the run first")

    return checkpoints[-1], True


def _compiled_model(config: RunConfig, source: Source, task: Task, strategy: Strategy) -> Model:
    # Seeding again also resets Keras's counters for layer names. The names must match those in the
    # checkpoint, whatever layers the data and the task have created before.
    seed_everything(config, strategy.topology.rank)
    model = build_network(config, source, task, strategy.topology.size)
    # Keras evaluates only compiled models; SGD has no slots, which would take memory.
    optimizer = keras.optimizers.SGD()
    if config.train.ema:
        # The averages of the weights are variables of the run's own optimizer, so it is needed.
        optimizer = optimizer_at(lambda: 0.0, config)

    task.compile(
        model,
        optimizer,
        weighted=len(source.element_spec) > 2,
        distribute_loss=strategy.distribute_loss,
    )
    return model
