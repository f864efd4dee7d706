"""Rank 0's side of the watchdog: receives the reports of all ranks and decides when to end them."""

import logging
import os
import socket
import threading
import time
from collections import defaultdict
from dataclasses import replace

from hvtrain.errors import RESTART_HELPS
from hvtrain.system import console
from hvtrain.system.host_facts import raise_file_limit
from hvtrain.watchdog import processes
from hvtrain.watchdog.connections import Connection, Connections, Kind, Message, describe_loss
from hvtrain.watchdog.member import Member
from hvtrain.watchdog.progress import RankState, Snapshot, Status, StopReason, SuspensionClock

log = logging.getLogger(__name__)

# Ranks lost within this time are reported together.
SECONDS_TO_SETTLE = 0.5
# How long to wait for the stacks of all ranks; a rank may need SECONDS_FOR_A_WOKEN_RANK for each
# silent one that it wakes.
SECONDS_FOR_STACKS = 8.0
# How long to wait before passing another rank's signal on to this process. A signal to all ranks
# also arrives here directly, and a second Ctrl-C would end the run without saving.
SECONDS_FOR_OWN_SIGNAL = 1.0


class Hub:
    """The thread on rank 0 that decides for all ranks.

    Sends the first reason to stop to all ranks. If the run stalls, asks all ranks for their stacks
    and then ends them.

    Args:
        listener: the socket to which the ranks connect.
        token: the job's secret, with which ranks prove that they belong to it.
        size: the number of ranks.
        member: rank 0's own member, which connects like any other.

    Attributes:
        thread: the hub's thread, which ends once rank 0 has left.
    """

    _is_open = True
    _reason: StopReason | None = None
    _lost_at = 0.0
    _next_tick = 0.0
    _has_warned = False
    _has_passed_signal = False
    # The state of the ranks when their stacks were requested; None until then. All ranks are ended
    # soon afterwards.
    _stalled: Snapshot | None = None

    def __init__(self, listener: socket.socket, token: str, size: int, member: Member) -> None:
        # Rank 0 holds a connection to every rank.
        raise_file_limit()
        self._connections = Connections(listener, token, size, vars(member.stacks.process))
        self._member = member
        self._rules = member.rules
        self._suspension = SuspensionClock(self._rules.beat_seconds)
        self._lost: list[StopReason] = []
        self._stacks: dict[int, str] = {}
        self._process_states: dict[int, str] = {}
        self._woken: set[int] = set()

        self.thread = threading.Thread(target=self._run, name="hvtrain watchdog, hub", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while self._is_open:
                # A tick examines all ranks, so one tick for each beat would be too expensive.
                timeout = max(0.0, self._next_tick - time.monotonic())
                for connection, message in self._connections.messages(timeout):
                    self._handle(connection, message)
                # No tick once rank 0 has left: the others only wait for it, and would seem stalled.
                if self._is_open and time.monotonic() >= self._next_tick:
                    self._connections.close_strangers()
                    self._tick(time.monotonic())
                    # Ticks are more frequent while the stacks of a stalled run are collected.
                    interval = 0.25 if self._stalled else 1.0
                    interval = min(interval, self._rules.beat_seconds / 2)
                    self._next_tick = time.monotonic() + interval
        except Exception:
            log.exception("the watchdog failed, which is a bug; the run continues without one")
        self._connections.send_all(Kind.BYE)
        self._connections.close()

    def _handle(self, connection: Connection, message: Message) -> None:
        """Handles a message from a rank, and answers it unless the rank has left."""
        state = connection.state
        assert state
        kind = message["kind"]
        if kind == Kind.GONE:
            # An elastic job continues without the rank.
            if not self._rules.survives_loss:
                self._note_loss(state, message["is_cut"])
            return
        if kind == Kind.BYE:
            self._connections.drop(connection)
            # The run is over once rank 0 leaves; another rank may leave earlier.
            if state.rank == 0:
                self._is_open = False
            return

        if kind == Kind.BEAT:
            state.status = Status(**message["status"])
            # By rank 0's clock, since other hosts' clocks may differ.
            state.heard_at = time.monotonic()
        elif kind == Kind.STOP:
            self._stop(StopReason(**message["reason"]))
        elif kind == Kind.SIGNAL and not self._has_passed_signal:
            # Only the first: after a second one, the run would end without saving.
            self._has_passed_signal = True
            console.call_later(SECONDS_FOR_OWN_SIGNAL, _signal_this_process, message["number"])
        elif kind == Kind.STACKS:
            # The rank's own stacks, or those of a rank that it woke.
            rank = message["rank"]
            # A woken rank also sends its own stacks, but these show a later moment and are ignored.
            if rank != state.rank or rank not in self._woken:
                self._stacks[rank] = message["text"]
                self._process_states[rank] = message["state"]
        elif kind == Kind.ASK:
            # If a rank is silent while another has an error, stacks are collected before the limit.
            snapshot = self._snapshot(time.monotonic())
            if snapshot.silent_ranks():
                self._collect_stacks(snapshot)
        connection.send(Kind.HEARD)

    def _note_loss(self, state: RankState, is_cut: bool) -> None:
        """Notes a lost rank.

        _tick stops the run a little later, so that ranks lost at the same time are reported together.
        """
        text = describe_loss(state.name, is_cut)
        self._lost.append(StopReason(text, RESTART_HELPS, state.rank, is_cut=is_cut))
        # Keeps the time of the first loss, or a series of losses could postpone the end forever.
        self._lost_at = self._lost_at or time.monotonic()
        # Open MPI kills the other ranks a second after the first one has ended, so they must learn
        # why before the next regular tick.
        self._next_tick = min(self._next_tick, self._lost_at + SECONDS_TO_SETTLE)

    def _snapshot(self, now: float) -> Snapshot:
        connections = sorted(self._connections.ranks.items())
        ranks = [connection.state for _, connection in connections if connection.state]
        return Snapshot(ranks, now, self._rules)

    def _tick(self, now: float) -> None:
        """Acts on the reports so far: ends or stops all ranks, asks for their stacks, or warns."""
        snapshot = self._snapshot(now)
        suspended = self._suspension.seconds(now)
        for state in snapshot.ranks:
            state.heard_at += suspended

        if self._stalled:
            # Ranks that have left in the meantime need not answer.
            has_all_stacks = self._connections.ranks.keys() <= self._stacks.keys()
            if has_all_stacks or now >= self._stalled.now + SECONDS_FOR_STACKS:
                self._end_all(self._stalled)
        elif self._reason:
            pass  # All ranks have been told to stop.
        elif self._lost and now - self._lost_at >= SECONDS_TO_SETTLE:
            # At most three reasons, so that they fit on a line.
            text = "; ".join(reason.text for reason in self._lost[:3])
            is_cut = any(reason.is_cut for reason in self._lost)
            self._stop(replace(self._lost[0], text=text, is_cut=is_cut))
        elif snapshot.stalled_seconds(self._rules.abort_seconds):
            self._collect_stacks(snapshot)
        else:
            self._warn(snapshot)

    def _warn(self, snapshot: Snapshot) -> None:
        """Logs a warning, once per stall, after a tenth of the time limit without progress."""
        seconds = snapshot.stalled_seconds(self._rules.abort_seconds / 10)
        if seconds and not self._has_warned:
            log.warning(
                f"no progress for {seconds:.0f} s: {snapshot.describe({})}; the run ends if this "
                f"continues (watchdog.abort_seconds={self._rules.abort_seconds:g})"
            )
        # After progress, the next stall is warned about again.
        self._has_warned = seconds > 0

    def _stop(self, reason: StopReason) -> None:
        """Tells all ranks why they must stop; later reasons are ignored."""
        if self._reason or self._stalled:
            return
        # A failed rank's message is passed on unchanged; any other reason gets advice.
        if not reason.is_failure:
            advice = processes.resume_advice(self._member.folder)
            reason = replace(reason, text=f"{reason.text}; {advice}")
        self._reason = reason
        # Rank 0 is included, being a member like any other.
        self._connections.send_all(Kind.STOP, reason=vars(reason))

    def _collect_stacks(self, snapshot: Snapshot) -> None:
        """Asks every rank for its stacks; _tick then ends all ranks.

        A silent rank is woken by another rank on the same machine, which sends the stacks for it.
        """
        if self._stalled or self._reason:
            return
        # The states are copied, since a rank that is woken will report again.
        states = [replace(state) for state in snapshot.ranks]
        self._stalled = replace(snapshot, ranks=states)

        silent = snapshot.silent_ranks()
        wakers = defaultdict(list)
        for state in silent:
            peers = [
                peer.rank
                for peer in snapshot.ranks
                if peer not in silent and peer.process.machine == state.process.machine
            ]
            if peers:
                self._woken.add(state.rank)
                wakers[min(peers)].append({"rank": state.rank, "process": vars(state.process)})

        for rank, connection in self._connections.ranks.items():
            connection.send(Kind.STACKS, wake=wakers.get(rank, []))

    def _end_all(self, snapshot: Snapshot) -> None:
        """Reports the culprits and ends all ranks, this one last."""
        limit = self._rules.abort_seconds
        folder = self._member.folder
        stacks = {
            state.rank: self._stacks.get(state.rank) or f"{state.name} did not answer\n"
            for state in snapshot.ranks
        }
        stacks_note = processes.write_stacks(folder, stacks)

        problem = snapshot.describe(self._process_states)
        text = f"{problem}; {stacks_note}{processes.resume_advice(folder)}"
        seconds = snapshot.stalled_seconds(limit)
        if seconds:
            text = f"no progress for {seconds:.0f} s (watchdog.abort_seconds={limit:g}): {text}"
        self._member.tell(text)
        culprit = next((state.rank for state in snapshot.culprits()), None)
        processes.say(text, 0, culprit)

        # This process ends last, since it holds the connections to all others.
        for rank, connection in self._connections.ranks.items():
            if rank:
                connection.send(Kind.END)
        processes.exit_now(RESTART_HELPS)


def _signal_this_process(signal_number: int) -> None:
    """Sends this process a signal that another rank reported, unless one has arrived directly."""
    if not console.signal_arrived.is_set():
        os.kill(os.getpid(), signal_number)
