"""Ends a training before its end, saved, so that it can go on later: by the clock, or by a signal to any rank."""

from __future__ import annotations

import signal
import socket
import threading
import time
from typing import Any

import keras

from hvtrain.config import seconds
from hvtrain.strategies.base import Strategy


class Interruption(keras.callbacks.Callback):
    """Wishes to stop when train.max_time is over by the chief's clock, or when this rank got SIGUSR1 (every rank).

    The ranks then stop together, at the same step. SIGUSR1 is what a scheduler sends before it takes the hosts.

    Args:
        began: time.monotonic() at the beginning of the run.
    """

    def __init__(self, max_time: str | None, began: float, strategy: Strategy) -> None:
        super().__init__()
        self.reason = ""
        self.by_signal = False
        self._strategy = strategy
        self._deadline = began + seconds(max_time) if max_time and strategy.topology.is_chief else float("inf")
        self._max_time = max_time
        self._signalled = False
        # Python lets only the main thread take signals; a run in another one is not a launched one.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._take_signal)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._signalled or time.monotonic() >= self._deadline:
            self.model.stop_training = True

    def settle(self) -> None:
        """Once training has stopped: why, the same on every rank; no reason of ours leaves it empty (every rank)."""
        rank = self._strategy.topology.rank
        mine = f"SIGUSR1 to rank {rank} on {socket.gethostname()}" if self._signalled else ""
        by_clock = f"train.max_time={self._max_time}" if time.monotonic() >= self._deadline else ""
        found = self._strategy.gather((mine, by_clock))
        signals = [reason for reason, _ in found if reason]
        self.by_signal = bool(signals)
        self.reason = next(iter([*signals, *(reason for _, reason in found if reason)]), "")

    def _take_signal(self, number: int, frame: Any) -> None:
        self._signalled = True
