"""The connections to rank 0's watch: a stranger's until it proves which rank it is."""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from hvtrain.watchdog.host_processes import Process
from hvtrain.watchdog.judge import Seen
from hvtrain.watchdog.progress import Standing
from hvtrain.watchdog.wire import (
    LONGEST_LINE,
    LONGEST_PROOF,
    Lines,
    Message,
    WireError,
    encode,
    is_cut,
    is_proof,
    notice_cuts,
)

MOST_STRANGERS = 64
SECONDS_TO_JOIN = 10.0


@dataclass(eq=False)
class Guest:
    """A rank, once it has proved it."""

    connection: socket.socket
    challenge: str
    came: float
    lines: Lines = field(default_factory=lambda: Lines(LONGEST_PROOF))
    process: Process | None = None
    seen: Seen | None = None

    def send(self, message: Message) -> None:
        """Small, into an empty buffer: a rank gets one answer to each of its messages."""
        with suppress(OSError):  # Its connection tells the next time that it is read.
            self.connection.send(encode(message))


class Guests:
    """ranks: those that joined, and are there. welcome: what each of them is told."""

    def __init__(self, listener: socket.socket, token: str, size: int, welcome: Message) -> None:
        self.ranks: dict[int, Guest] = {}
        self._listener = listener
        self._token = token
        self._size = size
        self._welcome = welcome
        self._all: dict[int, Guest] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def messages(self, seconds: float) -> Iterator[tuple[Guest, Message]]:
        """What ranks say within that time; of one that is gone, "gone" or "cut", and nothing after it."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd in self._all:
                yield from self._read(self._all[key.fd])
        for guest in [guest for guest in self._all.values() if not guest.seen]:
            if time.monotonic() - guest.came > SECONDS_TO_JOIN:
                self.forget(guest)

    def forget(self, guest: Guest) -> None:
        """Ends a connection."""
        self._selector.unregister(guest.connection)
        del self._all[guest.connection.fileno()]
        guest.connection.close()
        if guest.seen:
            self.ranks.pop(guest.seen.rank, None)

    def tell_all(self, message: Message) -> None:
        for guest in self.ranks.values():
            guest.send(message)

    def close(self) -> None:
        for guest in list(self._all.values()):
            self.forget(guest)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        # Those that are still to come must find room.
        if len(self._all) >= MOST_STRANGERS + self._size:
            connection.close()
            return
        connection.setblocking(False)
        notice_cuts(connection)
        guest = Guest(connection, secrets.token_hex(16), time.monotonic())
        self._all[connection.fileno()] = guest
        self._selector.register(connection, selectors.EVENT_READ)
        guest.send({"kind": "challenge", "challenge": guest.challenge})

    def _read(self, guest: Guest) -> Iterator[tuple[Guest, Message]]:
        end = ""
        messages: list[Message] = []
        try:
            data = guest.connection.recv(1 << 16)
            messages = guest.lines.feed(data)
            end = "" if data else "gone"
        except BlockingIOError:
            return
        except OSError as error:
            end = "cut" if is_cut(error) else "gone"
        except WireError:
            end = "gone"
        for message in messages:
            if guest.seen:
                yield guest, message
            elif not self._joins(guest, message):
                end = "stranger"
                break
        if end and guest.connection.fileno() in self._all:
            self.forget(guest)
            if guest.seen:
                yield guest, {"kind": end}

    def _joins(self, guest: Guest, message: Message) -> bool:
        rank = message.get("rank")
        if not isinstance(rank, int) or not is_proof(message.get("proof"), self._token, guest.challenge, rank):
            return False
        guest.process = Process.of(message["process"])
        guest.seen = Seen(rank, str(message["host"]), Standing(**message["standing"]), time.monotonic())
        guest.lines.longest = LONGEST_LINE
        self.ranks[rank] = guest
        guest.send({"kind": "welcome", **self._welcome})
        return True
