"""The progress of ranks: what each of them is doing, and which one holds up the run.

A rank's main thread reports what it is about to do, and the watchdog's thread polls these reports. The
hub judges by the statuses of all ranks; the code that judges (Snapshot) is pure.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from hvtrain.watchdog.processes import Process

# The phases of a rank. In the last two it waits for other ranks, so it never holds them up.
START, STEP, DATA, FORWARD = "start", "step", "data", "forward"
CHECKPOINT, VALIDATION, CALLBACKS = "checkpoint", "validation", "callbacks"
REDUCTION, EXCHANGE = "reduction", "exchange"
WAITING = (REDUCTION, EXCHANGE)

# Fewer bytes than this between two calls of `status` count as log lines, not as work on files.
MIN_BYTES_OF_WORK = 1 << 16

Marks = tuple[int, int, int, int]
"""Counts from inside the graph: batches arrived, gradients ready for reduction, gradients reduced, steps ended."""


@dataclass(frozen=True)
class Status:
    """A rank at one moment.

    Args:
        step: the number of steps that the run has completed.
        phase: what the rank is doing.
        phase_seconds: how long it has been in this phase.
        idle_seconds: seconds since it last made any progress.
        has_stepped: whether it has completed a step.
    """

    step: int
    phase: str
    phase_seconds: float
    idle_seconds: float
    has_stepped: bool


class SuspensionClock:
    """Measures how long this process itself was suspended, for which other ranks must not be blamed."""

    def __init__(self, usual_seconds: float) -> None:
        # A slow thread may be late by a whole interval without having been suspended.
        self._longest_gap = max(1.0, 2 * usual_seconds)
        self._last_call = time.monotonic()

    def seconds(self, now: float) -> float:
        """Returns the seconds of suspension since the last call, which is usually `usual_seconds` ago."""
        gap = now - self._last_call
        self._last_call = now
        return gap if gap > self._longest_gap else 0.0


class Progress:
    """The progress of this rank.

    The main thread reports at almost no cost; one other thread calls `status`.

    Args:
        marks: returns how far this process's steps have come inside the graph, which Python cannot see.
    """

    # Written by the main thread.
    _phase = START
    _step = 0
    _num_reports = 0
    _steps_before = 0
    _has_stepped = False

    # Written by `status`, as are the two times in __init__.
    _seen: tuple[object, ...] = ()
    _seen_phase = ("", 0)
    _num_bytes = 0

    def __init__(self, marks: Callable[[], Marks] = lambda: (0, 0, 0, 0)) -> None:
        self._marks = marks
        self._phase_began = time.monotonic()
        self._progressed_at = self._phase_began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Puts this rank into a phase while the context lasts."""
        outer = self._phase
        self._phase = name
        self._num_reports += 1
        try:
            yield
        finally:
            self._phase = outer
            self._num_reports += 1

    def beat(self) -> None:
        """Reports progress of any kind, such as a batch of an evaluation."""
        self._num_reports += 1

    def begin_step(self, step: int) -> None:
        """Reports that a step begins, after `step` steps of the run.

        More steps may follow in the same call of the graph, which Python cannot see.
        """
        # Marks count only the steps of this process, and a resumed run begins at a later step.
        if self._phase == START:
            self._steps_before = step - self._marks()[3]
        self._step = step
        self._num_reports += 1
        self._phase = STEP

    def end_step(self, step: int) -> None:
        """Reports that a step has ended, with which the run has completed `step` steps."""
        self._step = step
        self._phase = CALLBACKS
        # Now nothing is left to compile, so the shorter limit applies.
        self._has_stepped = True

    def status(self, suspended: float = 0.0) -> Status:
        """Returns the rank's status.

        Args:
            suspended: for how many seconds since the last call the process was suspended; they do not count.
        """
        now = time.monotonic()
        self._phase_began += suspended
        self._progressed_at += suspended

        marks = self._marks()
        phase = self._current_phase(marks)
        # The marks count too, since one call may run several steps.
        step = max(self._step, self._steps_before + marks[3])
        seen = (step, self._num_reports, *marks)
        if seen != self._seen or (phase not in WAITING and self._works_on_files()):
            self._progressed_at = now
        if (phase, step) != self._seen_phase:
            self._phase_began = now
        self._seen = seen
        self._seen_phase = (phase, step)
        return Status(
            step, phase, now - self._phase_began, now - self._progressed_at, self._has_stepped
        )

    def _current_phase(self, marks: Marks) -> str:
        """Returns the main thread's phase; within a step, the one that the graph has reached."""
        # Read once, since the main thread may change it at any moment.
        phase = self._phase
        if phase != STEP:
            return phase
        arrived, ready, reduced, ended = marks
        if ready > reduced:
            return REDUCTION
        if arrived > ended:
            return FORWARD
        # The first step is traced and compiled before its batch is requested.
        return DATA if self._has_stepped else START

    def _works_on_files(self) -> bool:
        """True if this process has read or written MIN_BYTES_OF_WORK on disks or file servers since the last call."""
        try:
            counters = psutil.Process().io_counters()
        except (psutil.Error, OSError):
            return False

        # The first call counts all bytes since the process started, which is taken for work once.
        before = self._num_bytes
        self._num_bytes = counters.read_bytes + counters.write_bytes
        return self._num_bytes - before >= MIN_BYTES_OF_WORK


# Factor on the limit until the first step has ended, since graphs are compiled,
# files listed and caches filled.
PATIENCE_AT_START = 3
# A rank that misses this many beats counts as silent.
BEATS_UNTIL_SILENT = 10
# Time in which a main thread may end the process itself. If the end of other ranks unblocks the
# thread, its error says more than the watchdog can; but the thread may also stay blocked forever.
SECONDS_FOR_THE_MAIN_THREAD = 3.0


@dataclass(frozen=True)
class Rules:
    """The watchdog's rules, which are the same on all ranks.

    Args:
        abort_seconds: seconds without progress after which the run ends.
        beat_seconds: seconds between two reports of a rank.
        survives_loss: whether the other ranks continue without a rank that is lost.
    """

    abort_seconds: float
    beat_seconds: float
    survives_loss: bool = False

    @property
    def silent_seconds(self) -> float:
        return BEATS_UNTIL_SILENT * self.beat_seconds


@dataclass
class RankState:
    """A rank's process, its last status, and when rank 0 received that status, by rank 0's time.monotonic()."""

    rank: int
    host: str
    status: Status
    heard_at: float
    process: Process

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True)
class StopReason:
    """The reason why the run cannot continue, as all ranks print it.

    Args:
        text: the reason.
        code: the exit code of all ranks.
        rank: the rank at fault; None: unknown.
        is_failure: True if that rank reported its own error; False if it is lost or makes no progress.
        is_cut: True if its network connection was cut.
    """

    text: str
    code: int
    rank: int | None = None
    is_failure: bool = False
    is_cut: bool = False


@dataclass(frozen=True)
class Snapshot:
    """All ranks at one moment (`now`, by time.monotonic() on rank 0), judged by the rules."""

    ranks: Sequence[RankState]
    now: float
    rules: Rules

    def silence(self, state: RankState) -> float:
        """Returns the seconds since the rank's last report."""
        return self.now - state.heard_at

    def stalled_seconds(self, limit: float) -> float:
        """Returns for how many seconds the run has made no progress; 0 if they are below the limit.

        If one rank makes progress, so does the run, since the others may be waiting for it. But if any rank
        has not reported for as long as the limit, its silence counts.
        """
        # Before any rank has joined there is nothing to judge.
        if not self.ranks:
            return 0.0
        silence = max(map(self.silence, self.ranks))
        if silence >= limit:
            return silence

        idle = min(state.status.idle_seconds + self.silence(state) for state in self.ranks)
        # The limit is longer for idle time only, not for silence: even a
        # rank that is compiling reports.
        if not all(state.status.has_stepped for state in self.ranks):
            limit *= PATIENCE_AT_START
        return idle if idle >= limit else 0.0

    def silent_ranks(self) -> list[RankState]:
        return [state for state in self.ranks if self.silence(state) > self.rules.silent_seconds]

    def culprits(self) -> list[RankState]:
        """Returns the silent ranks; if there are none, those furthest behind among the ranks that wait for no other."""
        silent = self.silent_ranks()
        if silent:
            return silent

        # Within a step, a rank in DATA is behind one in FORWARD, since the latter may be waiting
        # for it in an exchange within the forward pass.
        order = {DATA: 0, FORWARD: 1}

        def position(state):
            return state.status.step, order.get(state.status.phase, 2)

        working = [state for state in self.ranks if state.status.phase not in WAITING]
        last = min(map(position, working), default=None)
        return [state for state in working if position(state) == last]

    def describe(self, processes: Mapping[int, str]) -> str:
        """Names the culprits or, if there are none, describes the likely cause.

        Args:
            processes: the states of silent ranks' processes, by rank, as far as they are known.
        """
        culprits = self.culprits()
        if culprits:
            text = ", ".join(self._describe_rank(state, processes) for state in culprits[:3])
            if len(culprits) > 3:
                text = f"{text} and {len(culprits) - 3} more"
            return text

        # The lowest rank stands for all at the same step and phase: in
        # reverse order, the last one is kept.
        states = {(state.status.step, state.status.phase): state for state in reversed(self.ranks)}
        if len(states) > 1:
            text = ", ".join(
                self._describe_rank(state, {}) for _, state in sorted(states.items())[:3]
            )
            return f"ranks wait for each other at different places: {text}; do all run the same program?"
        return f"all {len(self.ranks)} ranks wait in {self._phase_text(self.ranks[0])}; is a link between hosts down?"

    def _describe_rank(self, state: RankState, processes: Mapping[int, str]) -> str:
        silence = self.silence(state)
        if silence <= self.rules.silent_seconds:
            return f"{state.name} hangs in {self._phase_text(state)}"

        process = processes.get(state.rank)
        cause = f" and is {process}" if process else ""
        return (
            f"{state.name} has not answered since {wall_clock(silence)}{cause}; "
            f"last seen in {state.status.phase}, step {_step(state)}"
        )

    def _phase_text(self, state: RankState) -> str:
        return (
            f"{state.status.phase} since step {_step(state)} "
            f"({wall_clock(state.status.phase_seconds + self.silence(state))})"
        )


def _step(state: RankState) -> str:
    """Formats the number, from 1, of the step that the rank is in, or of the last one that it has completed."""
    is_in_step = state.status.phase in (DATA, FORWARD, REDUCTION)
    return f"{state.status.step + is_in_step:,}"


def wall_clock(seconds_ago: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))
