"""Where this rank stands: the main thread says what it begins, the watch's thread looks now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# What a rank can be in. In the last two it waits for the others, and so is never the one that holds them up.
START, STEP, DATA, FORWARD = "start", "step", "data", "forward"
CHECKPOINT, VALIDATION, CALLBACKS = "checkpoint", "validation", "callbacks"
REDUCTION, EXCHANGE = "reduction", "exchange"
WAITING = (REDUCTION, EXCHANGE)

# Less than this between two looks is a log line, not a file that is read or written.
LEAST_BYTES_OF_WORK = 1 << 16

Marks = tuple[int, int, int, int]
"""Counted inside the graph: batches that arrived, gradients that were ready to be reduced, that were reduced, and steps
that ended."""


@dataclass(frozen=True)
class Standing:
    """A rank at one moment. seconds: since when it is in this phase; idle: for how long nothing went on."""

    step: int
    phase: str
    seconds: float
    idle: float
    started: bool


class Naps:
    """Who looks at its clock very late was stopped itself (a suspended job) and blames nobody for that time."""

    def __init__(self, usual_seconds: float = 1.0) -> None:
        self._late = max(1.0, 2 * usual_seconds)
        self._looked = time.monotonic()

    def seconds(self, now: float) -> float:
        """For how long this process has slept since the last call."""
        gap, self._looked = now - self._looked, now
        return gap if gap > self._late else 0.0


class Progress:
    """Written by the main thread for next to nothing; `look` is for one other thread.

    Args:
        marks: how far this process's steps came inside the graph, where Python sees nothing.
        beat_seconds: how often somebody looks.
    """

    def __init__(self, marks: Callable[[], Marks] = lambda: (0, 0, 0, 0), beat_seconds: float = 1.0) -> None:
        self._marks = marks
        self._phase = START
        self._step = self._changes = 0
        self._step_at_first: int | None = None
        self._started = False
        self._first_marks = marks()
        self._seen: tuple[object, ...] = ()
        self._seen_phase = ("", 0)
        self._bytes = 0
        self._since = self._moved = time.monotonic()
        self._naps = Naps(beat_seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside is of that kind."""
        outer, self._phase = self._phase, name
        self._changes += 1
        try:
            yield
        finally:
            self._phase = outer
            self._changes += 1

    def beat(self) -> None:
        """Something went on."""
        self._changes += 1

    def begin_step(self, step: int) -> None:
        """step: how many the run has done before; more may follow at once, which Python does not see."""
        if self._step_at_first is None:
            self._step_at_first = step - self._marks()[3]
        self._step = step
        self._changes += 1
        self._phase = STEP

    def end_step(self, step: int) -> None:
        """step: how many the run has done now."""
        self._step = step
        self._phase = CALLBACKS
        self._started = True

    def look(self) -> Standing:
        """Where the rank stands now."""
        now = time.monotonic()
        asleep = self._naps.seconds(now)
        self._since, self._moved = self._since + asleep, self._moved + asleep
        arrived, ready, reduced, ended = (mark - first for mark, first in zip(self._marks(), self._first_marks))
        phase = self._phase
        if phase == STEP:
            phase = self._within_step(arrived, ready, reduced, ended)
        # Within a call of several steps.
        step = max(self._step, (self._step_at_first or 0) + ended + self._first_marks[3])
        seen = (step, self._changes, arrived, ready, reduced, ended)
        if seen != self._seen or (phase not in WAITING and self._moves_bytes()):
            self._moved = now
        if (phase, step) != self._seen_phase:
            self._since = now
        self._seen, self._seen_phase = seen, (phase, step)
        return Standing(step, phase, now - self._since, now - self._moved, self._started)

    def _within_step(self, arrived: int, ready: int, reduced: int, ended: int) -> str:
        if ready > reduced:
            return REDUCTION
        if arrived > ended:
            return FORWARD
        # The first step is traced and compiled before its batch is asked for.
        return DATA if self._started else START

    def _moves_bytes(self) -> bool:
        """True where this process has read from or written to disks or file servers since the last look."""
        before, self._bytes = self._bytes, stored_bytes()
        return self._bytes - before >= LEAST_BYTES_OF_WORK


def stored_bytes() -> int:
    """What this process has read from and written to storage; neither caches nor the network count."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("read_bytes", "write_bytes")))
