"""Runs a launcher's line as a child and watches over its ranks: signals, the first failure, nothing left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from hvtrain.errors import RESTART_HELPS
from hvtrain.launch import on_host, reached
from hvtrain.launch.failure import AGAIN, Failure, judge
from hvtrain.launch.listen import Listener
from hvtrain.launch.reached import Answer, Reached
from hvtrain.launch.signals import Signals

SECONDS_TO_SAVE = 30.0
SECONDS_TO_STOP = 15.0
SECONDS_BETWEEN_LOOKS = 30.0
SECONDS_FOR_LAST_LINES = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


class Output(Protocol):
    """Takes what the launcher writes. `merged`: both of its outputs in one stream, else its error output alone."""

    merged: bool
    listener: Listener

    def take(self, stream: IO[str]) -> None: ...


@dataclass(frozen=True)
class Ending:
    """How a launch ended. failure None: well, or by Ctrl-C, or before any rank started."""

    code: int
    failure: Failure | None = None


def start(
    line: Sequence[str],
    environment: Mapping[str, str],
    output: Output,
    signals: Signals,
    folder: Path,
    known: Reached | None = None,
) -> Ending:
    """Runs the line to its end.

    SIGUSR1 and SIGTERM to this process are asked of a rank: the ranks save and stop together, and the code is 75.
    Ctrl-C and a closed terminal go on to the launcher. A second signal, or no end in time, ends all by force.

    Args:
        folder: of this launch alone, while it lasts; on_host.MARK holds its name.
        known: what is known of the hosts; None: the line itself writes it into the folder.
    """
    launch = _Launch(line, environment, output, folder, known)
    signals.pass_to(launch.take_signal)
    try:
        return launch.wait()
    finally:
        signals.pass_to(None)


class _Launch:
    """A launcher that runs, and all that it started: what has the folder's name as its mark."""

    def __init__(
        self,
        line: Sequence[str],
        environment: Mapping[str, str],
        output: Output,
        folder: Path,
        known: Reached | None,
    ) -> None:
        self._output = output
        self._folder = folder
        self._known = known
        self._oom_kills = self._later_oom_kills = on_host.oom_kills()
        self._came: list[int] = []
        self._was_asked = False
        self._was_forced = False
        parent = os.getpid()

        def go_with_parent() -> None:
            """kill -9 of this process would leave the launcher and its ranks behind."""
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        read, write = os.pipe()
        self._stream = os.fdopen(read, encoding="utf-8", errors="replace")
        self._child = subprocess.Popen(
            line,
            env={**environment, on_host.MARK: str(folder)},
            stdin=subprocess.DEVNULL if output.merged else None,
            stdout=write if output.merged else None,
            stderr=write,
            # It can read its own pipe, which so never breaks: mpirun would die of it, before it has ended its ranks.
            pass_fds=[read],
            # In this terminal's group it would get a Ctrl-C twice.
            start_new_session=True,
            preexec_fn=go_with_parent,
        )
        os.close(write)

    def take_signal(self, number: int) -> None:
        """What the process was told goes on: the first by asking or passing on, the second by force."""
        if number == signal.SIGUSR1:
            _in_background(self._ask, number)
            return
        self._came.append(number)
        if len(self._came) > 1:
            _in_background(self._force)
            return
        if number == signal.SIGTERM:
            _in_background(self._ask, number)
        else:
            self._pass_on(number)
        last_resort = threading.Timer(SECONDS_TO_SAVE if number == signal.SIGTERM else SECONDS_TO_STOP, self._force)
        last_resort.daemon = True
        last_resort.start()

    def wait(self) -> Ending:
        """Waits for the end, says nothing, leaves nothing behind."""
        # In a thread of its own: an ssh that outlives mpirun keeps the pipe open.
        reader = threading.Thread(target=self._output.take, args=[self._stream], daemon=True)
        reader.start()
        code = self._wait_for_child()
        if code == 0:
            reader.join(SECONDS_FOR_LAST_LINES)
            return Ending(0)
        answers = self._clear()
        reader.join(SECONDS_FOR_LAST_LINES)
        return self._ending(code, answers)

    def _ending(self, code: int, answers: Mapping[str, Answer | None]) -> Ending:
        listener, hosts = self._output.listener, self._reached()
        name = signal.Signals(self._came[0]).name if self._came else "SIGUSR1"
        if self._came and (self._was_forced or not self._was_asked):
            # Nothing was saved; but what SIGTERM wanted was room, and an older checkpoint may be there.
            told = RESTART_HELPS if self._came[0] == signal.SIGTERM else 128 + self._came[0]
            return Ending(told, _of_all(f"ended by force after {name}", told) if self._was_forced else None)
        if listener.first is None:
            if code > 0:
                return Ending(code)
            killed = signal.Signals(-code).name
            why = f"killed by {killed}; {AGAIN}"
            return Ending(RESTART_HELPS, Failure("the launcher", socket.gethostname(), why, RESTART_HELPS))
        memory = {host for host in hosts.places if host not in hosts.remote and self._is_short_of_memory()}
        memory |= {
            host for host, answer in answers.items() if answer and _grew(hosts.remote[host], answer["oom_kills"])
        }
        lost = {*listener.cut, *(host for host, answer in answers.items() if answer is None)}
        failure = judge(listener.first, listener.words, hosts.places, memory, lost)
        if self._was_asked and listener.first.code == 128 + signal.SIGUSR1:
            # Before its own handler stood, or a program that has none.
            failure = _of_all(f"stopped by {name} before it could save", RESTART_HELPS)
        return Ending(failure.exit_code, failure)

    def _wait_for_child(self) -> int:
        """Only what the kernel killed in the last minute can be what ends a run of days."""
        while True:
            try:
                return self._child.wait(SECONDS_BETWEEN_LOOKS)
            except subprocess.TimeoutExpired:
                self._oom_kills, self._later_oom_kills = self._later_oom_kills, on_host.oom_kills()

    def _is_short_of_memory(self) -> bool:
        return _grew(self._oom_kills, on_host.oom_kills())

    def _ask(self, number: int) -> None:
        """Asks the ranks of this host, or else those of the first other host that has any."""
        count = on_host.ask(str(self._folder))
        for host in self._reached().remote if not count else ():
            answer = self._reached().there(host, "ask", str(self._folder))
            count = answer["count"] if answer else 0
            if count:
                break
        self._was_asked = self._was_asked or count > 0
        if not count:
            name = signal.Signals(number).name
            sys.stderr.write(f"hvtrain: {name} came, and no rank was found to pass it to; send it to a rank's host\n")
            if number == signal.SIGTERM:
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        # To all of its group: there may be a shell between it and the ranks.
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    def _force(self) -> None:
        if self._child.poll() is None:
            self._was_forced = True
        self._clear()

    def _clear(self) -> dict[str, Answer | None]:
        return self._reached().clear(str(self._folder), reached.job(self._folder))

    def _reached(self) -> Reached:
        return self._known or reached.read(self._folder)


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _of_all(cause: str, code: int) -> Failure:
    return Failure("", "", cause, code, is_preemption=True)


def _in_background(work: Any, *arguments: Any) -> None:
    """A signal handler must not wait for ssh."""
    threading.Thread(target=work, args=arguments, daemon=True).start()
