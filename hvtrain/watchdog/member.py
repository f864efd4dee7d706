"""Every rank's side of the watchdog: reports its status, and ends the process when told to or left alone."""

import logging
import select
import socket
import threading
import time

from hvtrain.errors import RESTART_HELPS, UserError, in_one_line
from hvtrain.system.console import SECONDS_FOR_ANOTHER_RANK
from hvtrain.watchdog import ending
from hvtrain.watchdog.connections import SECONDS_TO_JOIN, Lines, Message, WireError, encode, is_cut, notice_cuts, proof
from hvtrain.watchdog.host_processes import ENDED, Launcher, Process, Stacks
from hvtrain.watchdog.judge import CUT, GONE, PATIENCE_AT_START, SECONDS_FOR_THE_MAIN_THREAD, Rules, Verdict, wall_clock
from hvtrain.watchdog.progress import Progress, SuspensionClock
from hvtrain.watchdog.watchdog import Watchdog

log = logging.getLogger(__name__)

SECONDS_FOR_A_WOKEN_RANK = 3.0
# Open MPI notices a cut by itself, later than we do (launch/reach.py). But mpirun waits for a host that it cannot
# reach once a rank has left it.
SECONDS_FOR_THE_LAUNCHER = 15.0


class Member(Watchdog):
    """One thread, from `join` on."""

    def __init__(self, rank: int, host: str, rules: Rules, progress: Progress, calls_launcher: bool) -> None:
        super().__init__(progress)
        self.rules = rules
        self.stacks = Stacks()
        self.hub_thread: threading.Thread | None = None
        self._rank = rank
        self._host = host
        self._launcher = Launcher(calls_launcher)
        self._lines = Lines()
        self._lock = threading.Lock()
        self._heard = threading.Event()
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._verdict: Verdict | None = None
        self._verdict_at = 0.0
        self._patience = rules.main_thread_seconds
        self._is_ending = self._is_asked = self._is_leaving = False
        self._suspension = SuspensionClock(rules.beat_seconds)
        self._waits_since: float | None = None
        self._connection: socket.socket | None = None
        self._hub: Process | None = None
        self._thread = threading.Thread(target=self._run, name="hvtrain watchdog", daemon=True)

    def join(self, address: tuple[str, int], token: str) -> None:
        """Raises OSError or WireError if the hub is not there, or does not know this rank."""
        self._connection = socket.create_connection(address, timeout=SECONDS_TO_JOIN)
        notice_cuts(self._connection)
        answer = proof(token, self._next("challenge")["challenge"], self._rank)
        state = {"process": vars(self.stacks.process), "status": vars(self.progress.look())}
        self._send({"rank": self._rank, "host": self._host, "proof": answer, **state})
        self._hub = Process(**self._next("welcome")["process"])
        self._thread.start()

    def fail(self, error: BaseException) -> None:
        """Returns once the others know, or after a second."""
        text, code = in_one_line(error), 1
        if isinstance(error, UserError):
            text, code = str(error).strip().partition("\n")[0][:300], error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            code = 130
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        self._is_leaving = True
        if self._verdict is None and not self._closed.is_set():
            self._heard.clear()
            self._send({"kind": "failed", "text": text, "code": code})
            self._heard.wait(1.0)

    def cause(self, seconds: float = 3.0) -> Verdict | None:
        self._is_asked = True
        self._send({"kind": "ask"})
        if not self._closed.is_set():
            self._decided.wait(seconds)
        while self._is_ending:
            time.sleep(1)  # The watchdog is about to end this process, and says why.
        self._is_leaving = self._verdict is not None
        return self._verdict

    def wait(self) -> Verdict | None:
        # In short intervals, between which Python handles signals.
        while self._thread.is_alive() and not self._closed.is_set() and not self._decided.wait(0.2):
            pass
        while self._is_ending and self._thread.is_alive():
            time.sleep(0.2)  # The watchdog is about to end this process.
        self._is_leaving = self._verdict is not None
        return self._verdict

    def signal_rank_0(self, number: int) -> None:
        # In a thread: the handler of a signal must not wait for a lock.
        threading.Thread(target=self._send, args=[{"kind": "signal", "number": number}], daemon=True).start()

    @property
    def spokesman(self) -> int:
        return 0 if self._connection else 1

    def stop(self) -> None:
        self._send({"kind": "bye"})
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * self.rules.beat_seconds + 1)
        if self.hub_thread:
            self.hub_thread.join(1.0)

    def _next(self, kind: str) -> Message:
        assert self._connection
        messages: list[Message] = []
        while not messages:
            if not (data := self._connection.recv(1 << 12)):
                raise WireError("the hub closed the connection")
            messages = self._lines.feed(data)
        if messages[0].get("kind") != kind:
            raise WireError(f"the hub sent no {kind}")
        return messages[0]

    def _send(self, message: Message) -> None:
        with self._lock:
            try:
                if self._connection:
                    self._connection.sendall(encode(message))
            except OSError:
                pass  # The reading side finds out why.

    def _is_readable(self, seconds: float) -> bool:
        """Waits so long for the hub to say something. By poll: select takes no file number from 1,024 on."""
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
            log.exception("the watchdog of rank %d failed, which is a bug; the run continues without it", self._rank)
            self._send({"kind": "bye"})
        if self._connection:
            self._connection.close()
        self.stacks.close()

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
            messages = self._lines.feed(data) if data else [{"kind": "lost"}]
        except (OSError, WireError) as error:
            messages = [{"kind": "cut" if is_cut(error) else "lost"}]
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        kind = message.get("kind")
        if kind == "heard":
            self._waits_since = None
            self._heard.set()
        elif kind == "verdict":
            self._decide(Verdict(**message["verdict"]))
        elif kind == "stacks":
            self._is_ending = True
            self._send({"kind": "stacks", "rank": self._rank, "text": self.stacks.text(), "state": ""})
            for asked in message["wake"]:
                process = Process(**asked["process"])
                state = process.state()
                text = "" if state == ENDED else process.wake_for_stacks(SECONDS_FOR_A_WOKEN_RANK)
                self._send({"kind": "stacks", "rank": asked["rank"], "text": text, "state": state})
        elif kind == "end":
            ending.end(RESTART_HELPS)
        elif kind == "bye":
            self._connection = None
            if self._verdict is None:
                self._closed.set()
        elif kind in ("lost", "cut"):
            self._connection = None
            self._decide(self._advise(f"rank 0 {CUT if kind == 'cut' else GONE}", 0, is_cut=kind == "cut"))

    def _advise(self, text: str, rank: int | None, is_cut: bool = False) -> Verdict:
        return Verdict(f"{text}; {ending.resume_advice(self.folder)}", RESTART_HELPS, rank, is_cut=is_cut)

    def _decide(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict, self._verdict_at = verdict, time.monotonic()
            self.tell(verdict.text)
            self._decided.set()

    def _tick(self, now: float) -> None:
        suspended = self._suspension.seconds(now)
        status = self.progress.look()
        self._verdict_at += suspended
        if self._waits_since is not None:
            self._waits_since += suspended
        if self._verdict:
            if not self._is_leaving and now - self._verdict_at >= self._patience:
                self._end(self._verdict, self.spokesman)
            return
        if self._is_leaving:
            return
        if self._launcher.is_gone():
            text = "the launcher of the ranks is gone"
            self._patience = SECONDS_FOR_THE_MAIN_THREAD
            self._send({"kind": "lost", "text": text, "rank": None})
            self._decide(self._advise(text, None))
        elif self._waits_since is None:
            self._waits_since = now
            self._send({"kind": "beat", "status": vars(status)})
        elif not self._is_ending:
            self._judge_hub(now - self._waits_since, status.started)

    def _judge_hub(self, silent: float, started: bool) -> None:
        """Rank 0 judges all but itself. The others take turns, for the first to act wakes it, and it tells the rest."""
        patience = 1 if started else PATIENCE_AT_START
        allowed = self.rules.silent_after if self._is_asked else self.rules.limit * patience
        if silent < allowed + min(self._rank - 1, 10) * self.rules.beat_seconds:
            return
        self._is_ending = True
        hub = self._hub if self._hub and self._hub.is_here() else None
        state = hub.state() if hub else ""
        text = f"rank 0 has not answered since {wall_clock(silent)}{f', it is {state}' if state else ''}"
        # The first thing that it reads when it wakes up.
        self._send({"kind": "lost", "text": text, "rank": 0})
        stacks = {self._rank: self.stacks.text()}
        if hub and state != ENDED:
            stacks[0] = hub.wake_for_stacks(SECONDS_FOR_A_WOKEN_RANK)
        where = ending.write_stacks(self.folder, stacks)
        self._end(self._advise(f"{text}; {where}".removesuffix("; "), 0), first=1)

    def _end(self, verdict: Verdict, first: int) -> None:
        """Says why, at once on the first of the ranks that are left, and ends the process."""
        text = f"stopped because {verdict.text}"
        if verdict.is_cut and self._launcher.is_daemon:
            ending.say(text, self._rank, verdict.rank)
            self._launcher.end_daemon()
        else:
            wait_seconds = 0.0 if self._rank == first else SECONDS_FOR_ANOTHER_RANK
            ending.say(text, self._rank, verdict.rank, wait_seconds)
            time.sleep(SECONDS_FOR_THE_LAUNCHER if verdict.is_cut else 0.0)
        ending.end(verdict.code)
