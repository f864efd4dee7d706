"""Stops training early and saved, to be resumed later: after train.max_time, or on a signal to any rank."""

import signal
import socket
import time
from typing import Any

import keras

from hvtrain.config.validate import seconds
from hvtrain.system import console
from hvtrain.training.run import Run


class Interruption(keras.callbacks.Callback):
    """Requests a stop after train.max_time by the chief's clock, or after a signal to this rank (every rank).

    The ranks then stop together, after the same step. A signal that came between two attempts counts too.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.reason = ""
        self.by_signal = False
        self._comm = run.strategy.comm
        self._limit = limit = run.config.train.max_time if run.topology.is_chief else None
        self._deadline = run.state.began + seconds("train.max_time", limit) if limit else float("inf")
        self._signals = run.state.signals
        console.take_signals(self._take_signal)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._signals or time.monotonic() >= self._deadline:
            self.model.stop_training = True

    def agree_on_reason(self) -> None:
        """Sets the reason for which training has stopped, the same on all ranks; empty if it is not this callback's."""
        name = signal.Signals(self._signals[0]).name if self._signals else ""
        by_signal = f"{name} to rank {self._comm.topology.rank} on {socket.gethostname()}" if name else ""
        by_clock = f"train.max_time={self._limit}" if time.monotonic() >= self._deadline else ""
        signals, clocks = zip(*self._comm.gather((by_signal, by_clock)))
        self.by_signal = any(signals)
        self.reason = next(filter(None, [*signals, *clocks]), "")

    def _take_signal(self, number: int, frame: Any) -> None:
        self._signals.append(number)
        console.note_signal()
