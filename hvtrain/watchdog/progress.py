"""A rank's progress: its main thread reports what it begins, the watchdog's thread looks from time to time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

# The phases of a rank. In the last two it waits for others, so it never holds them up.
START, STEP, DATA, FORWARD = "start", "step", "data", "forward"
CHECKPOINT, VALIDATION, CALLBACKS = "checkpoint", "validation", "callbacks"
REDUCTION, EXCHANGE = "reduction", "exchange"
WAITING = (REDUCTION, EXCHANGE)

# Less than this between two looks is a log line, not work on a file.
MIN_BYTES_OF_WORK = 1 << 16

Marks = tuple[int, int, int, int]
"""Counts from inside the graph: batches that arrived, gradients ready for reduction, gradients reduced, steps ended."""


@dataclass(frozen=True)
class Status:
    """A rank at one moment.

    Args:
        step: steps that the run has done.
        phase: what the rank does.
        seconds: how long it has been in this phase.
        idle: seconds for which nothing has happened.
        started: it has ended a step.
    """

    step: int
    phase: str
    seconds: float
    idle: float
    started: bool


class SuspensionClock:
    """Measures how long this process itself was suspended, for which it blames nobody."""

    def __init__(self, usual_seconds: float = 1.0) -> None:
        self._longest_gap = max(1.0, 2 * usual_seconds)
        self._last_call = time.monotonic()

    def seconds(self, now: float) -> float:
        """Seconds of suspension since the last call, which usually comes `usual_seconds` after another."""
        gap = now - self._last_call
        self._last_call = now
        return gap if gap > self._longest_gap else 0.0


class Progress:
    """The main thread reports at almost no cost; `look` is for one other thread.

    marks: how far this process's steps are inside the graph, where Python sees nothing.
    """

    def __init__(self, marks: Callable[[], Marks] = lambda: (0, 0, 0, 0)) -> None:
        self._marks = marks
        self._first_marks = marks()

        # Written by the main thread.
        self._phase = START
        self._step = 0
        self._num_reports = 0
        self._step_at_first: int | None = None
        self._started = False

        # Written by look.
        self._seen: tuple[object, ...] = ()
        self._seen_phase = ("", 0)
        self._num_bytes = 0
        self._phase_began = time.monotonic()
        self._moved = self._phase_began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The phase of what happens inside."""
        outer = self._phase
        self._phase = name
        self._num_reports += 1
        try:
            yield
        finally:
            self._phase = outer
            self._num_reports += 1

    def beat(self) -> None:
        """Reports that something happened."""
        self._num_reports += 1

    def begin_step(self, step: int) -> None:
        """step: how many the run has done before.

        More may follow in the same call, which Python does not see.
        """
        if self._step_at_first is None:
            self._step_at_first = step - self._marks()[3]
        self._step = step
        self._num_reports += 1
        self._phase = STEP

    def end_step(self, step: int) -> None:
        """step: how many the run has done now."""
        self._step = step
        self._phase = CALLBACKS
        self._started = True

    def look(self, suspended: float = 0.0) -> Status:
        """The rank's status now. suspended: seconds since the last look in which this process did not run."""
        now = time.monotonic()
        self._phase_began += suspended
        self._moved += suspended

        arrived, ready, reduced, ended = (mark - first for mark, first in zip(self._marks(), self._first_marks))
        phase = self._phase
        if phase == STEP:
            # The first step is traced and compiled before its batch is requested.
            phase = DATA if self._started else START
            if ready > reduced:
                phase = REDUCTION
            elif arrived > ended:
                phase = FORWARD

        # One call may run several steps.
        step = max(self._step, (self._step_at_first or 0) + ended + self._first_marks[3])
        seen = (step, self._num_reports, arrived, ready, reduced, ended)
        if seen != self._seen or (phase not in WAITING and self._works_on_files()):
            self._moved = now
        if (phase, step) != self._seen_phase:
            self._phase_began = now
        self._seen = seen
        self._seen_phase = (phase, step)
        return Status(step, phase, now - self._phase_began, now - self._moved, self._started)

    def _works_on_files(self) -> bool:
        """True if this process has read from or written to disks or file servers since the last look."""
        try:
            counters = psutil.Process().io_counters()
        except (psutil.Error, OSError):
            return False

        before = self._num_bytes
        self._num_bytes = counters.read_bytes + counters.write_bytes
        return self._num_bytes - before >= MIN_BYTES_OF_WORK
