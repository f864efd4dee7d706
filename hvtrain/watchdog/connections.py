"""The watchdog's protocol, and the connections to rank 0's hub.

Messages are lines of JSON of limited length; nothing is unpickled. A connection is a stranger until it
has proved which rank it is.
"""

import errno
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hvtrain.watchdog.processes import Process
from hvtrain.watchdog.progress import RankState, Status

Message = dict[str, Any]

MAX_LINE = 1 << 20  # Enough for the stacks of a rank with hundreds of threads.
MAX_PROOF = 1 << 10  # Longest line from a stranger.
# Time until a lost host or a cut cable is noticed: less than Gloo's timeout (30 s), so that the
# watchdog can give the reason, but long enough for a link to recover.
SECONDS_UNTIL_CUT = 25
MAX_STRANGERS = 64
SECONDS_TO_JOIN = 10.0


class Kind(str, Enum):
    """Kinds of messages: the value of "kind" in each. The comments list the other fields or explain the message."""

    # From the hub to a new connection, which answers with rank, proof, host, process and status.
    CHALLENGE = "challenge"  # challenge
    WELCOME = "welcome"  # process: rank 0's Process

    # From a rank to the hub.
    BEAT = "beat"  # status
    SIGNAL = "signal"  # number: the signal to send to rank 0
    ASK = "ask"  # this rank's main thread has raised an error, and asks for the cause

    # From the hub to ranks.
    HEARD = "heard"  # the answer to each message
    END = "end"  # end this process now

    # Both ways. A rank proposes a reason to stop, and the hub sends the first such reason to all
    # ranks. The hub asks for stacks with "wake", and a rank answers with the other fields.
    STOP = "stop"  # reason: a StopReason
    STACKS = "stacks"  # wake: ranks and processes; rank, text, state
    BYE = "bye"

    # Never sent: stands for the end of a connection, which the other side has closed, or the kernel
    # because the host or the network is lost.
    GONE = "gone"  # is_cut


def describe_loss(rank_name: str, is_cut: bool) -> str:
    """Describes the loss of a rank, according to how its connection ended."""
    if is_cut:
        return f"{rank_name} cannot be reached any more (its host is down, or the network is cut)"
    return f"{rank_name} is gone (killed, or its host is lost)"


class WireError(Exception):
    """A message that does not follow the protocol."""


class MessageDecoder:
    """Splits a stream of bytes into messages. `feed` returns those that are complete.

    Raises WireError for a line that is not a JSON object, or has more than `max_bytes`.
    """

    def __init__(self, max_bytes: int = MAX_LINE) -> None:
        self.max_bytes = max_bytes
        self._unfinished = b""

    def feed(self, data: bytes) -> list[Message]:
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        # Lines are limited, or a stranger could fill the memory.
        if any(len(line) > self.max_bytes for line in (*lines, self._unfinished)):
            raise WireError(f"a line of more than {self.max_bytes} bytes")

        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise WireError("not JSON") from error
        if not all(isinstance(message, dict) for message in messages):
            raise WireError("not a JSON object")
        return messages


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def proof(token: str, challenge: str, rank: int) -> str:
    """Returns a rank's answer to a challenge, which proves that it knows the token."""
    return hmac.new(token.encode(), f"{challenge} {rank}".encode(), "sha256").hexdigest()


def gone_message(error: Exception | None) -> Message:
    """Returns the message that stands for the end of a connection.

    A connection was cut if the kernel gave up on the network. Otherwise the other end has closed it
    (error is None), or has broken the protocol.
    """
    number = getattr(error, "errno", None)
    is_cut = isinstance(error, TimeoutError) or number in (errno.EHOSTUNREACH, errno.ENETUNREACH)
    return {"kind": Kind.GONE, "is_cut": is_cut}


def receive(connection: socket.socket, decoder: MessageDecoder) -> list[Message]:
    """Returns the messages that have arrived; a single GONE if the connection has ended."""
    try:
        data = connection.recv(1 << 16)
        return decoder.feed(data) if data else [gone_message(None)]
    except BlockingIOError:
        return []
    except (OSError, WireError) as error:
        return [gone_message(error)]


def enable_keepalive(connection: socket.socket) -> None:
    """Makes the kernel close the connection if the other host or the network is lost silently."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        socket.TCP_NODELAY: 1,
        # Four probes: the first after a third of the time, the others a sixth of the time apart.
        socket.TCP_KEEPIDLE: SECONDS_UNTIL_CUT // 3,
        socket.TCP_KEEPINTVL: SECONDS_UNTIL_CUT // 6,
        socket.TCP_KEEPCNT: 4,
        # In milliseconds, for data that is not acknowledged; by default a quarter of an hour.
        socket.TCP_USER_TIMEOUT: SECONDS_UNTIL_CUT * 1000,
    }
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


@dataclass
class Connection:
    """A connection to the hub. state is None until it has proved its rank."""

    socket: socket.socket
    challenge: str
    opened: float
    decoder: MessageDecoder = field(default_factory=lambda: MessageDecoder(MAX_PROOF))
    state: RankState | None = None

    def send(self, kind: Kind, **values: Any) -> None:
        """Sends a message without blocking: messages are small, and a rank gets about one for each that it sends."""
        with suppress(OSError):  # The next read notices the failure.
            self.socket.send(encode({"kind": kind, **values}))


@dataclass
class Connections:
    """Accepts and reads all connections to the hub.

    Args:
        listener: the socket to which ranks connect.
        token: the secret of the job, with which ranks prove themselves.
        size: the number of ranks.
        process: rank 0's process, which is sent to each rank.

    Attributes:
        ranks: the connections of the ranks that have joined.
    """

    listener: socket.socket
    token: str
    size: int
    process: Message

    def __post_init__(self) -> None:
        self.ranks: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ)

    def messages(self, seconds: float) -> Iterator[tuple[Connection, Message]]:
        """Yields messages from ranks after waiting up to `seconds` for them.

        The last message from a lost rank is GONE.
        """
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            # A connection may have been closed (its fileno() is -1) after an earlier message,
            # or to make room for a stranger.
            elif key.data.socket.fileno() >= 0:
                yield from self._read(key.data)

    def close_strangers(self) -> None:
        """Closes connections that have not proved their rank in time, and then accepts new ones.

        None are accepted from the moment that this process runs out of file descriptors until this call.
        """
        for stranger in self._strangers():
            if time.monotonic() - stranger.opened > SECONDS_TO_JOIN:
                self.drop(stranger)
        if self.listener not in self._selector.get_map():
            self._selector.register(self.listener, selectors.EVENT_READ)

    def drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        state = connection.state
        # A newer connection of the rank may have taken its place.
        if state and self.ranks.get(state.rank) is connection:
            del self.ranks[state.rank]

    def send_all(self, kind: Kind, **values: Any) -> None:
        for connection in self.ranks.values():
            connection.send(kind, **values)

    def close(self) -> None:
        for connection in self._all():
            self.drop(connection)
        self.listener.close()
        self._selector.close()

    def _all(self) -> list[Connection]:
        return [key.data for key in self._selector.get_map().values() if key.data]

    def _strangers(self) -> list[Connection]:
        return [connection for connection in self._all() if not connection.state]

    def _accept(self) -> None:
        try:
            accepted, _ = self.listener.accept()
        except OSError as error:
            # The listener stays readable without a free file descriptor, so waiting for it would
            # only use processor time.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._selector.unregister(self.listener)
            return

        # If there are too many, the oldest stranger is dropped: ranks prove themselves immediately.
        if len(self._selector.get_map()) > MAX_STRANGERS + self.size:
            self.drop(min(self._strangers(), key=lambda stranger: stranger.opened))
        accepted.setblocking(False)
        enable_keepalive(accepted)
        connection = Connection(accepted, secrets.token_hex(16), time.monotonic())
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        connection.send(Kind.CHALLENGE, challenge=connection.challenge)

    def _read(self, connection: Connection) -> Iterator[tuple[Connection, Message]]:
        for message in receive(connection.socket, connection.decoder):
            if connection.state:
                if message.get("kind") == Kind.GONE:
                    self.drop(connection)
                yield connection, message
            elif not self._try_join(connection, message):
                self.drop(connection)
                return

    def _try_join(self, connection: Connection, message: Message) -> bool:
        """Assigns the connection to a rank if the message proves the rank; returns False if it does not."""
        rank = message.get("rank")
        answer = message.get("proof")
        if not isinstance(rank, int) or not isinstance(answer, str) or not answer.isascii():
            return False
        # In constant time, so that the timing does not reveal how much of a guess was right.
        if not hmac.compare_digest(answer, proof(self.token, connection.challenge, rank)):
            return False

        connection.state = RankState(
            rank,
            message["host"],
            Status(**message["status"]),
            time.monotonic(),
            Process(**message["process"]),
        )
        connection.decoder.max_bytes = MAX_LINE
        self.ranks[rank] = connection
        connection.send(Kind.WELCOME, process=self.process)
        return True
