"""Inspects and wakes other processes on this host, and ends this process, for the watchdog.

Writing a last message and Python stacks must not delay the end of a process for long.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvtrain.system import checkpoint_notes as notes
from hvtrain.system import console
from hvtrain.system.console import within
from hvtrain.system.run_lock import start_of
from hvtrain.system.storage.runs import address_of

ENDED = "no longer running"
_STATES = {
    psutil.STATUS_STOPPED: "stopped by a signal (SIGSTOP, Ctrl-Z)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_ZOMBIE: ENDED,
}

STACKS_FOLDER = "stacks"
# A hanging disk may be why the run ends, so access to files is abandoned after this time.
SECONDS_FOR_FILES = 5.0
# How long to wait for the stacks of a silent rank that was woken.
SECONDS_FOR_A_WOKEN_RANK = 3.0


def machine_id(namespace: str = "pid") -> str:
    """Returns an ID that processes share if they see each other's process IDs, as in one container on one host.

    With "net", they share it if they have the same loopback interface. The ID changes when the host
    reboots.
    """
    # The host name is only a fallback if /proc is missing, since it need not be unique.
    boot = socket.gethostname()
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    container = "?"
    with suppress(OSError):
        container = str(Path(f"/proc/self/ns/{namespace}").readlink())
    return f"{boot} {container}"


@dataclass(frozen=True)
class Process:
    """A process that others on its machine can identify, even if its process ID is reused.

    Args:
        machine: its machine_id().
        number: its process ID.
        started: when it started, as start_of() reports it.
        stacks: the file descriptor to which it writes its Python stacks on SIGUSR2; -1: none.
    """

    machine: str
    number: int
    started: str | None
    stacks: int

    def is_here(self) -> bool:
        """True if it is another process on this machine."""
        return self.machine == machine_id() and self.number != os.getpid()

    def state(self) -> str:
        """Returns why the process may not answer, as text after "and is"; empty if it is running."""
        with suppress(psutil.Error):
            # Process IDs are reused, so the start has to match too.
            if start_of(self.number) == self.started:
                return _STATES.get(psutil.Process(self.number).status(), "")
        return ENDED

    def wake_for_stacks(self) -> str:
        """Makes the process write its stacks, and continue if it is stopped; returns the stacks.

        faulthandler writes them in C, even if the interpreter hangs. If they do not come in time, the result is empty.
        """
        with suppress(ProcessLookupError, PermissionError):
            # With tgkill (glibc 2.30 and later) the main thread gets the signal, and writes the
            # stacks before it continues; with kill, any thread may get it.
            to_thread = getattr(ctypes.CDLL(None), "tgkill", None)
            if self.stacks >= 0 and to_thread:
                to_thread(self.number, self.number, signal.SIGUSR2)
            elif self.stacks >= 0:
                os.kill(self.number, signal.SIGUSR2)
            os.kill(self.number, signal.SIGCONT)

        # The stacks are complete once the file has stopped changing.
        file = Path(f"/proc/{self.number}/fd/{self.stacks}")
        deadline = time.monotonic() + SECONDS_FOR_A_WOKEN_RANK
        text = ""
        before = None
        while self.stacks >= 0 and (not text or text != before) and time.monotonic() < deadline:
            time.sleep(0.1)
            before = text
            with suppress(OSError):
                text = file.read_text("utf-8", "replace")
        return text


class Stacks:
    """This process's Python stacks, in memory that other processes on its machine can read."""

    def __init__(self) -> None:
        # In memory, since a hanging disk may be why this process hangs.
        self._file = os.memfd_create("hvtrain-stacks")
        # If the user's code already handles the signal, its handler stays in place.
        self._takes_signal = signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        if self._takes_signal:
            faulthandler.register(signal.SIGUSR2, self._file)

        self.process = Process(
            machine_id(),
            os.getpid(),
            start_of(os.getpid()),
            self._file if self._takes_signal else -1,
        )

    def text(self) -> str:
        """Returns the current stacks of all threads."""
        # Not in self._file, whose stacks show where this process was when it was woken.
        with os.fdopen(os.memfd_create("hvtrain-stacks-now"), "rb") as file:
            faulthandler.dump_traceback(file.fileno())
            file.seek(0)
            return file.read().decode("utf-8", "replace")

    def close(self) -> None:
        if self._takes_signal:
            faulthandler.unregister(signal.SIGUSR2)
        os.close(self._file)


class Launcher:
    """Tells whether the launcher of this rank is still running.

    On the launcher's own host, a rank gets another parent when the launcher dies. With Gloo, a rank on
    another host is started over ssh, and does not notice the end of that connection; but the launcher
    keeps a port open for the whole run, which the rank tries to reach now and then.

    Args:
        checks_port: True to try that port.
    """

    SECONDS_BETWEEN_CHECKS = 5.0
    REFUSALS = 2
    # True if the parent is Open MPI's daemon, as on hosts other than the launcher's.
    is_daemon = False
    _num_refused = 0
    _port: tuple[str, int] | None = None

    def __init__(self, checks_port: bool) -> None:
        self._parent = os.getppid()
        with suppress(psutil.Error):
            self.is_daemon = psutil.Process(self._parent).name() == "orted"

        address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
        if checks_port and address and port.isdigit():
            self._port = (address, int(port))
            if self._is_refused():
                self._port = None  # This launcher does not keep its port open.
        self._checked_at = time.monotonic()

    def is_gone(self) -> bool:
        # An orphaned process gets another parent.
        if self._parent != os.getppid():
            return True
        if self._port and time.monotonic() - self._checked_at >= self.SECONDS_BETWEEN_CHECKS:
            # One refusal alone does not prove that the launcher is gone.
            self._num_refused = self._num_refused + 1 if self._is_refused() else 0
            self._checked_at = time.monotonic()
        return self._num_refused >= self.REFUSALS

    def end_daemon(self) -> None:
        """Ends Open MPI's daemon, which would try to reach a lost launcher for a quarter of an hour."""
        with suppress(OSError):
            os.kill(self._parent, signal.SIGTERM)

    def _is_refused(self) -> bool:
        """True if nothing listens on the launcher's port; False if there is no answer at all."""
        assert self._port
        try:
            socket.create_connection(self._port, timeout=1.0).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False


def resume_advice(folder: Path | None) -> str:
    """Returns advice for the end of a message: how to resume, and from which checkpoint."""
    if folder is None:
        return "run the same command again"
    checkpoint = within(
        SECONDS_FOR_FILES, lambda: _newest_checkpoint(folder), "the newest checkpoint"
    )
    run_dir = within(SECONDS_FOR_FILES, lambda: address_of(folder), "") or folder
    return f"run the same command with run.dir={run_dir} to resume from {checkpoint}"


def _newest_checkpoint(folder: Path) -> str:
    step = notes.newest_step(folder)
    note = notes.read(folder)
    if note and note.step > (step or 0):
        return f"{notes.folder_name(note.step)} on {note.host}, or a newer one"
    if step is not None:
        return notes.folder_name(step)
    # Without the folder of checkpoints nothing is known: rank 0, which
    # writes them, may be on another host.
    is_here = (folder / "checkpoints").is_dir()
    return "the beginning (there is no checkpoint yet)" if is_here else "the newest checkpoint"


def write_stacks(folder: Path | None, stacks: dict[int, str]) -> str:
    """Writes stacks, one file per rank, if the run folder is on this host.

    Returns where they are, as part of a message; "" if nothing was written.
    """
    if folder is None:
        return ""
    return within(SECONDS_FOR_FILES, lambda: _write_stacks(folder, stacks), "")


def _write_stacks(folder: Path, stacks: dict[int, str]) -> str:
    if not folder.is_dir():
        return ""
    stacks_folder = folder / STACKS_FOLDER
    stacks_folder.mkdir(exist_ok=True)
    # A symbolic link may lead out of the run folder.
    if stacks_folder.is_symlink():
        return ""

    for rank, text in stacks.items():
        path = stacks_folder / f"rank-{rank:04d}.txt"
        # Removed first, since it may be a link.
        path.unlink(missing_ok=True)
        path.write_text(text, "utf-8")
    return f"Python stacks are in {stacks_folder}; "


def say(text: str, rank: int, culprit: int | None, wait_seconds: float = 0.0) -> None:
    """Writes a line to this rank's log and, after wait_seconds or a signal, to stderr.

    Args:
        text: the line.
        rank: this rank.
        culprit: the rank at fault; None: unknown.
        wait_seconds: delay before writing to stderr, for ranks that need not speak if another one does.
    """
    within(
        wait_seconds + SECONDS_FOR_FILES,
        lambda: console.say_error(text, rank, wait_seconds, culprit=culprit),
        None,
    )


def exit_now(code: int) -> None:
    """Ends the process immediately, without cleaning up, since its main thread may be blocked forever."""
    within(1.0, sys.stdout.flush, None)
    os._exit(code)
