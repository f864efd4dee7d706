"""Runs a launcher as a child and supervises it: passes signals on, finds the first failure, leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvtrain.errors import INTERRUPTED, RESTART_HELPS
from hvtrain.launch import on_host
from hvtrain.launch.child import going_with
from hvtrain.launch.first_failure import AGAIN, Failure, judge
from hvtrain.launch.on_host import Answer
from hvtrain.launch.output import RankOutput, Relay
from hvtrain.launch.reach import Reached, mpirun_job
from hvtrain.launch.unmarked import Unmarked
from hvtrain.system import console, host_facts

SECONDS_TO_SAVE = 30.0
SECONDS_TO_STOP = 15.0
SECONDS_TO_BEGIN = 300.0
SECONDS_BETWEEN_LOOKS = 30.0
SECONDS_FOR_LAST_LINES = 5.0


@dataclass(frozen=True)
class Ending:
    """How a launch ended. failure is None if all went well, after Ctrl-C, and if no rank was started."""

    code: int
    failure: Failure | None = None


class Signals:
    """Hands SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the attempt that runs.

    `first` is the first that came, which means that this process has to end; None so far. `any_came` is then set.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._take: Callable[[int], None] | None = None
        self._waiting: list[int] = []
        self.any_came = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            # Under nohup SIGHUP is ignored, and stays so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._came)

    def pass_to(self, take: Callable[[int], None] | None) -> None:
        """Sends signals there from now on, and those that were waiting at once."""
        self._take = take
        while take and self._waiting:
            take(self._waiting.pop(0))

    def _came(self, number: int, *_: object) -> None:
        self.first = self.first or number
        self.any_came.set()
        if self._take:
            self._take(number)
        else:
            self._waiting.append(number)


class Launch:
    """A launcher and all that it starts, known by their mark: on_host.MARK holds the name of this launch's own folder.

    output: RankOutput gets both of the launcher's outputs in one stream, Unmarked each in its own, Relay only the error
    output. known: the hosts; None: the launcher writes them into the folder. label: how messages name a rank.
    """

    def __init__(
        self,
        line: Sequence[str],
        environment: Mapping[str, str],
        output: RankOutput | Relay | Unmarked,
        folder: Path,
        known: Reached | None = None,
        label: Callable[[int], str] = "rank {}".format,
        seconds_to_begin: float = SECONDS_TO_BEGIN,
    ) -> None:
        host_facts.raise_file_limit()
        self._output = output
        self._folder = folder
        self._known = known
        self._label = label
        self._oom_kills = self._later_oom_kills = on_host.oom_kills()
        self._seconds_to_begin = seconds_to_begin
        self._has_waited_in_vain = False
        self._came: list[int] = []
        self._was_asked = self._was_forced = False
        # The error output's pipe comes first.
        reads, writes = zip(*(os.pipe() for _ in output.takers))
        self._streams = [os.fdopen(read, encoding="utf-8", errors="replace") for read in reads]
        self._child = subprocess.Popen(
            line,
            env={**environment, on_host.MARK: str(folder)},
            stdin=subprocess.DEVNULL if output.merged else None,
            stdout=writes[-1] if output.merged or len(writes) > 1 else None,
            stderr=writes[0],
            # A reader of its own keeps the pipe from breaking, of which mpirun would die before it has ended its ranks.
            pass_fds=reads,
            # In this terminal's group it would get a Ctrl-C twice.
            start_new_session=True,
            preexec_fn=going_with(os.getpid()),
        )
        for write in writes:
            os.close(write)

    def run(self, signals: Signals) -> Ending:
        """Runs the line to its end and leaves nothing behind.

        Ctrl-C, SIGTERM and SIGUSR1 to this process go to the ranks of one host: then all ranks save and stop together,
        with code 130 after Ctrl-C, else 75. A closed terminal goes on to the launcher. A second signal, or no end in
        time, ends all by force.
        """
        signals.pass_to(self._take_signal)
        # In a thread of its own: an ssh that outlives mpirun keeps the pipe open.
        readers = [_in_background(take, stream) for take, stream in zip(self._output.takers, self._streams)]
        try:
            code = self._wait_for_child()
            answers = self._clear() if code else {}
            for reader in readers:
                reader.join(SECONDS_FOR_LAST_LINES)
            return self._ending(code, answers) if code else Ending(0)
        finally:
            signals.pass_to(None)

    def _take_signal(self, number: int) -> None:
        """Asks the ranks to stop, or passes the signal on; ends all by force at the second one."""
        if number == signal.SIGUSR1:
            _in_background(self._ask, number)
            return
        self._came.append(number)
        if len(self._came) > 1:
            _in_background(self._force)
            return
        if number == signal.SIGHUP:
            self._pass_on(number)
        else:
            _in_background(self._ask, number)
        last_resort = threading.Timer(SECONDS_TO_STOP if number == signal.SIGHUP else SECONDS_TO_SAVE, self._force)
        last_resort.daemon = True
        last_resort.start()

    def _ending(self, code: int, answers: Mapping[str, Answer | None]) -> Ending:
        listener, hosts = self._output.listener, self._reached()
        if self._has_waited_in_vain:
            places = ", ".join(dict.fromkeys(hosts.places))
            cause = f"no rank began within {self._seconds_to_begin:g} s on {places}"
            advice = "look there what a login does and what ps shows, or give more time with --start-timeout"
            return Ending(
                RESTART_HELPS, Failure("the launcher", socket.gethostname(), f"{cause}; {advice}", RESTART_HELPS)
            )
        name = signal.Signals(self._came[0]).name if self._came else "SIGUSR1"
        if self._came and (self._was_forced or not self._was_asked):
            # Nothing was saved; but SIGTERM asks for room, and an older checkpoint may be there.
            code = RESTART_HELPS if self._came[0] == signal.SIGTERM else 128 + self._came[0]
            return Ending(code, _of_all(f"ended by force after {name}", code) if self._was_forced else None)
        if self._came and self._came[0] == signal.SIGINT:
            return Ending(INTERRUPTED)  # Rank 0 has said what was saved.
        if listener.first is None:
            if code > 0:
                return Ending(code)
            why = f"killed by {signal.Signals(-code).name}; {AGAIN}"
            return Ending(RESTART_HELPS, Failure("the launcher", socket.gethostname(), why, RESTART_HELPS))
        short = {host for host, answer in answers.items() if answer and _grew(hosts.remote[host], answer["oom_kills"])}
        if _grew(self._oom_kills, on_host.oom_kills()):
            short |= {*hosts.places} - hosts.remote.keys()
        lost = {*listener.lost, *(host for host, answer in answers.items() if answer is None)}
        failure = judge(listener.first, listener.verdicts, hosts.places, short, lost, self._label)
        if self._was_asked and listener.first.code == 128 + signal.SIGUSR1:
            # It came before the rank had set its handler, or the program has none.
            failure = _of_all(f"stopped by {name} before it could save", RESTART_HELPS)
        return Ending(failure.exit_code, failure)

    def _wait_for_child(self) -> int:
        """Keeps count of the kernel's kills of the last minute: older ones did not end this run.

        Ends the launcher if no rank begins in time: MPI waits for a host that does not answer for ever.
        """
        latest, has_begun = time.monotonic() + self._seconds_to_begin, False
        while True:
            try:
                return self._child.wait(min(SECONDS_BETWEEN_LOOKS, self._seconds_to_begin))
            except subprocess.TimeoutExpired:
                self._oom_kills, self._later_oom_kills = self._later_oom_kills, on_host.oom_kills()
            has_begun = has_begun or self._has_begun()
            if not has_begun and time.monotonic() > latest:
                self._has_waited_in_vain = True
                self._force()

    def _has_begun(self) -> bool:
        """True once a rank runs on any host; also if it is not known where ranks are to run."""
        hosts, mark = self._reached(), str(self._folder)
        if not hosts.places or on_host.begun(mark)["count"]:
            return True
        answers = [hosts.call(host, "begun", mark) for host in hosts.remote]
        return any(answer and answer["count"] for answer in answers)

    def _ask(self, number: int) -> None:
        """Asks the ranks of this host, or of the first other host that has any."""
        sent = number if number == signal.SIGINT else signal.SIGUSR1
        count = on_host.ask(str(self._folder), sent)["count"]
        for host in self._reached().remote if not count else ():
            answer = self._reached().call(host, "ask", str(self._folder), sent)
            count = answer["count"] if answer else 0
            if count:
                break
        self._was_asked = self._was_asked or count > 0
        if count and number == signal.SIGINT:
            console.say_stopping()
        elif not count:
            name = signal.Signals(number).name
            sys.stderr.write(f"hvtrain: {name} came, but no rank was found to pass it to; send it to a rank's host\n")
            if number != signal.SIGUSR1:
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        # To its whole group: there may be a shell between it and the ranks.
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    def _force(self) -> None:
        if self._child.poll() is None:
            self._was_forced = True
        self._clear()

    def _clear(self) -> dict[str, Answer | None]:
        return self._reached().clear(str(self._folder), mpirun_job(self._folder))

    def _reached(self) -> Reached:
        return self._known or Reached.read(self._folder)


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _of_all(cause: str, code: int) -> Failure:
    return Failure("", "", cause, code, is_preemption=True)


def _in_background(work: Any, *arguments: Any) -> threading.Thread:
    """A signal handler must not wait for ssh."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread
