"""What one process of a host can know of another one there, and of its own launcher: from /proc and by signals."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STOPPED = "stopped by a signal (SIGSTOP, Ctrl-Z)"
TRACED = "stopped by a debugger"
ENDED = "at its end"


def machine() -> str:
    """The same for two processes that see each other's numbers: this boot of this host, this container."""
    return f"{_boot()} {_namespace('pid')}"


def network() -> str:
    """The same for two processes that have one loopback interface."""
    return f"{_boot()} {_namespace('net')}"


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


def _namespace(kind: str) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    return "?"


@dataclass(frozen=True)
class Process:
    """How a process is found again by the others of its machine: its number alone may have passed to another."""

    machine: str
    number: int
    begun: str
    stacks: int

    @classmethod
    def of(cls, message: dict[str, Any]) -> Process:
        return cls(**{name: message[name] for name in ("machine", "number", "begun", "stacks")})

    def message(self) -> dict[str, Any]:
        return asdict(self)

    def is_here(self) -> bool:
        return self.machine == machine() and self.number != os.getpid()

    def state(self) -> str:
        """In words, where it matters; else empty."""
        words = _stat(self.number)
        if not words or words[19] != self.begun:
            return ENDED
        return {"T": STOPPED, "t": TRACED, "Z": ENDED, "X": ENDED}.get(words[0], "")

    def woken_stacks(self, seconds: float) -> str:
        """Has it write its stacks, by C code that needs no Python, and go on if it was stopped; what it wrote."""
        with suppress(ProcessLookupError, PermissionError):
            # To its main thread, which then writes before it goes on; glibc has it from 2.30 on.
            to_thread = getattr(ctypes.CDLL(None), "tgkill", None)
            if self.stacks >= 0 and to_thread:
                to_thread(self.number, self.number, signal.SIGUSR2)
            elif self.stacks >= 0:
                os.kill(self.number, signal.SIGUSR2)
            os.kill(self.number, signal.SIGCONT)
        deadline = time.monotonic() + seconds
        text, before = "", None
        while self.stacks >= 0 and (not text or text != before) and time.monotonic() < deadline:
            time.sleep(0.1)
            with suppress(OSError):
                written = Path(f"/proc/{self.number}/fd/{self.stacks}")
                before, text = text, written.read_text(encoding="utf-8", errors="replace")
        return text


class Stacks:
    """This process's Python stacks, in memory that others of its machine can read; no file is left behind."""

    def __init__(self) -> None:
        self._file = os.memfd_create("hvtrain-stacks")
        # Only where the user has no other use for the signal.
        self._takes_signal = signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        if self._takes_signal:
            faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True, chain=False)
        self.process = Process(
            machine(), os.getpid(), (_stat(os.getpid()) or [""] * 20)[19], self._file if self._takes_signal else -1
        )

    def text(self) -> str:
        """The stacks of all threads now."""
        # Not the file of the signal: what that holds is from the moment at which this process was stopped.
        with os.fdopen(os.memfd_create("hvtrain-stacks-now"), "rb") as file:
            faulthandler.dump_traceback(file.fileno(), all_threads=True)
            file.seek(0)
            return file.read().decode("utf-8", "replace")

    def close(self) -> None:
        if self._takes_signal:
            faulthandler.unregister(signal.SIGUSR2)
        os.close(self._file)


class Launcher:
    """Is what started this rank still there?

    On the launcher's own host this process changes its parent when the launcher dies. Under Gloo a rank elsewhere
    hangs on an ssh connection, whose end it does not see; but the launcher keeps a port open for the whole run.
    """

    SECONDS_BETWEEN_CALLS = 5.0
    REFUSALS = 2

    def __init__(self, calls: bool) -> None:
        self._parent = os.getppid()
        # Open MPI's on a host that is not its own.
        self.is_daemon = _name(self._parent) == "orted"
        self._refused = 0
        self._port: tuple[str, int] | None = None
        address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT"))
        if calls and address and port.isdigit():
            self._port = (address, int(port))
            if self._is_refused():
                self._port = None  # It closes its port after the start, then.
        self._called = time.monotonic()

    def is_gone(self) -> bool:
        if self._parent != os.getppid():
            return True
        if self._port and time.monotonic() - self._called >= self.SECONDS_BETWEEN_CALLS:
            self._refused = self._refused + 1 if self._is_refused() else 0
            self._called = time.monotonic()
        return self._refused >= self.REFUSALS

    def end_daemon(self) -> None:
        """Where the launcher cannot be reached: Open MPI's daemon would try to for a quarter of an hour."""
        with suppress(OSError):
            os.kill(self._parent, signal.SIGTERM)

    def _is_refused(self) -> bool:
        """A silent network is not a refusal."""
        try:
            socket.create_connection(self._port or ("", 0), timeout=1.0).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False


def _name(number: int) -> str:
    try:
        return Path(f"/proc/{number}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _stat(number: int) -> list[str]:
    """The words of /proc/N/stat after the name in parentheses, which may hold anything: state first, begin as 20th."""
    try:
        return Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
