"""The signals of the launching process, through all its attempts."""

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Signals:
    """Hands SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the attempt that runs.

    `first` is the first that came, which means that this process has to end; None so far.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._take: Callable[[int], None] | None = None
        self._waiting: list[int] = []
        self._woken = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            # Under nohup SIGHUP is ignored, and stays so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._came)

    def pass_to(self, take: Callable[[int], None] | None) -> None:
        """Sends signals there from now on, and those that were waiting at once."""
        self._take = take
        while take and self._waiting:
            take(self._waiting.pop(0))

    def wait(self, seconds: float) -> bool:
        """Waits so long; True at once when a signal comes."""
        return self._woken.wait(seconds)

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self._woken.set()
        if self._take:
            self._take(number)
        else:
            self._waiting.append(number)
