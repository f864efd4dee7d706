"""Sends a run's records to its trackers; these must neither stop the run nor miss an epoch of it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvtrain.config.instantiate import build
from hvtrain.errors import Stopped, StorageError, in_one_line
from hvtrain.system.files import write_json
from hvtrain.system.run_files import TRACKERS_FILE, EpochRecord, read_tracked
from hvtrain.system.secrets import without_passwords
from hvtrain.training.callbacks.run_context import RunCallback, RunContext
from hvtrain.training.trackers import TrackedRun, Tracker, plain_name

log = logging.getLogger(__name__)


class Tracking(RunCallback):
    """Starts, feeds and ends the run's trackers (chief only, but every rank constructs it).

    As a context manager it also ends the tracked runs of a run that fails or stops. A tracker gets every
    epoch that it does not have yet, even if it was added at a resume or failed before it. A tracker that
    fails is dropped with a warning.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._trackers: dict[str, Tracker] = {}
        self._is_open = False
        if self.run.config.tracker:
            self.comm.on_chief(self._build)

    def _build(self) -> None:
        for name in self.run.config.tracker:
            tracker = build(self.run.config, f"tracker.{name}", Tracker)
            tracker.check(name)
            self._trackers[name] = tracker

    def on_train_begin(self, logs: Any = None) -> None:
        run = self.run
        # From here on there may be tracked runs that must not stay open.
        self._is_open = True
        self._tracked = read_tracked(run.folder)

        facts = TrackedRun(run.folder.name, run.folder, run.config.record, run.meta["changes"])

        def start(name, tracker):
            before = self._tracked.get(name, {"id": None, "step": 0})
            tracked_id = tracker.start(facts, before["id"])
            # A new tracked run has no epochs yet, and gets all of them.
            continues = tracked_id == before["id"] and self.position.start_step > 0
            self._tracked[name] = {"id": tracked_id, "step": before["step"] if continues else 0}

        self._each(start)
        self._send()

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self._send()

    def finish(
        self,
        state: str,
        values: dict[str, float] | None = None,
        files: list[Path] | None = None,
    ) -> None:
        """Ends the tracked runs, if they are open.

        Args:
            state: "finished", "stopped" or "failed".
            values: Last numbers to log, by name.
            files: Files to keep with the tracked runs.
        """
        if not self._is_open:
            return

        def end(name, tracker):
            if values:
                tracker.scalars(self.step, {plain_name(key): values[key] for key in values})
            tracker.finish(state, files or [])

        self._each(end)
        self._is_open = False

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Without an exception a run is still open here if it will be
        # resumed, as after train.max_time.
        is_stopped = kind is None or issubclass(kind, Stopped)
        self.finish("stopped" if is_stopped else "failed")

    def _send(self) -> None:
        """Sends each tracker the epochs that it lacks, and records in the run folder which was the last."""

        def send(name, tracker):
            tracked = self._tracked[name]
            for record in self.report.records:
                if record.step > tracked["step"]:
                    rank_seconds = self.report.rank_seconds.get(record.epoch, [])
                    tracker.scalars(record.step, scalars(record, rank_seconds))
                    tracked["step"] = record.step

        self._each(send)
        if not self._trackers:
            return
        try:
            write_json(self.run.folder / TRACKERS_FILE, self._tracked)
        except StorageError as error:
            self._trackers.clear()
            log.warning("%s; the run continues without its trackers", error)

    def _each(self, action: Callable[[str, Tracker], None]) -> None:
        """Calls action(name, tracker) for each tracker, and drops those that fail."""
        for name, tracker in list(self._trackers.items()):
            try:
                action(name, tracker)
            # Trackers are other people's code, and may raise anything.
            except Exception as error:
                del self._trackers[name]
                reason = without_passwords(in_one_line(error))
                log.warning("tracker.%s failed: %s; the run continues without it", name, reason)


def scalars(record: EpochRecord, rank_seconds: list[float]) -> dict[str, float]:
    """Returns an epoch's numbers by name, including each rank's seconds of own work in a step.

    >>> scalars(EpochRecord(1, 12, 0.1, 2.0, 50.0, {"loss": 0.5}), [0.01, 0.02])
    {'loss': 0.5, 'epoch': 1, 'learning_rate': 0.1, 'examples_per_second': 50.0, 'step_seconds/rank_0': 0.01, \
'step_seconds/rank_1': 0.02}
    """
    return {
        **{plain_name(name): value for name, value in record.metrics.items()},
        "epoch": record.epoch,
        "learning_rate": record.learning_rate,
        "examples_per_second": record.examples_per_second,
        **{f"step_seconds/rank_{rank}": seconds for rank, seconds in enumerate(rank_seconds)},
    }
