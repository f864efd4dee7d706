"""What data.on_error=skip left out: each place once in the log of its rank, the sum over all on the console."""

from __future__ import annotations

import logging
from typing import Any

import keras

from hvtrain.data.source import Source, Unreadable
from hvtrain.strategies.base import Strategy

log = logging.getLogger(__name__)


class Skipped(keras.callbacks.Callback):
    """Tells after each epoch what is new, and knows how many examples it was in all (every rank)."""

    def __init__(self, source: Source, strategy: Strategy) -> None:
        super().__init__()
        self.source = source
        self.strategy = strategy
        self._places: dict[str, Unreadable] = {}  # Of all ranks; a damaged file that all have met counts once.

    @property
    def num_examples(self) -> int:
        return sum(item.num_examples or 0 for item in self._places.values())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.tell()

    def tell(self) -> None:
        """Names what this rank has left out since the last call, and sums up where any rank has (every rank)."""
        if self.source.on_error != "skip":
            return
        mine = self.source.unreadable()
        for item in mine:
            log.warning("rank %d skips %s: %s", self.strategy.topology.rank, item.place, item.why)
        everyone = [item for found in self.strategy.comm.gather(mine) for item in found]
        self._places.update({item.place: item for item in everyone})
        if everyone:
            rests = sum(item.num_examples is None for item in self._places.values())
            log.info(
                "skipped %s examples that could not be read%s; names in logs/ of the run folder",
                f"{self.num_examples:,}",
                f", and what is left of {rests} damaged file(s)" if rests else "",
            )
