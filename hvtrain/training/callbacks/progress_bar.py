"""Keras's progress on the chief's console, readable also if the console is a pipe or a file."""

import logging
import sys
import time
from typing import Any

import keras

from hvtrain.system.console import is_launched
from hvtrain.training.callbacks.position import Position

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0


def verbosity(is_chief: bool) -> int:
    """Keras's verbose: a moving bar on a terminal, one line an epoch elsewhere, nothing on other ranks.

    A launcher prefixes each line, which breaks a moving bar; mpirun gives its ranks terminals nevertheless.
    """
    if not is_chief:
        return 0
    return 1 if sys.stdout.isatty() and not is_launched() else 2


class Progress(keras.callbacks.Callback):
    """Logs a line every 30 seconds within long epochs if Keras shows no moving bar (chief only)."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position
        self._last = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._last = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        now = time.monotonic()
        if self.position.in_epoch and now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            numbers = " - ".join(f"{name}: {value:.4g}" for name, value in (logs or {}).items())
            log.info("%d/%d - %s", batch + 1, self.params["steps"], numbers)
