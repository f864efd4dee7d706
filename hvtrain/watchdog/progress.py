"""The progress of ranks: what each of them does, and which one holds the run up.

A rank's main thread reports what it begins, and the watchdog's thread looks from time to time. The
hub judges by the statuses of all ranks; what judges (Standing) is pure.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Measures how long this process itself was suspended, which is no other rank's fault."""

    def __init__(self, usual_seconds: float = 1.0) -> None:
        # Of a thread that is only slow: a beat may be late by as much as a beat.
        self._longest_gap = max(1.0, 2 * usual_seconds)
        self._last_call = time.monotonic()

    def seconds(self, now: float) -> float:
        """Seconds of suspension since the last call, which usually comes `usual_seconds` after another."""
        gap = now - self._last_call
        self._last_call = now
        return gap if gap > self._longest_gap else 0.0


class Progress:
    """The progress of this rank.

    The main thread reports at almost no cost; `look` is for one other thread.

    marks: how far this process's steps are inside the graph, where Python sees nothing.
    """

    def __init__(self, marks: Callable[[], Marks] = lambda: (0, 0, 0, 0)) -> None:
        self._marks = marks
        # They count since the process began, and another run may have been before this one.
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
        # Marks count steps of this process; a resumed run begins at a later step.
        if self._step_at_first is None:
            self._step_at_first = step - self._marks()[3]
        self._step = step
        self._num_reports += 1
        self._phase = STEP

    def end_step(self, step: int) -> None:
        """step: how many the run has done now."""
        self._step = step
        self._phase = CALLBACKS
        # From here on there is nothing to compile, and less patience.
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

        # The first look finds all bytes since the start, which counts as work once.
        before = self._num_bytes
        self._num_bytes = counters.read_bytes + counters.write_bytes
        return self._num_bytes - before >= MIN_BYTES_OF_WORK


# Before the first step has ended, programs are compiled, files found and caches filled.
PATIENCE_AT_START = 3
# A rank that misses so many of its beats is silent, not late.
BEATS_UNTIL_SILENT = 10
# A main thread that is freed by the end of other ranks says more than the watchdog; one that is
# blocked forever says nothing.
SECONDS_FOR_THE_MAIN_THREAD = 3.0


@dataclass(frozen=True)
class Rules:
    """The same on all ranks.

    Args:
        limit: seconds without progress after which the run ends.
        beat_seconds: how often a rank reports.
        survives_loss: the others go on without a rank that is lost.
    """

    limit: float
    beat_seconds: float
    survives_loss: bool = False

    @property
    def main_thread_seconds(self) -> float:
        """Seconds for the main thread to notice a lost rank before its process is ended.

        If the run goes on without that rank, the thread may be as slow as at anything else.
        """
        return self.limit if self.survives_loss else SECONDS_FOR_THE_MAIN_THREAD

    @property
    def silent_after(self) -> float:
        return BEATS_UNTIL_SILENT * self.beat_seconds


@dataclass
class RankState:
    """The last status that a rank reported, and when (time.monotonic())."""

    rank: int
    host: str
    status: Status
    heard: float

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True)
class StopReason:
    """The reason why the run cannot go on, which all ranks print. (A launcher reads another, system/console.py.)

    Args:
        text: the reason.
        code: the exit code of all ranks.
        rank: the one at fault; None: nobody knows.
        is_failure: that rank reported its own error; else it is lost or makes no progress.
        is_cut: it is lost to the network.
    """

    text: str
    code: int
    rank: int | None = None
    is_failure: bool = False
    is_cut: bool = False


@dataclass(frozen=True)
class Standing:
    """All ranks at one moment, judged by the rules. now: time.monotonic()."""

    ranks: Sequence[RankState]
    now: float
    rules: Rules

    def silence(self, state: RankState) -> float:
        """Seconds since the rank's last report."""
        return self.now - state.heard

    def stalled_seconds(self, limit: float) -> float:
        """Seconds for which the run has made no progress, if they are the limit or more; else 0.

        One rank's progress is the run's, for the others may wait for it. A rank that does not answer
        makes none.
        """
        # Before any rank has joined there is nobody to judge.
        if not self.ranks:
            return 0.0
        silence = max(map(self.silence, self.ranks))
        if silence >= limit:
            return silence

        idle = min(state.status.idle + self.silence(state) for state in self.ranks)
        # Silence is judged above without it: a rank that compiles reports all the same.
        if not all(state.status.started for state in self.ranks):
            limit *= PATIENCE_AT_START
        return idle if idle >= limit else 0.0

    def silent_ranks(self) -> list[RankState]:
        return [state for state in self.ranks if self.silence(state) > self.rules.silent_after]

    def culprits(self) -> list[RankState]:
        """The silent ranks; else, of the ranks that wait for nobody, those furthest behind; else none."""
        silent = self.silent_ranks()
        if silent:
            return silent

        # Within a step data come first; ranks that exchange something in the forward pass wait there
        # for such a one.
        order = {DATA: 0, FORWARD: 1}
        positions = {
            state.rank: (state.status.step, order.get(state.status.phase, 2))
            for state in self.ranks
            if state.status.phase not in WAITING
        }
        last = min(positions.values(), default=None)
        return [state for state in self.ranks if state.rank in positions and positions[state.rank] == last]

    def describe(self, processes: Mapping[int, str]) -> str:
        """Names the culprits, or says what else it looks like. processes: what is known of silent ranks' processes."""
        guilty = self.culprits()
        if guilty:
            text = ", ".join(self._describe_one(state, processes) for state in guilty[:3])
            if len(guilty) > 3:
                text = f"{text} and {len(guilty) - 3} more"
            return text

        # One rank stands for all in the same place; the first of them, so reversed.
        states = {(state.status.step, state.status.phase): state for state in reversed(self.ranks)}
        if len(states) > 1:
            text = ", ".join(self._describe_one(state, {}) for _, state in sorted(states.items())[:3])
            return f"ranks wait for each other at different places: {text}; do all run the same program?"
        return f"all {len(self.ranks)} ranks wait in {self._since(self.ranks[0])}; is a link between hosts down?"

    def _describe_one(self, state: RankState, processes: Mapping[int, str]) -> str:
        silence = self.silence(state)
        if silence <= self.rules.silent_after:
            return f"{state.name} hangs in {self._since(state)}"

        process = processes.get(state.rank)
        cause = f", it is {process}" if process else ""
        return (
            f"{state.name} has not answered since {wall_clock(silence)}{cause}; "
            f"last seen in {state.status.phase}, step {_step(state)}"
        )

    def _since(self, state: RankState) -> str:
        seconds = state.status.seconds + self.silence(state)
        return f"{state.status.phase} since step {_step(state)} ({wall_clock(seconds)})"


def _step(state: RankState) -> str:
    """The step that it is in, or the last one done."""
    is_in_step = state.status.phase in (DATA, FORWARD, REDUCTION)
    return f"{state.status.step + is_in_step:,}"


def wall_clock(seconds_ago: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))
