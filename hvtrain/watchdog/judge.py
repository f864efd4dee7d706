"""Decides which rank holds the run up, and words it. Pure."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvtrain.watchdog.progress import DATA, FORWARD, REDUCTION, WAITING, Status

# Before the first step has ended, programs are compiled, files found and caches filled.
PATIENCE_AT_START = 3
# A rank that misses so many of its beats is silent, not late.
BEATS_UNTIL_SILENT = 10
# A main thread that others' end has freed says more than the watchdog; one that is blocked forever
# says nothing.
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
        """Seconds that the main thread has to notice a lost rank before its process is ended.

        Where it goes on without that rank, it may be as slow as at anything else.
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

    def silent(self, now: float) -> float:
        return now - self.heard

    def idle(self, now: float) -> float:
        return self.status.idle + self.silent(now)

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


def stalled_seconds(ranks: Sequence[RankState], now: float, limit: float) -> float:
    """Seconds for which the run has made no progress, if they are the limit or more; else 0.

    One rank's progress is the run's, for the others may wait for it. A rank that does not answer
    makes none.
    """
    if not ranks:
        return 0.0
    silent = max(state.silent(now) for state in ranks)
    if silent >= limit:
        return silent

    idle = min(state.idle(now) for state in ranks)
    if not all(state.status.started for state in ranks):
        limit *= PATIENCE_AT_START
    return idle if idle >= limit else 0.0


def silent_ranks(ranks: Sequence[RankState], now: float, rules: Rules) -> list[RankState]:
    return [state for state in ranks if state.silent(now) > rules.silent_after]


def culprits(ranks: Sequence[RankState], now: float, rules: Rules) -> list[RankState]:
    """The silent ranks; else, of the ranks that wait for nobody, those furthest behind; else none."""
    silent = silent_ranks(ranks, now, rules)
    if silent:
        return silent

    # Within a step data come first; ranks that exchange something in the forward pass wait there
    # for such a one.
    order = {DATA: 0, FORWARD: 1}
    positions = {
        state.rank: (state.status.step, order.get(state.status.phase, 2))
        for state in ranks
        if state.status.phase not in WAITING
    }
    last = min(positions.values(), default=None)
    return [state for state in ranks if state.rank in positions and positions[state.rank] == last]


def describe(ranks: Sequence[RankState], now: float, rules: Rules, processes: Mapping[int, str]) -> str:
    """Names the culprits, or says what else it looks like. processes: what is known of silent ranks' processes."""
    guilty = culprits(ranks, now, rules)
    if guilty:
        parts = [_describe_one(state, now, rules, processes.get(state.rank, "")) for state in guilty[:3]]
        text = ", ".join(parts)
        if len(guilty) > 3:
            text = f"{text} and {len(guilty) - 3} more"
        return text

    states = {(state.status.step, state.status.phase): state for state in reversed(ranks)}
    if len(states) > 1:
        parts = [_describe_one(state, now, rules, "") for _, state in sorted(states.items())[:3]]
        return f"ranks wait for each other at different places: {', '.join(parts)}; do all run the same program?"
    return f"all {len(ranks)} ranks wait in {_since(ranks[0], now)}; is a link between hosts down?"


def _describe_one(state: RankState, now: float, rules: Rules, process: str) -> str:
    silent = state.silent(now)
    if silent <= rules.silent_after:
        return f"{state.name} hangs in {_since(state, now)}"

    cause = f", it is {process}" if process else ""
    return (
        f"{state.name} has not answered since {wall_clock(silent)}{cause}; "
        f"last seen in {state.status.phase}, step {_step(state)}"
    )


def _step(state: RankState) -> str:
    """The step that it is in, or the last one done."""
    is_in_step = state.status.phase in (DATA, FORWARD, REDUCTION)
    return f"{state.status.step + is_in_step:,}"


def _since(state: RankState, now: float) -> str:
    seconds = state.status.seconds + state.silent(now)
    return f"{state.status.phase} since step {_step(state)} ({wall_clock(seconds)})"


def wall_clock(seconds_ago: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))
