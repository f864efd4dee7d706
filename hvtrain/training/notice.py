"""Sends the notice of a run's end.

Rank 0 prepares it, and a process that outlives rank 0 sends it with apprise.

That process is `python -m hvtrain.training.notice PID`, with the process ID of rank 0. It reads rank 0's
messages, lines of JSON, from its standard input: first {"addresses", "name", "folder", "lost"}, then notices {"kind",
"body", "is_last"}. It sends the newest notice ("lost" if there is none) when rank 0 ends, or immediately if "is_last"
is true. It answers twice on its standard output: with the indices of the addresses that apprise does not know, and
then with the indices of those that did not accept the notice.

No launcher knows of this process: it has its own session, no parent, and none of the environment variables by which
launchers find the processes to kill. It ends at most SECONDS_TO_SEND after rank 0.
"""

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvtrain.errors import ConfigError, UserError, cause_of, message_of
from hvtrain.system.secrets import shown_address, without_passwords
from hvtrain.system.storage.runs import address_of

log = logging.getLogger(__name__)

INSTALL = "./scripts/run uv pip install --no-deps -r scripts/lock/notify.txt"
SECONDS_TO_START = 60.0
MAX_CHARACTERS = 600  # A line of less than 4096 bytes is written to a pipe as a whole, whichever thread writes it.
# Prefixes of the environment variables by which a launcher finds the processes of its launch, to
# end them.
_LAUNCHER_PREFIXES = ("HVTRAIN_", "HOROVOD_", "OMPI_", "PMIX_", "PMI_")
SECONDS_TO_SEND = 8.0
# Titles of notices, by kind.
TITLES = {
    "finished": "{} has finished",
    "stopped": "{} was stopped",
    "failed": "{} has failed",
    "lost": "{} has ended for an unknown reason",
}
# apprise's types of notices, by kind; "failure" for all other kinds.
_TYPES = {"finished": "success", "stopped": "warning"}


class Notice:
    """Rank 0's side of the notice of a run's end (chief only). Without addresses all methods do nothing."""

    def __init__(self) -> None:
        self._addresses: Sequence[str] = ()
        self._sender: subprocess.Popen[bytes] | None = None

    def begin(self, addresses: Sequence[str], folder: Path) -> None:
        """Starts the process that sends the notice, unless it is running already.

        Raises ConfigError if apprise is missing or does not know an address.
        """
        # A restart of the ranks calls this again.
        if not addresses or self._sender:
            return
        if not find_spec("apprise"):
            raise ConfigError(f"notify needs apprise, which is not installed; install: {INSTALL}")

        self._addresses = addresses
        sender = subprocess.Popen(
            [sys.executable, "-m", "hvtrain.training.notice", str(os.getpid())],
            env={
                name: value
                for name, value in os.environ.items()
                if not name.startswith(_LAUNCHER_PREFIXES)
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # apprise may write secrets to stderr, and launchers wait until stderr is closed.
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._sender = sender
        advice = f"run the same command with run.dir={address_of(folder) or folder} to resume"
        self._write(
            {
                "addresses": self._addresses,
                "name": folder.name,
                "folder": f"{folder} on {socket.gethostname()}",
                "lost": f"rank 0 was killed, by its launcher or otherwise; {advice}",
            }
        )

        unknown = self._answer(SECONDS_TO_START)
        if unknown is None:
            with suppress(ProcessLookupError):
                os.killpg(sender.pid, signal.SIGKILL)
            log.warning("no notice will be sent: the process that sends it has not started")
        # Reaps the process started above, which ends after forking the sender.
        sender.wait()
        # None: the sender has not started. Indices: it has ended, because apprise does not know
        # these addresses.
        if unknown != []:
            self._sender = None
        if unknown:
            raise ConfigError(
                f"notify: {self._address_name(unknown[0])} is not an address that apprise supports; "
                "see docs/notices.md"
            )

    def send_success(self, text: str) -> None:
        """Sends the results of a finished run."""
        self._submit("finished", text)

    def send_stop(self, text: str) -> None:
        """Sends the notice that the run was asked to stop; the text says how to continue it."""
        self._submit("stopped", text)

    def send_failure(self, error: BaseException) -> None:
        """Sends the cause of a failure, unless a final notice has been sent already."""
        if isinstance(error, KeyboardInterrupt):
            self.send_stop("interrupted; nothing new was saved")
        else:
            self._submit("failed", cause_in_words(error))

    def note(self, text: str) -> None:
        """Records why the run fails, to be sent if this process is killed before it sends a final notice.

        Any thread may call this.
        """
        self._submit("failed", text, is_last=False)

    def wait(self) -> None:
        """Waits up to SECONDS_TO_SEND + 1 seconds for the notice to be sent.

        Warns about each address that did not accept it. The sender continues if this process is killed meanwhile.
        """
        if self._sender:
            failed = self._answer(SECONDS_TO_SEND + 1)
            if failed is None:  # The sender is gone.
                failed = list(range(len(self._addresses)))
            for index in failed:
                log.warning(
                    f"the notice could not be sent to {self._address_name(index)}; "
                    "test the address with the command apprise"
                )
        self._sender = None

    def _submit(self, kind: str, text: str, is_last: bool = True) -> None:
        # The text of an error may quote an address that contains a password.
        text = without_passwords(text).removeprefix("stopped because ")
        self._write({"kind": kind, "body": text[:MAX_CHARACTERS], "is_last": is_last})

    def _write(self, message: dict[str, Any]) -> None:
        sender = self._sender
        if sender and sender.stdin:
            with suppress(OSError):
                # If the sender is gone, either it has its last message already, or wait() notices.
                os.write(sender.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def _answer(self, seconds: float) -> list[int] | None:
        """Returns the sender's answer, indices of addresses; None if it is late, or the sender is gone."""
        assert self._sender and self._sender.stdout
        poll = select.poll()  # select takes no descriptor above 1023, which a rank may have.
        poll.register(self._sender.stdout, select.POLLIN)
        line = self._sender.stdout.readline() if poll.poll(1000 * seconds) else b""
        return json.loads(line) if line else None

    def _address_name(self, index: int) -> str:
        return f"address {index + 1} of {len(self._addresses)} ({shown_address(self._addresses[index])})"


def cause_in_words(error: BaseException) -> str:
    """Describes why a run failed: the text of a UserError, or the exception and where this rank raised it."""
    if isinstance(error, UserError):
        return message_of(error)
    return f"rank 0 on {socket.gethostname()} failed: {cause_of(error)}"


def sender_main() -> None:
    """Runs the sender: waits for rank 0's last message, or for its end, and sends the newest notice."""
    # The parent ends, so that no launcher finds the child through it.
    if os.fork():
        os._exit(0)

    messages = read_messages(0, int(sys.argv[1]))
    begin = next(messages, None)
    if begin is None:
        return

    import apprise

    servers = [apprise.Apprise.instantiate(address) for address in begin["addresses"]]
    unknown = [index for index, server in enumerate(servers) if server is None]
    write_answer(unknown)
    if unknown:
        return

    # Sent if rank 0 sends no notice itself.
    notice = {"kind": "lost", "body": begin["lost"]}
    for notice in messages:
        if notice.get("is_last"):
            break

    title = TITLES[notice["kind"]].format(begin["name"])
    body = f"{notice['body']}\n{begin['folder']}"
    notify_type = apprise.NotifyType(_TYPES.get(notice["kind"], "failure"))
    write_answer(send(servers, title=title, body=body, notify_type=notify_type))
    os._exit(0)  # A thread may still wait for a server.


def read_messages(pipe: int, process_id: int) -> Iterator[dict[str, Any]]:
    """Yields messages until the pipe is closed or the process ends, since its children may keep the pipe open."""
    end = []
    # The process may be gone, and Linux before 5.3, or a Python built with
    # older headers, lacks pidfd_open.
    with suppress(OSError, AttributeError):
        end = [os.pidfd_open(process_id)]

    text = b""
    while True:
        ready = select.select([pipe, *end], [], [])[0]
        data = os.read(pipe, 1 << 16) if pipe in ready else b""
        if not data:
            return
        *lines, text = (text + data).split(b"\n")
        yield from map(json.loads, lines)


def send(servers: Sequence[Any], seconds: float = SECONDS_TO_SEND, **notice: Any) -> list[int]:
    """Sends the notice to all servers in parallel; returns the indices of those that did not accept it in time."""
    # One slow server must not keep the others waiting.
    pool = ThreadPoolExecutor(len(servers))
    futures = [pool.submit(server.notify, **notice) for server in servers]
    done, _ = wait(futures, seconds)
    return [
        index
        for index, future in enumerate(futures)
        if future not in done or future.exception() or not future.result()
    ]


def write_answer(indices: list[int]) -> None:
    """Sends an answer to rank 0, unless rank 0 has closed the pipe."""
    with suppress(BrokenPipeError):
        os.write(1, json.dumps(indices).encode() + b"\n")


if __name__ == "__main__":
    sender_main()
