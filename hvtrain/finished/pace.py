"""Progress of work on many examples: a line every few seconds on rank 0."""

import time
from collections.abc import Callable

SECONDS_BETWEEN = 10.0


class Pace:
    """Prints how many of `total` examples are done, at most every SECONDS_BETWEEN; nothing for short work.

    clock: seconds; a test injects its own.
    """

    def __init__(self, verb: str, total: int, is_chief: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.verb, self.total, self.is_chief = verb, total, is_chief
        self._clock = clock
        self._began = self._said = clock()

    def reach(self, number: int) -> None:
        """Notes the number of examples that all ranks have done."""
        now = self._clock()
        if not self.is_chief or now - self._said < SECONDS_BETWEEN or not number:
            return
        self._said = now
        left = (now - self._began) * max(self.total - number, 0) / number
        print(f"{self.verb} {number:,} of {self.total:,} examples, {left:,.0f} s left", flush=True)
