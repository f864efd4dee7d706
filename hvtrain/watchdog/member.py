"""A rank's watchdog, as a run uses it: the one that watches nobody, and every rank's side of the one that watches."""

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hvtrain.errors import RESTART_HELPS, UserError, in_one_line
from hvtrain.system.console import SECONDS_FOR_ANOTHER_RANK
from hvtrain.watchdog import connections, processes
from hvtrain.watchdog.connections import SECONDS_TO_JOIN, Kind, Lines, Message, WireError
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

SECONDS_FOR_A_WOKEN_RANK = 3.0
SECONDS_FOR_A_CAUSE = 3.0
# Open MPI notices a cut by itself, later than we do (launch/remote_hosts.py). But mpirun waits for
# a host that it cannot reach once a rank has left it.
SECONDS_FOR_THE_LAUNCHER = 15.0


class Watchdog:
    """One rank's watchdog.

    This one watches nobody and costs nothing; `start` makes one that watches.

    Nothing of it is collective.

    Attributes:
        folder: the run folder, for stacks and for advice on how to go on; set it once it is known.
        tell: gets the reason for which the run ends, as soon as this rank knows it and from any
            thread.
        progress: what this rank does.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.folder: Path | None = None
        self.tell: Callable[[str], None] = lambda text: None
        self.progress = progress or Progress()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """The phase of what happens inside, one of progress.py's."""
        return self.progress.phase(name)

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks why this one leaves them."""

    def cause(self) -> StopReason | None:
        """Returns why the others are gone; None if nobody knows. The main thread then ends the process itself."""
        return None

    def wait(self) -> StopReason | None:
        """Waits for the end of the run.

        Returns why it failed, or None once rank 0 has stopped its watchdog.
        """
        return None

    def signal_rank_0(self, number: int) -> None:
        """Sends rank 0 a signal that this rank received, unless rank 0 receives one itself."""

    @property
    def spokesman(self) -> int:
        """The first of the ranks that are left."""
        return 0

    def stop(self) -> None:
        """Stops watching; all stop with rank 0. Another may be started."""


class Member(Watchdog):
    """Every rank's side of a watchdog: reports its status, and ends the process when told to or left alone.

    It has one thread, from `join` on. The main thread calls the methods of Watchdog.

    Args:
        rank: this one.
        host: as messages name its host.
        rules: the same on all ranks.
        progress: what this rank does.
        calls_launcher: check whether Gloo's launcher is there.

    Attributes:
        stacks: of this process.
        hub_thread: rank 0's hub, for `stop` to wait for.
    """

    def __init__(self, rank: int, host: str, rules: Rules, progress: Progress, calls_launcher: bool) -> None:
        super().__init__(progress)
        self.rules = rules
        self.stacks = Stacks()
        self.hub_thread: threading.Thread | None = None
        self._rank = rank
        self._host = host
        # It notes the parent process now; another one later means that the launcher is gone.
        self._launcher = Launcher(calls_launcher)

        self._connection: socket.socket | None = None
        self._lines = Lines()
        self._lock = threading.Lock()
        self._hub: Process | None = None
        # Since when a beat waits for its answer; None: the last one was answered.
        self._waits_since: float | None = None
        self._suspension = SuspensionClock(rules.beat_seconds)

        self._reason: StopReason | None = None
        self._decided_at = 0.0
        self._patience = rules.main_thread_seconds
        # The watchdog's thread is about to end this process.
        self._is_ending = False
        # The main thread is in an error, and wants to know the cause.
        self._is_asked = False
        # The main thread ends the process itself.
        self._is_leaving = False

        self._heard = threading.Event()
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvtrain watchdog", daemon=True)

    def join(self, address: tuple[str, int], token: str) -> None:
        """Raises OSError or WireError if the hub is not there, or does not know this rank."""
        self._connection = socket.create_connection(address, timeout=SECONDS_TO_JOIN)
        connections.notice_cuts(self._connection)
        challenge = self._next(Kind.CHALLENGE)["challenge"]
        self._send_message(
            {
                "rank": self._rank,
                "host": self._host,
                "proof": connections.proof(token, challenge, self._rank),
                "process": vars(self.stacks.process),
                "status": vars(self.progress.look()),
            }
        )
        self._hub = Process(**self._next(Kind.WELCOME)["process"])
        self._thread.start()

    def fail(self, error: BaseException) -> None:
        """Returns once the others know, or after a second."""
        text = in_one_line(error)
        code = 1
        if isinstance(error, UserError):
            # One line, short enough for a message that all ranks print.
            text = str(error).strip().partition("\n")[0][:300]
            code = error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            code = 130
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code

        self._is_leaving = True
        # An elastic job goes on without this rank.
        if self._reason is None and not self._closed.is_set() and not self.rules.survives_loss:
            name = f"rank {self._rank} on {self._host}"
            # An error in the data may name its rank itself.
            text = text.removeprefix(f"{name}: ")
            # An answer to an earlier beat would look like one to this message.
            self._heard.clear()
            self._propose(StopReason(f"{name} failed: {text}", code, self._rank, is_failure=True))
            # Rank 0 may be gone, and then nobody answers.
            self._heard.wait(1.0)

    def cause(self) -> StopReason | None:
        self._is_asked = True
        self._send(Kind.ASK)
        if not self._closed.is_set():
            self._decided.wait(SECONDS_FOR_A_CAUSE)
        while self._is_ending:
            time.sleep(1)  # The watchdog ends this process, and says why.
        self._is_leaving = self._reason is not None
        return self._reason

    def wait(self) -> StopReason | None:
        # In short intervals, between which Python handles signals.
        while self._thread.is_alive() and not self._closed.is_set() and not self._decided.wait(0.2):
            pass
        while self._is_ending and self._thread.is_alive():
            time.sleep(0.2)  # The watchdog ends this process.
        self._is_leaving = self._reason is not None
        return self._reason

    def signal_rank_0(self, number: int) -> None:
        # In a thread: the handler of a signal must not wait for a lock.
        threading.Thread(target=self._send, args=[Kind.SIGNAL], kwargs={"number": number}, daemon=True).start()

    @property
    def spokesman(self) -> int:
        return 0 if self._connection else 1

    def stop(self) -> None:
        self._send(Kind.BYE)
        self._closed.set()
        if self._thread is not threading.current_thread():
            # It may be waiting for its next beat.
            self._thread.join(2 * self.rules.beat_seconds + 1)
        if self.hub_thread:
            self.hub_thread.join(1.0)

    def _next(self, kind: Kind) -> Message:
        """Waits for the hub's next message. Raises WireError if it is of another kind."""
        assert self._connection
        messages: list[Message] = []
        while not messages:
            data = self._connection.recv(1 << 12)
            if not data:
                raise WireError("the hub closed the connection")
            messages = self._lines.feed(data)
        if messages[0].get("kind") != kind:
            raise WireError(f"the hub sent no {kind.value}")
        return messages[0]

    def _send(self, kind: Kind, **values: Any) -> None:
        self._send_message({"kind": kind, **values})

    def _propose(self, reason: StopReason) -> None:
        self._send(Kind.STOP, reason=vars(reason))

    def _send_message(self, message: Message) -> None:
        with self._lock:
            try:
                if self._connection:
                    self._connection.sendall(connections.encode(message))
            except OSError:
                pass  # The reading side finds out why.

    def _is_readable(self, seconds: float) -> bool:
        """Waits up to `seconds` for data of the hub.

        By poll: select takes no file number from 1,024 on.
        """
        poll = select.poll()
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
                    self._read(self._connection)

                now = time.monotonic()
                if now >= next_beat and not self._closed.is_set():
                    next_beat = now + self.rules.beat_seconds
                    self._tick(now)
        except Exception:
            log.exception(
                "the watchdog of rank %d failed, which is a bug; the run continues without it",
                self._rank,
            )
            self._send(Kind.BYE)
        if self._connection:
            self._connection.close()
        self.stacks.close()

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
            messages = self._lines.feed(data) if data else [connections.end_of(None)]
        except (OSError, WireError) as error:
            messages = [connections.end_of(error)]
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        """Handles a message of the hub."""
        kind = message.get("kind")
        if kind == Kind.HEARD:
            self._waits_since = None
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
            self._stop(self._loss(connections.loss("rank 0", is_cut), 0, is_cut))

    def _wake(self, rank: int, process: Process) -> None:
        """Wakes a silent rank of this machine, and sends rank 0 its stacks."""
        state = process.state()
        text = ""
        if state != ENDED:
            text = process.wake_for_stacks(SECONDS_FOR_A_WOKEN_RANK)
        self._send(Kind.STACKS, rank=rank, text=text, state=state)

    def _loss(self, text: str, rank: int | None, is_cut: bool = False) -> StopReason:
        return StopReason(f"{text}; {processes.resume_advice(self.folder)}", RESTART_HELPS, rank, is_cut=is_cut)

    def _stop(self, reason: StopReason) -> None:
        """Remembers why the run stops. The main thread then has some time to notice by itself."""
        if self._reason is None:
            self._reason = reason
            self._decided_at = time.monotonic()
            # Before the main thread wakes up: it may end this process at once.
            self.tell(reason.text)
            self._decided.set()

    def _tick(self, now: float) -> None:
        """Ends the process if its time is over, else reports this rank's status."""
        suspended = self._suspension.seconds(now)
        status = self.progress.look(suspended)
        self._decided_at += suspended
        if self._waits_since is not None:
            self._waits_since += suspended

        if self._reason:
            if not self._is_leaving and now - self._decided_at >= self._patience:
                self._end(self._reason, self.spokesman)
            return
        if self._is_leaving:
            return

        if self._launcher.is_gone():
            text = "the launcher of the ranks is gone"
            self._patience = SECONDS_FOR_THE_MAIN_THREAD
            self._propose(StopReason(text, RESTART_HELPS))
            self._stop(self._loss(text, None))
        elif self._waits_since is None:
            self._waits_since = now
            self._send(Kind.BEAT, status=vars(status))
        elif not self._is_ending:
            self._judge_hub(now - self._waits_since, status.started)

    def _judge_hub(self, silent: float, started: bool) -> None:
        """Ends the process if rank 0, which judges all but itself, has been silent for too long.

        The other ranks take turns, for the first to act wakes rank 0, and it tells the rest.
        """
        limit = self.rules.limit
        if self._is_asked:
            limit = self.rules.silent_after
        elif not started:
            limit *= PATIENCE_AT_START
        turn = min(self._rank - 1, 10) * self.rules.beat_seconds
        if silent < limit + turn:
            return

        self._is_ending = True
        text = f"rank 0 has not answered since {wall_clock(silent)}"
        hub = self._hub
        is_here = hub is not None and hub.is_here()
        state = ""
        if hub and is_here:
            state = hub.state()
            if state:
                text = f"{text}, it is {state}"
        # The first message that it reads when it wakes up.
        self._propose(StopReason(text, RESTART_HELPS, 0))

        stacks = {self._rank: self.stacks.text()}
        if hub and is_here and state != ENDED:
            stacks[0] = hub.wake_for_stacks(SECONDS_FOR_A_WOKEN_RANK)
        where = processes.write_stacks(self.folder, stacks)
        self._end(self._loss(f"{text}; {where}".removesuffix("; "), 0), first=1)

    def _end(self, reason: StopReason, first: int) -> None:
        """Says why, at once on the first of the ranks that are left, and ends the process."""
        text = f"stopped because {reason.text}"
        if reason.is_cut and self._launcher.is_daemon:
            processes.say(text, self._rank, reason.rank)
            self._launcher.end_daemon()
        else:
            # The others write it too, in case the first is gone.
            wait_seconds = 0.0 if self._rank == first else SECONDS_FOR_ANOTHER_RANK
            processes.say(text, self._rank, reason.rank, wait_seconds)
            if reason.is_cut:
                time.sleep(SECONDS_FOR_THE_LAUNCHER)
        processes.exit_now(reason.code)
