"""Connections to rank 0's hub. Each is a stranger's until it has proved which rank it is."""

import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from hvtrain.watchdog.host_processes import Process
from hvtrain.watchdog.judge import RankState
from hvtrain.watchdog.progress import Status
from hvtrain.watchdog.wire import (
    MAX_LINE,
    MAX_PROOF,
    Lines,
    Message,
    WireError,
    encode,
    is_cut,
    is_proof,
    notice_cuts,
)

MAX_STRANGERS = 64
SECONDS_TO_JOIN = 10.0


@dataclass(eq=False)
class Connection:
    """process and state are set once it has proved its rank."""

    socket: socket.socket
    challenge: str
    opened: float
    lines: Lines = field(default_factory=lambda: Lines(MAX_PROOF))
    process: Process | None = None
    state: RankState | None = None

    def send(self, message: Message) -> None:
        """Never blocks: messages are small, and a rank gets one answer to each of its own."""
        with suppress(OSError):  # The next read notices.
            self.socket.send(encode(message))


class Connections:
    """ranks: the connections of the ranks that have joined. welcome: what each of them is sent."""

    def __init__(self, listener: socket.socket, token: str, size: int, welcome: Message) -> None:
        self.ranks: dict[int, Connection] = {}
        self._listener = listener
        self._token = token
        self._size = size
        self._welcome = welcome
        self._all: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def messages(self, seconds: float) -> Iterator[tuple[Connection, Message]]:
        """Messages of ranks within that time. The last message of a lost one is "gone" or "cut"."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd in self._all:
                yield from self._read(self._all[key.fd])
        for connection in [found for found in self._all.values() if not found.state]:
            if time.monotonic() - connection.opened > SECONDS_TO_JOIN:
                self.close_one(connection)

    def close_one(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        del self._all[connection.socket.fileno()]
        connection.socket.close()
        if connection.state:
            self.ranks.pop(connection.state.rank, None)

    def send_all(self, message: Message) -> None:
        for connection in self.ranks.values():
            connection.send(message)

    def close(self) -> None:
        for connection in list(self._all.values()):
            self.close_one(connection)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        # Keep room for ranks that have not joined yet.
        if len(self._all) >= MAX_STRANGERS + self._size:
            accepted.close()
            return
        accepted.setblocking(False)
        notice_cuts(accepted)
        connection = Connection(accepted, secrets.token_hex(16), time.monotonic())
        self._all[accepted.fileno()] = connection
        self._selector.register(accepted, selectors.EVENT_READ)
        connection.send({"kind": "challenge", "challenge": connection.challenge})

    def _read(self, connection: Connection) -> Iterator[tuple[Connection, Message]]:
        end = ""
        messages: list[Message] = []
        try:
            data = connection.socket.recv(1 << 16)
            messages = connection.lines.feed(data)
            end = "" if data else "gone"
        except BlockingIOError:
            return
        except OSError as error:
            end = "cut" if is_cut(error) else "gone"
        except WireError:
            end = "gone"
        for message in messages:
            if connection.state:
                yield connection, message
            elif not self._joins(connection, message):
                end = "stranger"
                break
        if end and connection.socket.fileno() in self._all:
            self.close_one(connection)
            if connection.state:
                yield connection, {"kind": end}

    def _joins(self, connection: Connection, message: Message) -> bool:
        rank = message.get("rank")
        if not isinstance(rank, int) or not is_proof(message.get("proof"), self._token, connection.challenge, rank):
            return False
        connection.process = Process(**message["process"])
        connection.state = RankState(rank, str(message["host"]), Status(**message["status"]), time.monotonic())
        connection.lines.max_bytes = MAX_LINE
        self.ranks[rank] = connection
        connection.send({"kind": "welcome", **self._welcome})
        return True
