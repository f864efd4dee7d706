"""Writes history.csv, one row for each epoch."""

import logging
from typing import Any

from hvtrain.core.records import EpochRecord, read_history, write_history
from hvtrain.errors import StorageError
from hvtrain.training.callbacks.position import Position, RunCallback
from hvtrain.training.callbacks.speed import Throughput
from hvtrain.training.run import Run

log = logging.getLogger(__name__)


class Recording(RunCallback):
    """Rewrites history.csv after each epoch (chief only; all ranks raise its error).

    A resumed run keeps the rows before its start. With checkpoint.on_error=warn training continues without the file,
    and the next epoch tries again.
    """

    def __init__(self, run: Run, position: Position, throughput: Throughput) -> None:
        super().__init__(run, position)
        self.throughput = throughput
        records = self.comm.on_chief(lambda: read_history(run.folder))
        # Compared by epochs: an earlier plan of the run counted steps differently.
        self.records = [record for record in records if record.epoch <= position.epoch]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.position.in_epoch:
            return  # Stopped within the epoch; the run that resumes and finishes it writes the row.
        metrics = {name: float(value) for name, value in (logs or {}).items() if name != "images/s"}
        # ReduceLROnPlateau logs the rate that the epoch had, and may have changed it since.
        rate = metrics.pop("learning_rate", float(self.model.optimizer.learning_rate))
        record = EpochRecord(
            epoch=epoch + 1,
            step=self.position.step,
            learning_rate=float(f"{rate:.7g}"),  # the precision of float32
            seconds=round(self.throughput.epoch_seconds, 3),
            images_per_second=round(self.throughput.epoch_images_per_second, 1),
            metrics=metrics,
        )
        self.records.append(record)
        self.comm.on_chief(self._write)

    def _write(self) -> None:
        try:
            write_history(self.run.folder, self.records)
        except StorageError as error:
            if self.run.config.checkpoint.on_error == "stop":
                raise
            log.warning("%s; training goes on (checkpoint.on_error=warn)", error)
