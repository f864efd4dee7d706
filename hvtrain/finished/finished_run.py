"""Opens a finished run: its data, task and model, with the weights of a checkpoint on every rank."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from hvtrain.checkpoint import store, writer
from hvtrain.config.schema import RunConfig
from hvtrain.data import fitted
from hvtrain.data.manifest import check_unchanged
from hvtrain.data.source import Source, Unreadable
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.finished.run_words import FinishedConfig
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.base import report_failures
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.system import console
from hvtrain.tasks import Task
from hvtrain.training.finish import load_weights
from hvtrain.training.setup import build_network, open_source, open_task, optimizer_at, seed_everything


@dataclass(frozen=True)
class FinishedRun:
    """A run with its trained model, the same on every rank. checkpoint: the name of the one that was read."""

    config: RunConfig
    strategy: Strategy
    source: Source
    task: Task
    model: keras.Model
    checkpoint: str

    @property
    def is_chief(self) -> bool:
        return self.strategy.topology.is_chief

    def in_float32(self) -> keras.Model:
        """The trained model, or a float32 copy with the same weights."""
        if self.config.train.precision == "float32":
            return self.model
        config = replace(self.config, train=replace(self.config.train, precision="float32"))
        seed_everything(config, self.strategy.topology.rank)
        model = build_network(config, self.source, self.task, size=1)
        model.set_weights(self.model.get_weights())
        return model

    def left_out(self) -> list[Unreadable]:
        """What data.on_error=skip has left out on any rank since the last call (every rank)."""
        items = [item for own in self.strategy.comm.gather(self.source.unreadable()) for item in own]
        return list({item.place: item for item in items}.values())  # Two ranks may have met the same damaged file.

    def explain(self, error: Exception) -> Exception:
        """Turns TensorFlow's error about unreadable data into one that names the file; other errors stay."""
        return self.source.explain(error) if isinstance(error, tf.errors.OpError) else error


@contextmanager
def on_ranks(config: RunConfig, strategy: Strategy | None = None) -> Iterator[Strategy]:
    """Joins the launcher's ranks, on Horovod by default, and leaves them at the end (every rank)."""
    strategy = strategy or HorovodStrategy()
    with report_failures(strategy):
        topology = strategy.start()
        console.start_log(topology.is_chief)
        logging.getLogger("hvtrain").setLevel(logging.WARNING)
        strategy.start_watchdog(config.watchdog.abort_seconds)
        yield strategy
        strategy.stop()


def open_run(finished: FinishedConfig, strategy: Strategy, uses_split: bool = True) -> FinishedRun:
    """Opens the run's data and task, builds its model, and gives it the checkpoint's weights (every rank).

    Inputs are preprocessed as in the run's training, whatever its data are now. If the command uses a split of these
    data, they must be the same as then. Raises UserError, on all ranks at once.
    """
    config, comm = finished.config, strategy.comm
    wanted = finished.words.get("checkpoint")
    step = comm.on_chief(lambda: _step(finished, wanted))
    # Seeding also resets Keras's counters of layers, so that their names are those of the checkpoint.
    seed_everything(config, strategy.topology.rank)
    files = comm.on_chief(lambda: fitted.read(finished.folder))
    source = comm.all_or_raise(lambda: open_source(config, files))
    task = comm.all_or_raise(lambda: open_task(config, source))
    seed_everything(config, strategy.topology.rank)
    model = comm.all_or_raise(lambda: _compiled(config, source, task, strategy))
    path = finished.folder / "checkpoints" / store.folder_name(step)
    data = comm.on_chief(lambda: load_weights(config, model, path))
    comm.broadcast_model(model)
    comm.all_or_raise(lambda: fitted.check_classes(source, files, config.guard.data))
    if strategy.topology.is_chief and not finished.has_own_data:
        fitted.warn_of_unused(source, files)
    # A run of an older version fits anew, so it depends on its data in any case.
    if finished.has_own_data and (uses_split or not files):
        comm.all_or_raise(lambda: check_unchanged(path.name, data, source.manifest(), config.guard.data))
    return FinishedRun(config, strategy, source, task, model, path.name)


def _compiled(config: RunConfig, source: Source, task: Task, strategy: Strategy) -> keras.Model:
    """The run's model with loss and metrics. It needs the run's optimizer only for averages of the weights."""
    model = build_network(config, source, task, strategy.topology.size)
    keeps: Any = optimizer_at(lambda: 0.0, config) if config.train.ema else keras.optimizers.SGD()
    weighted = len(source.element_spec) > 2
    task.compile(model, keeps, weighted=weighted, distribute_loss=strategy.distribute_loss)
    model.optimizer.build(model.trainable_variables)
    return model


def _step(finished: FinishedConfig, wanted: str | None) -> int:
    """The step of the checkpoint to read: the best, or the last if asked for or if there is no best (chief only)."""
    folder = finished.folder / "checkpoints"
    if wanted != "last":
        best = writer.read_best(folder)
        if best and "host" not in best:
            return best["step"]
        if best:
            raise CheckpointError(
                f"the best checkpoint is on host {best['host']}; copy it to {folder}, or give checkpoint=last"
            )
        if wanted == "best":
            raise ConfigError(f"checkpoint=best, but {folder} has none (no validation?); give checkpoint=last")
    if not (found := store.list_checkpoints(folder)):
        raise CheckpointError(f"{folder} holds no checkpoint; train the run first")
    return store.step_of(found[-1])
