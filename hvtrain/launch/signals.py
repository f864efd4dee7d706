"""The signals of a launcher's own process, from its first launch to its last."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Signals:
    """Takes SIGINT, SIGTERM, SIGHUP and SIGUSR1 of this process, and hands them to the launch that runs.

    `told` is the first of them, None without one: this process has been told to come to an end.
    """

    def __init__(self) -> None:
        self.told: int | None = None
        self._take: Callable[[int], None] | None = None
        self._waiting: list[int] = []
        self._woken = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            # nohup has SIGHUP ignored already, and so it stays.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._came)

    def pass_to(self, take: Callable[[int], None] | None) -> None:
        """From now on signals go there; those that came while there was no such place go now."""
        self._take = take
        while take and self._waiting:
            take(self._waiting.pop(0))

    def wait(self, seconds: float) -> bool:
        """Waits so long; True at once where a signal comes."""
        return self._woken.wait(seconds)

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.told = self.told or number
        self._woken.set()
        if self._take:
            self._take(number)
        else:
            self._waiting.append(number)
