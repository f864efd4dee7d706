"""The watchdog's protocol: lines of JSON of limited length, after a proof of identity. Nothing is unpickled."""

import errno
import hashlib
import hmac
import json
import socket
from typing import Any

Message = dict[str, Any]

MAX_LINE = 1 << 20  # The stacks of a rank with hundreds of threads.
MAX_PROOF = 1 << 10
# How soon a lost host or a cut cable is noticed: before Gloo gives up (30 s), yet a link may be down for a while.
SECONDS_UNTIL_CUT = 25


class WireError(Exception):
    """A message that no rank sends."""


class Lines:
    """Turns bytes into messages. Raises WireError for anything else, and keeps at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_LINE) -> None:
        self.max_bytes = max_bytes
        self._held = b""

    def feed(self, data: bytes) -> list[Message]:
        *lines, self._held = (self._held + data).split(b"\n")
        if any(len(line) > self.max_bytes for line in (*lines, self._held)):
            raise WireError(f"a line of more than {self.max_bytes} bytes")
        return [self._message(line) for line in lines]

    def _message(self, line: bytes) -> Message:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WireError("not JSON") from error
        if not isinstance(message, dict):
            raise WireError("not a JSON object")
        return message


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def proof(token: str, challenge: str, rank: int) -> str:
    """An answer that only a rank of this job can give; the token itself is not sent."""
    return hmac.new(token.encode(), f"{challenge} {rank}".encode(), hashlib.sha256).hexdigest()


def is_proof(given: Any, token: str, challenge: str, rank: int) -> bool:
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, proof(token, challenge, rank))


def is_cut(error: OSError) -> bool:
    """True if the kernel gave up on the network; False if the other end closed the connection."""
    return isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)


def notice_cuts(connection: socket.socket) -> None:
    """Makes the kernel end the connection if the other host or the network is lost without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SECONDS_UNTIL_CUT // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SECONDS_UNTIL_CUT // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    # For what was sent and never acknowledged; by default the kernel tries for a quarter of an hour.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SECONDS_UNTIL_CUT * 1000)
