"""A rank's watchdog: a null object that watches nothing, and each rank's side of a real one."""

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from hvtrain.errors import INTERRUPTED, RESTART_HELPS, UserError, in_one_line, message_of
from hvtrain.system.console import SECONDS_FOR_ANOTHER_RANK, in_background
from hvtrain.watchdog import connections, processes
from hvtrain.watchdog.connections import SECONDS_TO_JOIN, Kind, Message, MessageDecoder, WireError
from hvtrain.watchdog.processes import ENDED, Launcher, Process, Stacks
from hvtrain.watchdog.progress import (
    PATIENCE_AT_START,
    SECONDS_FOR_THE_MAIN_THREAD,
    Progress,
    Rules,
    StopReason,
    SuspensionClock,
    wall_clock,
)

log = logging.getLogger(__name__)

# How long cause() waits for the reason.
SECONDS_FOR_A_CAUSE = 3.0
# Open MPI notices a cut network later than the watchdog (MPI_KEEPALIVE_OPTIONS in launch/job.py).
# Ranks stay until then, because once a rank has exited, mpirun waits for the host that it cannot
# reach.
SECONDS_FOR_THE_LAUNCHER = 15.0


class Watchdog:
    """One rank's watchdog. This class watches nothing and costs nothing; `start` makes a real one.

    No method is collective.

    Attributes:
        folder: the run folder, for stacks and for advice on how to resume; set by the caller once it is known.
        tell: called, from any thread, with the reason why the run ends, as soon as this rank knows it; set by
            the caller.
        progress: what this rank is doing.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.folder: Path | None = None
        self.tell: Callable[[str], None] = lambda text: None
        self.progress = progress or Progress()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Returns a context manager that puts this rank in a phase (one of those in progress.py)."""
        return self.progress.phase(name)

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks that this one fails, and why."""

    def cause(self) -> StopReason | None:
        """Returns why other ranks are gone, after waiting a little for the reason; None if it is unknown.

        If there is a reason, the main thread must end the process itself.
        """
        return None

    def wait(self) -> StopReason | None:
        """Waits for the run to end.

        Returns why it failed, or None once rank 0 has stopped its watchdog.
        """
        return None

    def signal_rank_0(self, signum: int) -> None:
        """Forwards a signal that this rank has received to rank 0, unless rank 0 receives one itself."""

    @property
    def reporting_rank(self) -> int:
        """The rank that reports first: 0, or 1 if the connection to rank 0 is lost."""
        return 0

    def stop(self) -> None:
        """Stops watching; if rank 0 stops, all ranks do. A new watchdog may be started afterwards."""


class Member(Watchdog):
    """Each rank's side of a watchdog: reports the rank's status, and ends the process if it must.

    `join` starts its only thread. The main thread calls the methods of Watchdog.

    Args:
        rank: the rank of this process.
        host: the name of its host in messages.
        rules: the watchdog's rules, which are the same on all ranks.
        progress: what this rank is doing.
        calls_launcher: True to check whether Gloo's launcher is still running.

    Attributes:
        stacks: the Python stacks of this process.
        hub_thread: on rank 0, the hub's thread, for which `stop` waits.
    """

    hub_thread: threading.Thread | None = None
    _connection: socket.socket | None = None
    _hub: Process | None = None
    # When the last beat was sent; None once it is answered.
    _beat_sent_at: float | None = None
    _reason: StopReason | None = None
    _decided_at = 0.0
    # The watchdog's thread is about to end this process.
    _is_ending = False
    # The main thread has an error, and has asked for its cause.
    _awaits_cause = False
    # The main thread is ending the process itself.
    _is_leaving = False

    def __init__(
        self, rank: int, host: str, rules: Rules, progress: Progress, calls_launcher: bool
    ):
        super().__init__(progress)
        self.rules = rules
        self.stacks = Stacks()
        self._rank = rank
        self._host = host
        # Records the parent process; if it changes later, the launcher is gone.
        self._launcher = Launcher(calls_launcher)

        self._decoder = MessageDecoder()
        self._lock = threading.Lock()
        self._suspension = SuspensionClock(rules.beat_seconds)
        # Seconds that the main thread has to notice that the run stops; then this process is ended.
        # If the run continues without a lost rank, the usual limit applies.
        self._patience = rules.abort_seconds if rules.survives_loss else SECONDS_FOR_THE_MAIN_THREAD
        self._heard = threading.Event()
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvtrain watchdog", daemon=True)

    def join(self, address: tuple[str, int], token: str) -> None:
        """Connects to the hub. Raises OSError or WireError if that fails."""
        self._connection = socket.create_connection(address, timeout=SECONDS_TO_JOIN)
        connections.enable_keepalive(self._connection)
        challenge = self._next(Kind.CHALLENGE)["challenge"]
        joining = {
            "rank": self._rank,
            "host": self._host,
            "proof": connections.proof(token, challenge, self._rank),
            "process": vars(self.stacks.process),
            "status": vars(self.progress.status()),
        }
        self._connection.sendall(connections.encode(joining))
        self._hub = Process(**self._next(Kind.WELCOME)["process"])
        self._thread.start()

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks why this one fails; returns once rank 0 has confirmed, or after a second."""
        text = in_one_line(error)
        code = 1
        if isinstance(error, UserError):
            # Short enough for a message that all ranks print.
            text = message_of(error)[:300]
            code = error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code

        self._is_leaving = True
        # An elastic job continues without this rank.
        if self._reason is None and not self._closed.is_set() and not self.rules.survives_loss:
            name = f"rank {self._rank} on {self._host}"
            # The text of a data error may already begin with the rank.
            text = text.removeprefix(f"{name}: ")
            # Cleared, or the answer to an earlier beat would be taken
            # for the answer to this message.
            self._heard.clear()
            self._propose(StopReason(f"{name} failed: {text}", code, self._rank, is_failure=True))
            # Not for longer: there is no answer if rank 0 is gone.
            self._heard.wait(1.0)

    def cause(self) -> StopReason | None:
        self._awaits_cause = True
        self._send(Kind.ASK)
        if not self._closed.is_set():
            self._decided.wait(SECONDS_FOR_A_CAUSE)
        return self._final_reason()

    def wait(self) -> StopReason | None:
        # Short intervals, since Python handles signals between them.
        while self._thread.is_alive() and not self._closed.is_set() and not self._decided.wait(0.2):
            pass
        return self._final_reason()

    def _final_reason(self) -> StopReason | None:
        """Returns the reason; never returns if the watchdog's thread is about to end this process."""
        while self._is_ending and self._thread.is_alive():
            time.sleep(0.2)
        self._is_leaving = self._reason is not None
        return self._reason

    def signal_rank_0(self, signum: int) -> None:
        # In another thread, since signal handlers, which call this, must not wait for locks.
        in_background(self._send, Kind.SIGNAL, number=signum)

    @property
    def reporting_rank(self) -> int:
        return 0 if self._connection else 1

    def stop(self) -> None:
        self._send(Kind.BYE)
        self._closed.set()
        if self._thread is not threading.current_thread():
            # Long enough if the thread is waiting for its next beat.
            self._thread.join(2 * self.rules.beat_seconds + 1)
        if self.hub_thread:
            self.hub_thread.join(1.0)

    def _next(self, kind: Kind) -> Message:
        """Waits for the hub's next message. Raises WireError if it is of a different kind."""
        assert self._connection
        messages: list[Message] = []
        while not messages:
            data = self._connection.recv(1 << 12)
            if not data:
                raise WireError("the hub closed the connection")
            messages = self._decoder.feed(data)
        first, *others = messages
        if first.get("kind") != kind:
            raise WireError(f"the hub sent no {kind.value}")
        # Another rank may have failed while this one joins.
        for message in others:
            self._handle(message)
        return first

    def _send(self, kind: Kind, **values) -> None:
        # A copy, since the watchdog's thread may drop the connection at any moment.
        connection = self._connection
        with self._lock, suppress(OSError):  # If this fails, the next read finds out why.
            if connection:
                connection.sendall(connections.encode({"kind": kind, **values}))

    def _propose(self, reason: StopReason) -> None:
        self._send(Kind.STOP, reason=vars(reason))

    def _is_readable(self, seconds: float) -> bool:
        """Waits up to `seconds` for data from the hub; returns True if there is some."""
        poll = select.poll()  # select.select fails for file descriptors of 1,024 and above.
        poll.register(self._connection, select.POLLIN)  # type: ignore[arg-type]
        return bool(poll.poll(1000 * seconds))

    def _run(self) -> None:
        next_beat = 0.0
        try:
            while not self._closed.is_set():
                seconds = max(0.0, next_beat - time.monotonic())
                if self._connection is None:
                    time.sleep(seconds)
                elif self._is_readable(seconds):
                    for message in connections.receive(self._connection, self._decoder):
                        self._handle(message)

                now = time.monotonic()
                if now >= next_beat and not self._closed.is_set():
                    next_beat = now + self.rules.beat_seconds
                    self._tick(now)
        except Exception:
            log.exception(
                f"the watchdog of rank {self._rank} failed, which is a bug; the run continues without it"
            )
            self._send(Kind.BYE)
        if self._connection:
            self._connection.close()
        self.stacks.close()

    def _handle(self, message: Message) -> None:
        """Handles a message from the hub."""
        kind = message.get("kind")
        if kind == Kind.HEARD:
            self._beat_sent_at = None
            self._heard.set()
        elif kind == Kind.STOP:
            self._stop(StopReason(**message["reason"]))
        elif kind == Kind.STACKS:
            self._is_ending = True
            self._send(Kind.STACKS, rank=self._rank, text=self.stacks.text(), state="")
            for silent in message["wake"]:
                self._wake(silent["rank"], Process(**silent["process"]))
        elif kind == Kind.END:
            processes.exit_now(RESTART_HELPS)
        elif kind == Kind.BYE:
            self._connection = None
            if self._reason is None:
                self._closed.set()
        elif kind == Kind.GONE:
            is_cut = message["is_cut"]
            self._connection = None
            self._stop(self._loss_reason(connections.describe_loss("rank 0", is_cut), 0, is_cut))

    def _wake(self, rank: int, process: Process) -> None:
        """Wakes a silent rank on this machine, and sends its stacks to the hub."""
        state = process.state()
        text = ""
        if state != ENDED:
            text = process.wake_for_stacks()
        self._send(Kind.STACKS, rank=rank, text=text, state=state)

    def _loss_reason(self, text: str, rank: int | None, is_cut: bool = False) -> StopReason:
        message = f"{text}; {processes.resume_advice(self.folder)}"
        return StopReason(message, RESTART_HELPS, rank, is_cut=is_cut)

    def _stop(self, reason: StopReason) -> None:
        """Records why the run stops. The main thread then has some time to notice it itself."""
        if self._reason is None:
            self._reason = reason
            self._decided_at = time.monotonic()
            # First, since the main thread may end this process as soon as it wakes up.
            self.tell(reason.text)
            self._decided.set()

    def _tick(self, now: float) -> None:
        """Ends the process if its time is up; otherwise reports this rank's status."""
        suspended = self._suspension.seconds(now)
        status = self.progress.status(suspended)
        self._decided_at += suspended
        if self._beat_sent_at is not None:
            self._beat_sent_at += suspended

        if self._reason:
            if not self._is_leaving and now - self._decided_at >= self._patience:
                self._end(self._reason, self.reporting_rank)
            return
        if self._is_leaving:
            return

        if self._launcher.is_gone():
            text = "the launcher of the ranks is gone"
            self._patience = SECONDS_FOR_THE_MAIN_THREAD
            self._propose(StopReason(text, RESTART_HELPS))
            self._stop(self._loss_reason(text, None))
        elif self._beat_sent_at is None:
            self._beat_sent_at = now
            self._send(Kind.BEAT, status=vars(status))
        elif not self._is_ending:
            self._judge_hub(now - self._beat_sent_at, status.has_stepped)

    def _judge_hub(self, silence: float, has_stepped: bool) -> None:
        """Ends the process if rank 0, which judges all others, has been silent for too long.

        The ranks wait in turn: the first one wakes rank 0, which can then tell the rest.
        """
        limit = self.rules.abort_seconds
        if self._awaits_cause:
            limit = self.rules.silent_seconds
        elif not has_stepped:
            limit *= PATIENCE_AT_START
        turn = min(self._rank - 1, 10) * self.rules.beat_seconds
        if silence < limit + turn:
            return

        self._is_ending = True
        text = f"rank 0 has not answered since {wall_clock(silence)}"
        # None if rank 0 is on another machine.
        hub = self._hub if self._hub and self._hub.is_here() else None
        state = hub.state() if hub else ""
        if state:
            text = f"{text} and is {state}"
        # When rank 0 wakes up, it reads this first.
        self._propose(StopReason(text, RESTART_HELPS, 0))

        stacks = {self._rank: self.stacks.text()}
        if hub and state != ENDED:
            stacks[0] = hub.wake_for_stacks()
        stacks_note = processes.write_stacks(self.folder, stacks)
        self._end(self._loss_reason(f"{text}; {stacks_note}".removesuffix("; "), 0), first=1)

    def _end(self, reason: StopReason, first: int) -> None:
        """Prints the reason, without delay on rank `first`, and ends the process."""
        ends_daemon = reason.is_cut and self._launcher.is_daemon
        # The others print it later, in case rank `first` is gone.
        wait_seconds = 0.0 if ends_daemon or self._rank == first else SECONDS_FOR_ANOTHER_RANK
        processes.say(f"stopped because {reason.text}", self._rank, reason.rank, wait_seconds)
        if ends_daemon:
            self._launcher.end_daemon()
        elif reason.is_cut:
            time.sleep(SECONDS_FOR_THE_LAUNCHER)
        processes.exit_now(reason.code)
