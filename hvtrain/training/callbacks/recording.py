"""One row of history.csv for each epoch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras

from hvtrain.core.records import EpochRecord, read_history, write_history
from hvtrain.errors import StorageError
from hvtrain.strategies.base import Strategy
from hvtrain.training.callbacks.position import Position
from hvtrain.training.callbacks.throughput import Throughput

log = logging.getLogger(__name__)


class Recording(keras.callbacks.Callback):
    """Writes history.csv anew after each epoch (chief only, but an error is everyone's).

    A resumed run keeps the rows up to its start. on_error="warn": training goes on without the file, and the next
    epoch tries again.
    """

    def __init__(
        self, folder: Path, strategy: Strategy, position: Position, throughput: Throughput, on_error: str
    ) -> None:
        super().__init__()
        self.strategy = strategy
        self.folder = folder
        self.position = position
        self.throughput = throughput
        self.on_error = on_error
        records = strategy.comm.on_chief(lambda: read_history(folder))
        # By epochs: where another plan took over, steps before it are counted otherwise.
        self.records = [record for record in records if record.epoch <= position.epoch]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.position.in_epoch:
            return  # Stopped in the middle; the row comes when a resume has finished the epoch.
        metrics = {name: float(value) for name, value in (logs or {}).items() if name != "images/s"}
        # ReduceLROnPlateau logs the rate that the epoch had, and may have changed it since.
        rate = metrics.pop("learning_rate", float(self.model.optimizer.learning_rate))
        record = EpochRecord(
            epoch=epoch + 1,
            step=self.position.step,
            learning_rate=float(f"{rate:.7g}"),  # what float32 knows of it
            seconds=round(self.throughput.epoch_seconds, 3),
            images_per_second=round(self.throughput.epoch_images_per_second, 1),
            metrics=metrics,
        )
        self.records.append(record)
        self.strategy.comm.on_chief(self._write)

    def _write(self) -> None:
        try:
            write_history(self.folder, self.records)
        except StorageError as error:
            if self.on_error == "stop":
                raise
            log.warning("%s; training goes on (checkpoint.on_error=warn)", error)
