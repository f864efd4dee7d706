"""Rank 0's side of the watch: takes what all ranks say of themselves, and decides once for all."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvtrain.errors import RESTART_HELPS
from hvtrain.watchdog import ending, judge
from hvtrain.watchdog.guests import Guest, Guests
from hvtrain.watchdog.host_processes import Process
from hvtrain.watchdog.judge import CUT, GONE, Rules, Seen, Verdict
from hvtrain.watchdog.progress import Naps, Standing
from hvtrain.watchdog.wire import Message

log = logging.getLogger(__name__)

# Ranks that are lost together are named together.
SECONDS_TO_SETTLE = 0.5
SECONDS_FOR_STACKS = 8.0


class Hub:
    """One thread, one decision. folder: the run folder, once it is known."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        size: int,
        rules: Rules,
        folder: Callable[[], Path | None],
        process: Process,
    ) -> None:
        self._guests = Guests(listener, token, size, {"process": process.message()})
        self._rules = rules
        self._folder = folder
        self._lost: list[Verdict] = []
        self._lost_at = 0.0
        self._verdict: Verdict | None = None
        self._warned = False
        self._open = True
        self._stacks: dict[int, str] = {}
        self._states: dict[int, str] = {}
        self._woken: set[int] = set()
        self._accused: tuple[float, list[Seen]] | None = None
        self._naps = Naps(rules.beat_seconds)
        self.thread = threading.Thread(target=self._run, name="hvtrain watch, hub", daemon=True)

    def _run(self) -> None:
        try:
            while self._open:
                for guest, message in self._guests.messages(self._rules.beat_seconds / 2):
                    self._take(guest, message)
                self._tick(time.monotonic())
        except Exception:
            log.exception("the watchdog ended by a defect of its own; the run goes on without one")
        self._guests.tell_all({"kind": "bye"})
        self._guests.close()

    def _take(self, guest: Guest, message: Message) -> None:
        seen = guest.seen
        assert seen
        kind = message["kind"]
        if kind == "beat":
            seen.standing, seen.heard = Standing(**message["standing"]), time.monotonic()
        elif kind == "failed" and not self._rules.survives_loss:
            # Bad data names its rank in its own words too.
            text = str(message["text"]).removeprefix(f"{seen.name}: ")
            self._decide(Verdict(f"{seen.name} failed: {text}", int(message["code"]), True))
        elif kind == "lost":
            self._decide(Verdict(str(message["text"]), RESTART_HELPS))
        elif kind == "stacks":
            # A rank that was woken by another sends some of its own too, which are of later.
            if message["rank"] != seen.rank or seen.rank not in self._woken:
                self._stacks[message["rank"]] = str(message["text"])
                self._states[message["rank"]] = str(message["state"])
        elif kind == "ask":
            if judge.silent_ranks(self._seen(), time.monotonic(), self._rules):
                self._collect(time.monotonic())
        elif kind in ("gone", "cut") and not self._rules.survives_loss:
            is_cut = kind == "cut"
            self._lost.append(Verdict(f"{seen.name} {CUT if is_cut else GONE}", RESTART_HELPS, is_cut=is_cut))
            self._lost_at = self._lost_at or time.monotonic()
        elif kind == "bye":
            self._guests.forget(guest)
            self._open = seen.rank != 0
        if kind not in ("gone", "cut", "bye"):
            guest.send({"kind": "heard"})

    def _seen(self) -> list[Seen]:
        return [guest.seen for _, guest in sorted(self._guests.ranks.items()) if guest.seen]

    def _tick(self, now: float) -> None:
        asleep = self._naps.seconds(now)
        for seen in self._seen():
            seen.heard += asleep
        if self._accused:
            if now >= self._accused[0] + SECONDS_FOR_STACKS or self._guests.ranks.keys() <= self._stacks.keys():
                self._conclude(*self._accused)
        elif self._verdict:
            pass
        elif self._lost and now - self._lost_at >= SECONDS_TO_SETTLE:
            text = "; ".join(verdict.text for verdict in self._lost[:3])
            self._decide(Verdict(text, RESTART_HELPS, is_cut=any(verdict.is_cut for verdict in self._lost)))
        elif judge.hold_up(self._seen(), now, self._rules.limit):
            self._collect(now)
        else:
            self._warn(now)

    def _warn(self, now: float) -> None:
        seconds = judge.hold_up(self._seen(), now, self._rules.limit / 10)
        if seconds and not self._warned:
            told = judge.told(self._seen(), now, self._rules)
            log.warning("no progress for %.0f s: %s; the run ends after watchdog.abort_seconds of it", seconds, told)
        self._warned = seconds > 0

    def _decide(self, verdict: Verdict) -> None:
        if self._verdict or self._accused:
            return
        if not verdict.is_failure:
            verdict = replace(verdict, text=f"{verdict.text}; {ending.how_to_go_on(self._folder())}")
        self._verdict = verdict
        self._guests.tell_all({"kind": "verdict", "verdict": vars(verdict)})

    def _collect(self, now: float) -> None:
        """Asks every rank for its stacks; those that do not answer are woken by another of their machine."""
        if self._accused or self._verdict:
            return
        # As it is now: who is woken answers again.
        self._accused = (now, [replace(seen) for seen in self._seen()])
        ranks = self._guests.ranks
        silent = {seen.rank for seen in judge.silent_ranks(self._seen(), now, self._rules)}
        wakers: dict[int, list[Any]] = {}
        for rank in sorted(silent):
            process = ranks[rank].process
            peers = [r for r, guest in ranks.items() if r not in silent and _same_machine(guest.process, process)]
            if process and peers:
                self._woken.add(rank)
                wakers.setdefault(min(peers), []).append({"rank": rank, "process": process.message()})
        for rank, guest in ranks.items():
            guest.send({"kind": "stacks", "wake": wakers.get(rank, [])})

    def _conclude(self, when: float, ranks: list[Seen]) -> None:
        """Says who it was, has all ranks end, and ends."""
        told = judge.told(ranks, when, self._rules, self._states)
        texts = {seen.rank: self._stacks.get(seen.rank) or f"{seen.name} did not answer: no stacks\n" for seen in ranks}
        folder = self._folder()
        where = ending.write_stacks(folder, texts)
        seconds = judge.hold_up(ranks, when, self._rules.limit)
        for_long = f"no progress for {seconds:.0f} s (watchdog.abort_seconds={self._rules.limit:g}): "
        ending.say(f"{for_long if seconds else ''}{told}; {where}{ending.how_to_go_on(folder)}", 0)
        for rank, guest in self._guests.ranks.items():
            if rank:
                guest.send({"kind": "end"})
        ending.end(RESTART_HELPS)


def _same_machine(one: Process | None, other: Process | None) -> bool:
    return one is not None and other is not None and one.machine == other.machine
