"""The notice of a run's end, as rank 0 prepares it: notice_sender.py, a process that outlives it, sends it."""

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvtrain.errors import ConfigError, UserError, in_one_line, place_of
from hvtrain.system import secrets
from hvtrain.system.secrets import without_passwords
from hvtrain.trackers.notice_sender import FAILED, FINISHED, SECONDS_TO_SEND, STOPPED

log = logging.getLogger(__name__)

INSTALL = "./scripts/run uv pip install --no-deps -r scripts/lock/notify.txt"
SECONDS_TO_START = 60.0
MOST_CHARACTERS = 600  # A line of less than 4096 bytes is written to a pipe as a whole, whichever thread writes it.
# By these variables launchers find the processes of a launch, to end them.
_OF_A_LAUNCH = ("HVTRAIN_", "HOROVOD_", "OMPI_", "PMIX_", "PMI_")


class Notice:
    """The notice of a run's end. Without addresses nothing has an effect. Chief only."""

    def __init__(self) -> None:
        self._addresses: list[str] = []
        self._sender: subprocess.Popen[bytes] | None = None

    def begin(self, chosen: Sequence[str], folder: Path) -> None:
        """Starts the process that sends it, unless it is running already. Raises ConfigError for a wrong address."""
        if chosen and self._sender is None:
            if not find_spec("apprise"):
                raise ConfigError(f"notify needs apprise, which is not installed; install: {INSTALL}")
            self._addresses = list(chosen)
            self._start(folder)

    def finished(self, text: str) -> None:
        """Sends the results of a finished run."""
        self._tell(FINISHED, text)

    def stopped(self, text: str) -> None:
        """Sends that the run was asked to stop, and how it goes on."""
        self._tell(STOPPED, text)

    def failed(self, error: BaseException) -> None:
        """Sends the cause of a failure, unless the end has been told before."""
        if isinstance(error, KeyboardInterrupt):
            self.stopped("interrupted; nothing new was saved")
        else:
            self._tell(FAILED, cause_in_words(error))

    def note(self, text: str) -> None:
        """Records why the run fails. It is sent if a launcher or the watchdog ends this process before it says more.

        Any thread may call this.
        """
        self._tell(FAILED, text, is_last=False)

    def wait(self) -> None:
        """Waits until it is sent, little longer than SECONDS_TO_SEND, and warns of each address that did not take it.

        The sender goes on if this process is ended meanwhile.
        """
        if self._sender:
            failed = self._answer(SECONDS_TO_SEND + 1)
            if failed is None:  # The sender is gone.
                failed = list(range(len(self._addresses)))
            for index in failed:
                log.warning("the notice could not be sent to %s; test it with the command apprise", self._name(index))
        self._sender = None

    def _start(self, folder: Path) -> None:
        self._sender = sender = subprocess.Popen(
            [sys.executable, "-m", "hvtrain.trackers.notice_sender", str(os.getpid())],
            env={name: value for name, value in os.environ.items() if not name.startswith(_OF_A_LAUNCH)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # apprise may write secrets there, and launchers wait until it is closed.
            start_new_session=True,
        )
        self._write(
            {
                "addresses": self._addresses,
                "name": folder.name,
                "folder": f"{folder} on {socket.gethostname()}",
                "lost": f"rank 0 was killed, by its launcher or otherwise; run the same command with run.dir={folder} "
                "to resume",
            }
        )
        unknown = self._answer(SECONDS_TO_START)
        if unknown is None:
            with suppress(ProcessLookupError):
                os.killpg(sender.pid, signal.SIGKILL)
            log.warning("no notice will be sent: the process that sends it has not started")
        sender.wait()  # For the process that forked the sender.
        if unknown != []:
            self._sender = None
        if unknown:
            name = self._name(unknown[0])
            raise ConfigError(f"notify: {name} is not an address that apprise takes; see docs/notices.md")

    def _tell(self, kind: str, text: str, is_last: bool = True) -> None:
        text = without_passwords(text).removeprefix("stopped because ")
        self._write({"kind": kind, "body": text[:MOST_CHARACTERS], "is_last": is_last})

    def _write(self, message: dict[str, Any]) -> None:
        sender = self._sender
        if sender and sender.stdin:
            with suppress(OSError):  # It has read the last message, or wait() will find that it is gone.
                os.write(sender.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def _answer(self, seconds: float) -> list[int] | None:
        """The indices of addresses that the sender writes; None if it writes none in time, or is gone."""
        if not (self._sender and self._sender.stdout):
            return None
        poll = select.poll()  # select takes no descriptor above 1023, and a rank may have so many.
        poll.register(self._sender.stdout, select.POLLIN)
        line = self._sender.stdout.readline() if poll.poll(1000 * seconds) else b""
        return list(json.loads(line)) if line else None

    def _name(self, index: int) -> str:
        return f"address {index + 1} of {len(self._addresses)} ({secrets.shown_address(self._addresses[index])})"


def cause_in_words(error: BaseException) -> str:
    """Why a run failed: what a UserError says, or what was raised on this rank, and where."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    cause = f"rank 0 on {socket.gethostname()} failed: {in_one_line(error)}"
    location = place_of(error)
    return f"{cause} ({location})" if location else cause
