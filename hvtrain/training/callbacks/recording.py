"""What a run records while it trains: rows of history.csv, and examples that it left out."""

import logging
from typing import Any

from hvtrain.core.rank_seconds import append_rank_seconds, read_rank_seconds, write_rank_seconds
from hvtrain.core.records import EpochRecord, append_history, read_history, write_history
from hvtrain.data.source import Unreadable
from hvtrain.errors import StorageError
from hvtrain.training.callbacks.position import RunCallback
from hvtrain.training.callbacks.speed import Throughput

log = logging.getLogger(__name__)


class Recording(RunCallback):
    """Adds a row to history.csv and ranks.csv after each epoch (chief only; all ranks raise its error).

    They are written anew once per start, since a resumed run keeps only the rows before its start, and after a failure.
    With checkpoint.on_error=warn training continues without the file, and the next epoch tries again.
    """

    def __init__(self, *place: Any, throughput: Throughput) -> None:
        super().__init__(*place)
        self.throughput = throughput
        self._can_append = False
        records = self.comm.on_chief(lambda: read_history(self.run.folder))
        # Compared by epochs: an earlier plan of the run counted steps differently.
        self.records = [record for record in records if record.epoch <= self.position.epoch]
        written = {record.epoch for record in self.records}
        lost = [str(epoch) for epoch in range(1, self.position.epoch + 1) if epoch not in written]
        if lost:
            log.warning("history.csv lacks rows of epochs before the resume: %s", ", ".join(lost))
        times = self.comm.on_chief(lambda: read_rank_seconds(self.run.folder))
        self.rank_seconds = {epoch: row for epoch, row in times.items() if epoch <= self.position.epoch}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self.position.in_epoch:
            return  # Stopped within the epoch; the run that resumes and finishes it writes the row.
        metrics = {name: float(value) for name, value in logs.items() if name != "examples/s"}
        # ReduceLROnPlateau logs the rate that the epoch had, and may have changed it since.
        rate = metrics.pop("learning_rate", float(self.model.optimizer.learning_rate))
        record = EpochRecord(
            epoch=epoch + 1,
            step=self.position.step,
            learning_rate=float(f"{rate:.7g}"),  # the precision of float32
            seconds=round(self.throughput.epoch_seconds, 3),
            examples_per_second=round(self.throughput.epoch_examples_per_second, 1),
            metrics=metrics,
        )
        self.records.append(record)
        if self.throughput.rank_seconds:
            self.rank_seconds[epoch + 1] = self.throughput.rank_seconds
        self.comm.on_chief(self._write)

    def _write(self) -> None:
        can_append, self._can_append = self._can_append, False
        save_history, save_seconds = write_history, write_rank_seconds
        if can_append:
            save_history, save_seconds = append_history, append_rank_seconds
        try:
            save_history(self.run.folder, self.records)
            if self.records[-1].epoch in self.rank_seconds:
                save_seconds(self.run.folder, self.rank_seconds)
            self._can_append = True
        except StorageError as error:
            if self.run.config.checkpoint.on_error == "stop":
                raise
            log.warning("%s; training continues (checkpoint.on_error=warn)", error)


class Skipped(RunCallback):
    """Reports examples that data.on_error=skip left out, after each epoch, and counts all of them (every rank).

    Each place goes to the log of its rank, the sum to the console.
    """

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self._places: dict[str, Unreadable] = {}  # Of all ranks; a damaged file that several ranks read counts once.

    @property
    def num_examples(self) -> int:
        return sum(place.num_examples or 0 for place in self._places.values())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.report()

    def report(self) -> None:
        """Names what this rank has skipped since the last report, and logs the sum if any rank has (every rank)."""
        source = self.run.source
        if source.on_error != "skip":
            return
        own = source.unreadable()
        for place in own:
            log.warning("rank %d skips %s: %s", self.comm.topology.rank, place.place, place.why)
        new = [place for places in self.comm.gather(own) for place in places]
        self._places.update({place.place: place for place in new})
        if new:
            files = sum(place.num_examples is None for place in self._places.values())
            log.info(
                "skipped %s examples that could not be read%s; names in logs/ of the run folder",
                f"{self.num_examples:,}",
                f", and what is left of {files} damaged file(s)" if files else "",
            )
