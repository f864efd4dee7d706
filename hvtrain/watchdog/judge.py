"""Who holds the run up, and how that is said. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hvtrain.watchdog.progress import DATA, FORWARD, REDUCTION, WAITING, Standing

# Before the first step has ended programs are compiled, files found and caches filled.
PATIENCE_AT_START = 3
# What became of a rank.
GONE = "is gone (killed, or its host is lost)"
CUT = "cannot be reached any more (its host is down, or the network is cut)"
# A rank that sends nothing for so many of its beats is silent, not late.
BEATS_UNTIL_SILENT = 10
# A main thread that the others' end has freed says more than the watch; one that is blocked for ever says nothing.
SECONDS_FOR_THE_MAIN_THREAD = 3.0


@dataclass(frozen=True)
class Rules:
    """The same on all ranks: after how long without progress the run ends, and how often each says where it stands."""

    limit: float
    beat_seconds: float
    survives_loss: bool = False

    @property
    def main_thread_seconds(self) -> float:
        """What the main thread has to notice that a rank is lost: blocked for longer, its process is ended.

        Where it goes on without that rank, it may be as slow about it as about anything else.
        """
        return self.limit if self.survives_loss else SECONDS_FOR_THE_MAIN_THREAD

    @property
    def silent_after(self) -> float:
        return BEATS_UNTIL_SILENT * self.beat_seconds


@dataclass
class Seen:
    """What the hub knows of a rank: what it said last, and when (time.monotonic())."""

    rank: int
    host: str
    standing: Standing
    heard: float

    def silent(self, now: float) -> float:
        return now - self.heard

    def idle(self, now: float) -> float:
        return self.standing.idle + self.silent(now)

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True)
class Verdict:
    """Why the run cannot go on, in words for all ranks, and the exit code that says whether a restart can help.

    is_failure: a rank said itself what it failed of. Otherwise one is lost; is_cut: to the network.
    """

    text: str
    code: int
    is_failure: bool = False
    is_cut: bool = False


def hold_up(ranks: list[Seen], now: float, limit: float) -> float:
    """For how many seconds the run makes no progress, where that is the limit or more; else 0.

    One rank's progress is the run's: the others may wait for it. A rank that does not even answer is no rank at work.
    """
    if not ranks:
        return 0.0
    silent = max(seen.silent(now) for seen in ranks)
    idle = min(seen.idle(now) for seen in ranks)
    patience = 1 if all(seen.standing.started for seen in ranks) else PATIENCE_AT_START
    if silent >= limit:
        return silent
    return idle if idle >= limit * patience else 0.0


def silent_ranks(ranks: list[Seen], now: float, rules: Rules) -> list[Seen]:
    return [seen for seen in ranks if seen.silent(now) > rules.silent_after]


def culprits(ranks: list[Seen], now: float, rules: Rules) -> list[Seen]:
    """Those that do not answer; else those that do not wait for others, of these the furthest behind; else none."""
    silent = silent_ranks(ranks, now, rules)
    if silent:
        return silent
    busy = [seen for seen in ranks if seen.standing.phase not in WAITING]
    furthest = min((_place(seen.standing) for seen in busy), default=None)
    return [seen for seen in busy if _place(seen.standing) == furthest]


def _place(standing: Standing) -> tuple[int, int]:
    """Within a step data come first; ranks that exchange something in the forward pass wait there for such a one."""
    return standing.step, {DATA: 0, FORWARD: 1}.get(standing.phase, 2)


def told(ranks: list[Seen], now: float, rules: Rules, states: dict[int, str] | None = None) -> str:
    """The culprits in words, or what else it looks like. states: what is known of a silent rank's process."""
    found = culprits(ranks, now, rules)
    if found:
        parts = [_of_one(seen, now, rules, (states or {}).get(seen.rank, "")) for seen in found[:3]]
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return ", ".join(parts) + more
    places = {(seen.standing.step, seen.standing.phase): seen for seen in reversed(ranks)}
    if len(places) > 1:
        parts = [_of_one(seen, now, rules, "") for _, seen in sorted(places.items())[:3]]
        return f"ranks wait for each other at different places: {', '.join(parts)}; do all run the same program?"
    seen = ranks[0]
    return (
        f"all {len(ranks)} ranks wait in {seen.standing.phase} since step {_step(seen)} ({_clock(seen, now)}); "
        "is a link between hosts down?"
    )


def _of_one(seen: Seen, now: float, rules: Rules, state: str) -> str:
    if seen.silent(now) > rules.silent_after:
        why = f", it is {state}" if state else ""
        when = time.strftime("%H:%M:%S", time.localtime(time.time() - seen.silent(now)))
        return f"{seen.name} does not answer since {when}{why}; last seen in {seen.standing.phase}, step {_step(seen)}"
    return f"{seen.name} hangs in {seen.standing.phase} since step {_step(seen)} ({_clock(seen, now)})"


def _step(seen: Seen) -> str:
    """The step that it is in, or the one that is done."""
    return f"{seen.standing.step + (seen.standing.phase in (DATA, FORWARD, REDUCTION)):,}"


def _clock(seen: Seen, now: float) -> str:
    """Since when it is in its phase, by the clock on the wall."""
    seconds = seen.standing.seconds + seen.silent(now)
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
