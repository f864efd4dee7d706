"""Runs a launcher as a child and supervises it: passes signals on, finds the first failure, and cleans up."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hvtrain.errors import INTERRUPTED, RESTART_HELPS
from hvtrain.launch import on_host
from hvtrain.launch.child import die_with_parent, handle_signals
from hvtrain.launch.first_failure import Ending, judge, restart_advice
from hvtrain.launch.job import SECONDS_TO_BEGIN
from hvtrain.launch.output import PlainOutput, RankOutput
from hvtrain.launch.remote_hosts import Answers, HostCalls
from hvtrain.system import console, host_facts

# Time from a signal until all ranks are killed: to save and stop, or only to stop (SIGHUP).
SECONDS_TO_SAVE = 30.0
SECONDS_TO_STOP = 15.0
POLL_SECONDS = 30.0
# Time to read what is still in the pipes after the launcher has ended.
SECONDS_FOR_LAST_LINES = 5.0


class Signals:
    """Passes the signals of this process on to the current attempt.

    Attributes:
        first: the first signal, after which this process has to end; None if there was none.
        received: set once a signal has arrived.
    """

    first: int | None = None
    _handler: Callable[[int], None] | None = None

    def __init__(self) -> None:
        self.received = console.SignalFlag()
        self._waiting: list[int] = []
        handle_signals(self._receive)

    def pass_to(self, handler: Callable[[int], None] | None) -> None:
        """Calls the handler for all pending signals now, and for every signal from now on.

        With None, later signals stay pending until the next handler is passed.
        """
        self._handler = handler
        # A signal may arrive before an attempt, or between two.
        while handler and self._waiting:
            handler(self._waiting.pop(0))

    def _receive(self, signal_number: int, *_) -> None:
        self.first = self.first or signal_number
        self.received.set()
        if self._handler:
            self._handler(signal_number)
        else:
            self._waiting.append(signal_number)


class Launch:
    """Runs a launcher, and ends everything that it has started.

    All of these processes have the launch's folder in the environment variable on_host.MARK.

    Args:
        command: the launcher's command.
        environment: its environment variables.
        output: shows what the launcher and its ranks write. RankOutput gets the launcher's stdout and
            stderr in one stream, PlainOutput each in its own.
        folder: a folder for this launch only, where the process that starts the ranks writes their hosts.
        label: returns the name of a rank in messages.
        seconds_to_begin: the launcher is killed if no rank has begun after this time.
    """

    _asked_to_save = False
    _was_killed = False
    _began_too_late = False

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: RankOutput | PlainOutput,
        folder: Path,
        label: Callable[[int], str] = "rank {}".format,
        seconds_to_begin: float = SECONDS_TO_BEGIN,
    ) -> None:
        # The child inherits the limit: each rank opens files for all other
        # ranks, and the launcher opens files for all ranks.
        host_facts.raise_file_limit()
        self._output = output
        self._folder = folder
        self._label = label
        self._advice = restart_advice(command)
        self._seconds_to_begin = seconds_to_begin

        # This host's count of OOM kills, taken 30 to 60 s ago, and the count taken after that.
        self._oom_kills = on_host.oom_kills()
        self._later_oom_kills = self._oom_kills
        self._signals: list[int] = []

        # The pipe of stderr comes first.
        reads, writes = zip(*(os.pipe() for _ in output.readers))
        self._streams = [os.fdopen(read, encoding="utf-8", errors="replace") for read in reads]
        self._child = subprocess.Popen(
            command,
            # SPT_NOENV keeps the package setproctitle from overwriting the mark in /proc/PID/environ.
            env={**environment, on_host.MARK: str(folder), "SPT_NOENV": "1"},
            stdin=subprocess.DEVNULL if isinstance(output, RankOutput) else None,
            stdout=writes[-1],
            stderr=writes[0],
            # The child also holds the read ends, so that no pipe ever breaks: mpirun would die of a
            # broken pipe before it has ended its ranks.
            pass_fds=reads,
            # In the terminal's process group the child would get Ctrl-C twice.
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        for write in writes:
            os.close(write)

    def run(self, signals: Signals) -> Ending:
        """Runs the launcher until it ends, cleans up after a failure, and returns why it ended.

        Ctrl-C, SIGTERM and SIGUSR1 to this process go to the ranks of one host: then all ranks save
        and stop together, with code 130 after Ctrl-C, else 75. SIGHUP (a closed terminal) is passed
        to the launcher. Everything is killed after a second signal other than SIGUSR1, or if the
        launcher does not end in time.
        """
        signals.pass_to(self._handle_signal)
        # Read in threads: an ssh that outlives mpirun keeps the pipe open.
        readers = [
            console.in_background(read, stream)
            for read, stream in zip(self._output.readers, self._streams)
        ]
        try:
            code = self._wait_for_child()
            # After a failure, ranks may be left on any host. The answers show which hosts are lost.
            answers = self._clean_up() if code else {}
            for reader in readers:
                reader.join(SECONDS_FOR_LAST_LINES)
            return self._ending(code, answers)
        finally:
            signals.pass_to(None)

    def _handle_signal(self, signal_number: int) -> None:
        """Asks the ranks to stop, or passes the signal on.

        The second signal other than SIGUSR1 kills everything. Calls over ssh run in threads, since
        a signal handler must not wait for them.
        """
        # A request to save and stop, as schedulers send before a time
        # limit; repeating it does no harm.
        if signal_number == signal.SIGUSR1:
            console.in_background(self._ask_to_save, signal_number)
            return

        self._signals.append(signal_number)
        if len(self._signals) > 1:
            console.in_background(self._kill_all)
            return

        seconds = SECONDS_TO_SAVE
        if signal_number == signal.SIGHUP:
            # The launcher ends its ranks itself, and nothing is saved.
            self._pass_on(signal_number)
            seconds = SECONDS_TO_STOP
        else:
            console.in_background(self._ask_to_save, signal_number)
        console.call_later(seconds, self._kill_all)

    def _ending(self, code: int, answers: Answers) -> Ending:
        """Returns why the launcher ended.

        Args:
            code: the launcher's exit code; negative if a signal killed it.
            answers: the results of on_host.clean_up on the other hosts.
        """
        if code == 0:
            return Ending(0)

        hosts = self._hosts()
        if self._began_too_late:
            return _launcher_failure(
                f"no rank began within {self._seconds_to_begin:g} s on {', '.join(dict.fromkeys(hosts.rank_hosts))}; "
                "look at the login scripts and the output of ps there, or give more time with --start-timeout"
            )

        signal_number = next(iter(self._signals), signal.SIGUSR1)
        signal_name = signal.Signals(signal_number).name
        if self._signals and (self._was_killed or not self._asked_to_save):
            # Nothing was saved, but after SIGTERM, as on preemption, a
            # restart can use an older checkpoint.
            code = RESTART_HELPS if signal_number == signal.SIGTERM else 128 + signal_number
            if not self._was_killed:
                return Ending(code)
            return Ending(code, f"ended by force after {signal_name}; {self._advice}")
        if signal_number == signal.SIGINT:
            return Ending(INTERRUPTED)  # Rank 0 has reported what was saved.

        listener = self._output.listener
        if listener.first is None:
            # No rank was started, and the launcher has said why.
            if code > 0:
                return Ending(code)
            return _launcher_failure(f"killed by {signal.Signals(-code).name}; {self._advice}")

        if self._asked_to_save and listener.first.code == 128 + signal.SIGUSR1:
            # The signal came before the rank had set its handler, or the rank's program sets none.
            return Ending(
                RESTART_HELPS, f"stopped by {signal_name} before it could save; {self._advice}"
            )
        return judge(
            listener.first,
            listener.verdicts,
            hosts.rank_hosts,
            out_of_memory=self._hosts_out_of_memory(hosts, answers),
            lost={*listener.lost, *(host for host, answer in answers.items() if answer is None)},
            label=self._label,
            advice=self._advice,
        )

    def _hosts_out_of_memory(self, hosts: HostCalls, answers: Answers) -> set[str]:
        """Returns the hosts whose kernel has killed processes for lack of memory during the launch."""
        short = {host for host, answer in answers.items() if (answer or 0) > hosts.remote[host]}
        # A host that is not remote is this one, by its name in -H.
        if on_host.oom_kills() > self._oom_kills:
            short |= {*hosts.rank_hosts} - hosts.remote.keys()
        return short

    def _wait_for_child(self) -> int:
        """Waits for the launcher to end, and kills it if no rank begins in time.

        Returns its exit code.

        MPI waits forever for a host that does not answer. The kernel's OOM kills are counted every half
        minute meanwhile: those from more than a minute ago did not end this run.
        """
        latest_begin = time.monotonic() + self._seconds_to_begin
        has_begun = False
        while True:
            try:
                return self._child.wait(min(POLL_SECONDS, self._seconds_to_begin))
            except subprocess.TimeoutExpired:
                self._oom_kills = self._later_oom_kills
                self._later_oom_kills = on_host.oom_kills()

            hosts = self._hosts()
            if not hosts.rank_hosts:
                continue  # The hosts are not known yet, or never will be.
            has_begun = has_begun or hosts.count("count_ranks", str(self._folder)) > 0
            if not has_begun and time.monotonic() > latest_begin:
                self._began_too_late = True
                self._kill_all()

    def _ask_to_save(self, signal_number: int) -> None:
        """Asks the ranks of one host, preferably this one, to save and stop. They tell all other ranks."""
        # For ranks SIGUSR1 means the same as SIGTERM: save and stop.
        request = signal.SIGINT if signal_number == signal.SIGINT else signal.SIGUSR1
        count = self._hosts().count("signal_ranks", str(self._folder), request)
        # The exit code depends on this: ranks can have saved only if they were asked to.
        self._asked_to_save = self._asked_to_save or count > 0
        if count and signal_number == signal.SIGINT:
            console.say_stopping()
        elif not count:
            sys.stderr.write(
                f"hvtrain: {signal.Signals(signal_number).name} arrived, but no rank was found to pass it to; "
                "send the signal to a rank directly\n"
            )
            if signal_number != signal.SIGUSR1:
                self._pass_on(signal_number)

    def _pass_on(self, signal_number: int) -> None:
        # Signal the whole process group: there may be a shell between the launcher and the ranks.
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal_number)

    def _kill_all(self) -> None:
        if self._child.poll() is None:
            self._was_killed = True
        self._clean_up()

    def _clean_up(self) -> Answers:
        return self._hosts().clean_up(self._folder)

    def _hosts(self) -> HostCalls:
        return HostCalls.read(self._folder)


def _launcher_failure(cause: str) -> Ending:
    host = socket.gethostname()
    return Ending(RESTART_HELPS, f"FIRST FAILURE the launcher host {host}: {cause}", host)
