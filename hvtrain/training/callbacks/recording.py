"""Records of a run while it trains: history.csv, ranks.csv, and examples that were left out."""

import logging
from typing import Any

from hvtrain.core.run_files import EpochRecord, history_table, ranks_table
from hvtrain.errors import StorageError
from hvtrain.training.callbacks.run_context import RunCallback, RunContext, RunReport
from hvtrain.training.callbacks.speed import Throughput
from hvtrain.training.run import Run

log = logging.getLogger(__name__)


class Recording(RunCallback):
    """Adds a row to history.csv and ranks.csv after each epoch.

    Every rank calls it, the chief writes, and all ranks raise its error. The first row of a start
    writes the files anew, since a resumed run keeps only the rows before its start. With
    checkpoint.on_error=warn training continues without a row, and the next epoch tries again.
    """

    def __init__(self, context: RunContext, throughput: Throughput) -> None:
        super().__init__(context)
        self._throughput = throughput
        self._history = history_table(self.run.folder)
        self._ranks = ranks_table(self.run.folder)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self.position.in_epoch:
            return  # Stopped within the epoch; the run that resumes and finishes it writes the row.
        metrics = {name: float(value) for name, value in logs.items() if name != "examples/s"}
        # ReduceLROnPlateau logs the rate that the epoch had, and may have changed it since.
        rate = metrics.pop("learning_rate", float(self.model.optimizer.learning_rate))

        record = EpochRecord(
            epoch=epoch + 1,
            step=self.position.step,
            learning_rate=float(f"{rate:.7g}"),  # The precision of float32.
            seconds=round(self._throughput.epoch_seconds, 3),
            examples_per_second=round(self._throughput.epoch_examples_per_second, 1),
            metrics=metrics,
        )

        self.report.records.append(record)
        if self._throughput.rank_seconds:
            self.report.rank_seconds[epoch + 1] = self._throughput.rank_seconds
        self.comm.on_chief(self._write)

    def _write(self) -> None:
        try:
            self._history.save(self.report.records)
            if self.report.rank_seconds:
                self._ranks.save(list(self.report.rank_seconds.items()))
        except StorageError as error:
            if self.run.config.checkpoint.on_error == "stop":
                raise
            log.warning("%s; training continues (checkpoint.on_error=warn)", error)


class Skipped(RunCallback):
    """Reports examples that data.on_error=skip left out, after each epoch (every rank)."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        report_skipped(self.run, self.report)


def report_skipped(run: Run, report: RunReport) -> None:
    """Logs what was left out since the last call (every rank).

    Names go to the log of the rank that read them, the sum to the console.
    """
    if run.source.on_error != "skip":
        return

    comm = run.strategy.comm
    own = run.source.unreadable()
    for part in own:
        log.warning("rank %d skips %s: %s", comm.topology.rank, part.location, part.problem)
    new = [part for parts in comm.gather(own) for part in parts]
    report.unreadable.update({part.location: part for part in new})

    if new:
        files = sum(part.num_examples is None for part in report.unreadable.values())
        rest = f", and what is left of {files} damaged file(s)" if files else ""
        log.info(
            "skipped %s examples that could not be read%s; names in logs/ of the run folder",
            f"{report.num_skipped:,}",
            rest,
        )
