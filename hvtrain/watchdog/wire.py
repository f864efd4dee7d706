"""What travels between the ranks' watches: lines of JSON of bounded length, after a proof. Nothing is unpickled."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import socket
from typing import Any

Message = dict[str, Any]

LONGEST_LINE = 1 << 20  # The stacks of a rank with hundreds of threads.
LONGEST_PROOF = 1 << 10
# A vanished host or a cut cable is noticed after so long: before Gloo gives up (30 s), and a link may be down for less.
SECONDS_UNTIL_CUT = 25


class WireError(Exception):
    """What came is not what a rank sends."""


class Lines:
    """Bytes in, messages out. Raises WireError for what is no message, and keeps at most `longest` bytes."""

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self.longest = longest
        self._held = b""

    def feed(self, data: bytes) -> list[Message]:
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > self.longest:
            raise WireError(f"{len(self._held)} bytes without an end; at most {self.longest} make a line")
        return [self._message(line) for line in lines]

    def _message(self, line: bytes) -> Message:
        if len(line) > self.longest:
            raise WireError(f"a line of {len(line)} bytes; {self.longest} are allowed")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WireError("no JSON") from error
        if not isinstance(message, dict):
            raise WireError("no JSON object")
        return message


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def proof(token: str, challenge: str, rank: int) -> str:
    """What only a rank of this job can answer; the token itself does not travel here."""
    return hmac.new(token.encode(), f"{challenge} {rank}".encode(), hashlib.sha256).hexdigest()


def is_proof(given: Any, token: str, challenge: str, rank: int) -> bool:
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, proof(token, challenge, rank))


def is_cut(error: OSError) -> bool:
    """True for an error by which the kernel gave up on the way there; else the other end closed the connection."""
    return isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)


def notice_cuts(connection: socket.socket) -> None:
    """Has the kernel end the connection when the other end, or the way there, is gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SECONDS_UNTIL_CUT // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SECONDS_UNTIL_CUT // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    # What was sent and never acknowledged; otherwise the kernel tries for a quarter of an hour.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SECONDS_UNTIL_CUT * 1000)
