"""Ends a training before its end, saved, so that it can go on later: by the clock, or by a signal to any rank."""

from __future__ import annotations

import signal
import socket
import time
from typing import Any

import keras

from hvtrain.config.validate import seconds
from hvtrain.strategies.base import Strategy
from hvtrain.system import console


class Interruption(keras.callbacks.Callback):
    """Wishes to stop when train.max_time is over by the chief's clock, or when this rank got a signal (every rank).

    The ranks then stop together, at the same step.

    Args:
        began: time.monotonic() at the beginning of the run.
        signals: those that came so far, and all that come; one that came between two attempts counts too.
    """

    def __init__(self, max_time: str | None, began: float, strategy: Strategy, signals: list[int]) -> None:
        super().__init__()
        self.reason = ""
        self.by_signal = False
        self._strategy = strategy
        chief = strategy.topology.is_chief
        self._deadline = began + seconds("train.max_time", max_time) if max_time and chief else float("inf")
        self._max_time = max_time
        self._signals = signals
        console.take_signals(self._take_signal)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._signals or time.monotonic() >= self._deadline:
            self.model.stop_training = True

    def settle(self) -> None:
        """Once training has stopped: why, the same on every rank; no reason of ours leaves it empty (every rank)."""
        rank = self._strategy.topology.rank
        name = signal.Signals(self._signals[0]).name if self._signals else ""
        mine = f"{name} to rank {rank} on {socket.gethostname()}" if name else ""
        by_clock = f"train.max_time={self._max_time}" if time.monotonic() >= self._deadline else ""
        found = self._strategy.comm.gather((mine, by_clock))
        signals = [reason for reason, _ in found if reason]
        self.by_signal = bool(signals)
        self.reason = next(iter([*signals, *(reason for _, reason in found if reason)]), "")

    def _take_signal(self, number: int, frame: Any) -> None:
        self._signals.append(number)
        console.note_signal()
