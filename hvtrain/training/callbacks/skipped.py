"""Reports examples that data.on_error=skip left out: each place in the log of its rank, the sum on the console."""

import logging
from typing import Any

import keras

from hvtrain.data.source import Unreadable
from hvtrain.training.run import Run

log = logging.getLogger(__name__)


class Skipped(keras.callbacks.Callback):
    """Reports newly skipped examples after each epoch, and counts all of them (every rank)."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.source = run.source
        self.comm = run.strategy.comm
        self._places: dict[str, Unreadable] = {}  # Of all ranks; a damaged file that several ranks read counts once.

    @property
    def num_examples(self) -> int:
        return sum(place.num_examples or 0 for place in self._places.values())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.report()

    def report(self) -> None:
        """Names what this rank has skipped since the last report, and logs the sum if any rank has (every rank)."""
        if self.source.on_error != "skip":
            return
        own = self.source.unreadable()
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
