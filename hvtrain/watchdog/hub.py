"""Rank 0's side of the watchdog: takes every rank's reports and decides once for all."""

import logging
import os
import socket
import threading
import time
from dataclasses import replace
from typing import Any

from hvtrain.errors import RESTART_HELPS
from hvtrain.system import console
from hvtrain.system.host_facts import raise_file_limit
from hvtrain.watchdog import ending, judge
from hvtrain.watchdog.connections import Connection, Connections, Message
from hvtrain.watchdog.judge import CUT, GONE, RankState, Verdict
from hvtrain.watchdog.member import Member
from hvtrain.watchdog.progress import Status, SuspensionClock

log = logging.getLogger(__name__)

# Ranks that are lost together are named together.
SECONDS_TO_SETTLE = 0.5
SECONDS_FOR_STACKS = 8.0
# A signal to all processes reaches this one too, and a second Ctrl-C would end it unsaved.
SECONDS_FOR_OWN_SIGNAL = 1.0


class Hub:
    """One thread, one decision. member: rank 0's own."""

    def __init__(self, listener: socket.socket, token: str, size: int, member: Member) -> None:
        raise_file_limit()
        self._connections = Connections(listener, token, size, {"process": vars(member.stacks.process)})
        self._member = member
        self._rules = rules = member.rules
        self._lost: list[Verdict] = []
        self._lost_at = 0.0
        self._verdict: Verdict | None = None
        self._warned = self._passes_signal = False
        self._open = True
        self._stacks: dict[int, str] = {}
        self._processes: dict[int, str] = {}
        self._woken: set[int] = set()
        self._stalled: tuple[float, list[RankState]] | None = None
        self._suspension = SuspensionClock(rules.beat_seconds)
        self.thread = threading.Thread(target=self._run, name="hvtrain watchdog, hub", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while self._open:
                for connection, message in self._connections.messages(self._rules.beat_seconds / 2):
                    self._take(connection, message)
                if self._open:  # Without rank 0, those that only waited for it would look stalled.
                    self._tick(time.monotonic())
        except Exception:
            log.exception("the watchdog failed, which is a bug; the run continues without one")
        self._connections.send_all({"kind": "bye"})
        self._connections.close()

    def _take(self, connection: Connection, message: Message) -> None:
        state = connection.state
        assert state
        kind = message["kind"]
        if kind == "beat":
            state.status, state.heard = Status(**message["status"]), time.monotonic()
        elif kind == "failed" and not self._rules.survives_loss:
            # An error in the data may name its rank itself.
            text = str(message["text"]).removeprefix(f"{state.name}: ")
            self._decide(Verdict(f"{state.name} failed: {text}", int(message["code"]), state.rank, is_failure=True))
        elif kind == "lost":
            self._decide(Verdict(str(message["text"]), RESTART_HELPS, message["rank"]))
        elif kind == "signal" and not self._passes_signal:
            self._passes_signal = True
            passing = threading.Timer(SECONDS_FOR_OWN_SIGNAL, _signal_this_process, [int(message["number"])])
            passing.daemon = True
            passing.start()
        elif kind == "stacks":
            # A rank that another one woke also sends its own stacks, which are of a later moment.
            if message["rank"] != state.rank or state.rank not in self._woken:
                self._stacks[message["rank"]] = str(message["text"])
                self._processes[message["rank"]] = str(message["state"])
        elif kind == "ask":
            if judge.silent_ranks(self._ranks(), time.monotonic(), self._rules):
                self._collect_stacks(time.monotonic())
        elif kind in ("gone", "cut") and not self._rules.survives_loss:
            text = f"{state.name} {CUT if kind == 'cut' else GONE}"
            self._lost.append(Verdict(text, RESTART_HELPS, state.rank, is_cut=kind == "cut"))
            self._lost_at = self._lost_at or time.monotonic()
        elif kind == "bye":
            self._connections.close_one(connection)
            self._open = state.rank != 0
        if kind not in ("gone", "cut", "bye"):
            connection.send({"kind": "heard"})

    def _ranks(self) -> list[RankState]:
        return [found.state for _, found in sorted(self._connections.ranks.items()) if found.state]

    def _tick(self, now: float) -> None:
        suspended = self._suspension.seconds(now)
        for state in self._ranks():
            state.heard += suspended
        if self._stalled:
            if now >= self._stalled[0] + SECONDS_FOR_STACKS or self._connections.ranks.keys() <= self._stacks.keys():
                self._end_all(*self._stalled)
        elif self._verdict:
            pass
        elif self._lost and now - self._lost_at >= SECONDS_TO_SETTLE:
            text = "; ".join(verdict.text for verdict in self._lost[:3])
            self._decide(replace(self._lost[0], text=text, is_cut=any(verdict.is_cut for verdict in self._lost)))
        elif judge.stalled_seconds(self._ranks(), now, self._rules.limit):
            self._collect_stacks(now)
        else:
            seconds = judge.stalled_seconds(self._ranks(), now, self._rules.limit / 10)
            if seconds and not self._warned:
                who = judge.describe(self._ranks(), now, self._rules, {})
                log.warning("no progress for %.0f s: %s; the run ends after watchdog.abort_seconds of it", seconds, who)
            self._warned = seconds > 0

    def _decide(self, verdict: Verdict) -> None:
        if self._verdict or self._stalled:
            return
        if not verdict.is_failure:
            verdict = replace(verdict, text=f"{verdict.text}; {ending.resume_advice(self._member.folder)}")
        self._verdict = verdict
        self._connections.send_all({"kind": "verdict", "verdict": vars(verdict)})

    def _collect_stacks(self, now: float) -> None:
        """Asks every rank for its stacks. A silent one is woken by another rank of its machine."""
        if self._stalled or self._verdict:
            return
        # Copies: a rank that is woken reports again.
        self._stalled = (now, [replace(state) for state in self._ranks()])
        ranks = self._connections.ranks
        silent = {state.rank for state in judge.silent_ranks(self._ranks(), now, self._rules)}
        wakers: dict[int, list[Any]] = {}
        processes = {rank: vars(found.process) for rank, found in ranks.items() if found.process}
        for rank in sorted(silent):
            peers = [r for r in ranks.keys() - silent if processes[r]["machine"] == processes[rank]["machine"]]
            if peers:
                self._woken.add(rank)
                wakers.setdefault(min(peers), []).append({"rank": rank, "process": processes[rank]})
        for rank, connection in ranks.items():
            connection.send({"kind": "stacks", "wake": wakers.get(rank, [])})

    def _end_all(self, when: float, ranks: list[RankState]) -> None:
        """Names the culprits, ends all ranks, and ends this one."""
        rules, folder = self._rules, self._member.folder
        who = judge.describe(ranks, when, rules, self._processes)
        culprit = next((state.rank for state in judge.culprits(ranks, when, rules)), None)
        stacks = {state.rank: self._stacks.get(state.rank) or f"{state.name} did not answer\n" for state in ranks}
        where = ending.write_stacks(folder, stacks)
        seconds = judge.stalled_seconds(ranks, when, rules.limit)
        how_long = f"no progress for {seconds:.0f} s (watchdog.abort_seconds={rules.limit:g}): " if seconds else ""
        text = f"{how_long}{who}; {where}{ending.resume_advice(folder)}"
        self._member.tell(text)
        ending.say(text, 0, culprit)
        for rank, connection in self._connections.ranks.items():
            if rank:
                connection.send({"kind": "end"})
        ending.end(RESTART_HELPS)


def _signal_this_process(number: int) -> None:
    if not console.has_noted_signal():
        os.kill(os.getpid(), number)
