"""Runs a launcher as a child and supervises it: passes signals on, finds the first failure, cleans up."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvtrain.errors import INTERRUPTED, RESTART_HELPS
from hvtrain.launch import on_host
from hvtrain.launch.child import die_with_parent, handle_signals
from hvtrain.launch.first_failure import Ending, again, judge
from hvtrain.launch.job import SECONDS_TO_BEGIN
from hvtrain.launch.output import PlainOutput, RankOutput
from hvtrain.launch.remote_hosts import Answers, HostCalls, mpirun_job
from hvtrain.system import console, host_facts

# After a signal, until all ranks are ended by force: they save within the first time, and only stop
# within the second.
SECONDS_TO_SAVE = 30.0
SECONDS_TO_STOP = 15.0
SECONDS_BETWEEN_LOOKS = 30.0
# For what is still in the pipes when the launcher has ended.
SECONDS_FOR_LAST_LINES = 5.0


class Signals:
    """Passes the signals of this process on to the current attempt.

    Attributes:
        first: the first signal, after which this process has to end; None before it.
        received: set once there is one.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.received = console.SignalFlag()
        self._handler: Callable[[int], None] | None = None
        self._waiting: list[int] = []
        handle_signals(self._receive)

    def pass_to(self, handler: Callable[[int], None] | None) -> None:
        """Calls the handler for every signal from now on, and at once for those that are waiting."""
        self._handler = handler
        # A signal may arrive before an attempt, or between two.
        while handler and self._waiting:
            handler(self._waiting.pop(0))

    def _receive(self, number: int, *_: object) -> None:
        self.first = self.first or number
        self.received.set()
        if self._handler:
            self._handler(number)
        else:
            self._waiting.append(number)


class Launch:
    """A launcher and all that it starts.

    Its processes carry the name of the launch's folder in on_host.MARK.

    Args:
        line: the launcher's command.
        environment: its variables.
        output: shows what the launcher and its ranks write. RankOutput gets both of the launcher's
            outputs in one stream, PlainOutput each in its own.
        folder: a folder of this launch alone, in which whoever starts the ranks writes their hosts.
        label: how messages name a rank.
        seconds_to_begin: after this time without any rank the launcher is ended.
    """

    def __init__(
        self,
        line: Sequence[str],
        environment: Mapping[str, str],
        output: RankOutput | PlainOutput,
        folder: Path,
        label: Callable[[int], str] = "rank {}".format,
        seconds_to_begin: float = SECONDS_TO_BEGIN,
    ) -> None:
        # The child inherits the limit. What joins a thousand ranks opens files for each of them.
        host_facts.raise_file_limit()
        self._output = output
        self._folder = folder
        self._label = label
        self._advice = again(line)
        self._seconds_to_begin = seconds_to_begin

        # This host's count half a minute to a minute ago, and the one after it.
        self._oom_kills = on_host.oom_kills()
        self._later_oom_kills = self._oom_kills
        self._signals: list[int] = []
        self._was_asked = False
        self._was_forced = False
        self._began_too_late = False

        # The error output's pipe comes first.
        reads, writes = zip(*(os.pipe() for _ in output.readers))
        self._streams = [os.fdopen(read, encoding="utf-8", errors="replace") for read in reads]
        self._child = subprocess.Popen(
            line,
            env={**environment, on_host.MARK: str(folder)},
            stdin=subprocess.DEVNULL if isinstance(output, RankOutput) else None,
            stdout=writes[-1],
            stderr=writes[0],
            # The child holds a reading end itself, so that the pipe never breaks: mpirun would die
            # of that before it has ended its ranks.
            pass_fds=reads,
            # In this terminal's group it would get a Ctrl-C twice.
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )
        for write in writes:
            os.close(write)

    def run(self, signals: Signals) -> Ending:
        """Runs the launcher to its end and leaves nothing behind.

        Ctrl-C, SIGTERM and SIGUSR1 to this process go to the ranks of one host: then all ranks save
        and stop together, with code 130 after Ctrl-C, else 75. A closed terminal goes on to the
        launcher. A second signal, or no end in time, ends all by force.
        """
        signals.pass_to(self._take_signal)
        # In threads of their own: an ssh that outlives mpirun keeps the pipe open.
        readers = [_in_background(read, stream) for read, stream in zip(self._output.readers, self._streams)]
        try:
            code = self._wait_for_child()
            # After a failure, ranks may be left on any host. The answers tell which hosts are lost.
            answers = self._clear() if code else {}
            for reader in readers:
                reader.join(SECONDS_FOR_LAST_LINES)
            return self._ending(code, answers)
        finally:
            signals.pass_to(None)

    def _take_signal(self, number: int) -> None:
        """Asks the ranks to stop or passes the signal on; the second signal ends everything by force."""
        # A request to save and stop, as before a time limit. A second one forces nothing.
        if number == signal.SIGUSR1:
            _in_background(self._ask, number)
            return

        self._signals.append(number)
        if len(self._signals) > 1:
            _in_background(self._force)
            return

        seconds = SECONDS_TO_SAVE
        if number == signal.SIGHUP:
            # The launcher ends its ranks by itself, and nothing is saved.
            self._pass_on(number)
            seconds = SECONDS_TO_STOP
        else:
            _in_background(self._ask, number)
        last_resort = threading.Timer(seconds, self._force)
        last_resort.daemon = True
        last_resort.start()

    def _ending(self, code: int, answers: Answers) -> Ending:
        """Explains why the launcher ended with this code. answers: what on_host.clear returned on the other hosts."""
        if code == 0:
            return Ending(0)

        hosts = self._hosts()
        if self._began_too_late:
            names = ", ".join(dict.fromkeys(hosts.rank_hosts))
            return _launcher_failed(
                f"no rank began within {self._seconds_to_begin:g} s on {names}; look there what a login does and what "
                "ps shows, or give more time with --start-timeout"
            )

        number = next(iter(self._signals), signal.SIGUSR1)
        signal_name = signal.Signals(number).name
        if self._signals and (self._was_forced or not self._was_asked):
            # Nothing was saved; but SIGTERM asks for room, and an older checkpoint may be there.
            code = RESTART_HELPS if number == signal.SIGTERM else 128 + number
            if not self._was_forced:
                return Ending(code)
            return Ending(code, f"ended by force after {signal_name}; {self._advice}")
        if number == signal.SIGINT:
            return Ending(INTERRUPTED)  # Rank 0 has told what was saved.

        listener = self._output.listener
        if listener.first is None:
            # No rank was started, and the launcher has told why.
            if code > 0:
                return Ending(code)
            return _launcher_failed(f"killed by {signal.Signals(-code).name}; {self._advice}")

        ending = judge(
            listener.first,
            listener.verdicts,
            hosts.rank_hosts,
            out_of_memory=self._hosts_out_of_memory(hosts, answers),
            lost={*listener.lost, *(host for host, answer in answers.items() if answer is None)},
            label=self._label,
            advice=self._advice,
        )
        if self._was_asked and listener.first.code == 128 + signal.SIGUSR1:
            # It came before the rank had set its handler, or the program has none.
            return Ending(RESTART_HELPS, f"stopped by {signal_name} before it could save; {self._advice}")
        return ending

    def _hosts_out_of_memory(self, hosts: HostCalls, answers: Answers) -> set[str]:
        """The hosts whose kernel has killed processes for lack of memory during the launch."""
        short = {host for host, answer in answers.items() if answer and answer.get("oom_kills", 0) > hosts.remote[host]}
        # A host that is not remote is this one, by the name that -H gives it.
        if on_host.oom_kills() > self._oom_kills:
            short |= {*hosts.rank_hosts} - hosts.remote.keys()
        return short

    def _wait_for_child(self) -> int:
        """Waits for the launcher's end, and ends it if no rank begins in time.

        Returns its exit code.

        MPI waits forever for a host that does not answer. Meanwhile the kernel's kills are counted
        every half minute: those from before the last minute did not end this run.
        """
        latest_begin = time.monotonic() + self._seconds_to_begin
        has_begun = False
        while True:
            try:
                return self._child.wait(min(SECONDS_BETWEEN_LOOKS, self._seconds_to_begin))
            except subprocess.TimeoutExpired:
                self._oom_kills = self._later_oom_kills
                self._later_oom_kills = on_host.oom_kills()

            has_begun = has_begun or self._has_begun()
            if not has_begun and time.monotonic() > latest_begin:
                self._began_too_late = True
                self._force()

    def _has_begun(self) -> bool:
        """True once a rank runs on any host; also if it is not known where ranks are to run."""
        hosts = self._hosts()
        return not hosts.rank_hosts or hosts.count("begun", str(self._folder)) > 0

    def _ask(self, number: int) -> None:
        """Asks the ranks of this host to stop, or of the first other host that has any: they tell all the others."""
        # To ranks SIGUSR1 means the same as SIGTERM: save and stop.
        request = signal.SIGINT if number == signal.SIGINT else signal.SIGUSR1
        count = self._hosts().count("ask", str(self._folder), request)
        # Only ranks that were asked can have saved, which decides the exit code.
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

    def _clear(self) -> Answers:
        return self._hosts().clear(str(self._folder), mpirun_job(self._folder))

    def _hosts(self) -> HostCalls:
        return HostCalls.read(self._folder)


def _launcher_failed(cause: str) -> Ending:
    host = socket.gethostname()
    return Ending(RESTART_HELPS, f"FIRST FAILURE the launcher host {host}: {cause}", host)


def _in_background(work: Any, *arguments: Any) -> threading.Thread:
    """Runs work in a thread: a signal handler must not wait for ssh."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread
