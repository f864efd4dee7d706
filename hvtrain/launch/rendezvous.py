"""The HTTP store where Gloo ranks find each other's addresses, and where processes started by hand meet.

The store takes PUT, GET and DELETE /SCOPE/RANK, like Horovod's. It unpickles nothing, accepts as
many simultaneous connections as a large job opens, answers most requests without a thread, and drops
the addresses once all ranks have met, so that ranks can restart (comm.tune).

Processes started by hand first claim their ranks at rank 0's server, and repeat their claims until all
ranks are claimed; each then gets the host of every rank. If a process stops claiming, its rank becomes free
again. Anyone who can reach the port is trusted as a rank.
"""

import http.client
import json
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from hvtrain.errors import ConfigError, LostRankError
from hvtrain.system.console import in_background

SECONDS_FOR_AN_ANSWER = 5.0
# A process that misses this many claims in a row is considered gone.
MAX_MISSED_CLAIMS = 4
# Connections that the kernel queues for the server: all processes may connect at once.
WAITING_CONNECTIONS = 1024
SECONDS_AFTER_A_FAILED_ACCEPT = 0.1

# Limit on a request's body, whatever its headers say: strangers can reach the port too.
_MAX_BYTES = 1 << 20
_OK, _WAITING, _NOT_YET, _REFUSED = 200, 202, 404, 409
# A GET of /SCOPE/RANK with all of its headers, up to the empty line.
_WHOLE_GET = re.compile(rb"GET /([^/ ]+)/([^/ ]+) HTTP/1\.[01]\r\n(?:.+\r\n)?\r\n", re.DOTALL)
_MAX_GET = 4096


class _Handler(BaseHTTPRequestHandler):
    server: Any  # A Store; only a Rendezvous takes claims.
    timeout = 5  # Seconds after which a caller that sends nothing is dropped.

    def do_PUT(self) -> None:
        self.server.put(*self._key(), self._body())
        self._answer(_OK)

    def do_GET(self) -> None:
        value = self.server.get(*self._key())
        self._answer(_NOT_YET if value is None else _OK, value or b"")

    def do_DELETE(self) -> None:
        self.server.leave(*self._key())
        self._answer(_OK)

    def do_POST(self) -> None:
        status, content = self.server.claim(json.loads(self._body()))
        self._answer(status, json.dumps(content).encode())

    def log_message(self, *_: Any) -> None:
        """Logs nothing: ranks keep asking for addresses that are not stored yet."""

    def _key(self) -> tuple[str, str]:
        _, scope, rank = self.path.split("/")
        return scope, rank

    def _body(self) -> bytes:
        length = int(self.headers["Content-Length"])
        if not 0 <= length <= _MAX_BYTES:
            raise ValueError(f"Content-Length {length} is not between 0 and {_MAX_BYTES}")
        return self.rfile.read(length)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Store(ThreadingHTTPServer):
    """Serves the address store for Horovod's Gloo. It listens once created, and answers after `serve` is called.

    Args:
        address: an address of this host; "": all of them.
        port: the port to listen on; 0: any free port.
    """

    request_queue_size = WAITING_CONNECTIONS
    get_waits = False  # True if `get` may wait for other ranks.

    def __init__(self, address: str, port: int) -> None:
        super().__init__((address, port), _Handler)
        self._lock = threading.Lock()
        self._store: dict[str, dict[str, bytes]] = {}
        self._left: dict[str, set[str]] = {}
        self._strangers: set[str] = set()

    def server_bind(self) -> None:
        """Binds as TCPServer does: HTTPServer also looks up this host's name, which is slow if DNS is broken."""
        TCPServer.server_bind(self)
        address, self.server_port = self.server_address[:2]
        self.server_name = str(address)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # Without a free file descriptor the listener stays readable, so retrying without a
            # pause would only use processor time.
            time.sleep(SECONDS_AFTER_A_FAILED_ACCEPT)
            raise

    def serve(self) -> None:
        """Starts answering requests in background threads."""
        # shutdown() waits for up to one poll interval.
        in_background(self.serve_forever, poll_interval=0.1)

    def close(self) -> None:
        """Stops answering requests, and frees the port."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a request, in a separate thread unless it only asks for an address."""
        if not self.get_waits and self._answer_get(request):
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drops a caller whose request failed, and prints one line per host instead of a traceback."""
        host = client_address[0]
        if host not in self._strangers:
            self._strangers.add(host)
            sys.stderr.write(
                f"hvtrain: dropped a request from {host} to this launch's port, since no rank sends such requests\n"
            )

    def _answer_get(self, connection: socket.socket) -> bool:
        """Answers a GET of a rank's address if all of the request has arrived.

        Returns False for anything else, and leaves it unread.

        Each of N ranks asks for the addresses of the N - 1 others. A thread and a full HTTP parse for
        each request would cost several times as much as the answer.
        """
        try:
            request = connection.recv(_MAX_GET, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return False
        match = _WHOLE_GET.fullmatch(request)
        if match is None:
            return False

        value = self.get(match[1].decode("latin-1"), match[2].decode("latin-1"))
        status = "404 Not Found" if value is None else "200 OK"
        body = value or b""
        head = f"HTTP/1.0 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
        with suppress(OSError):  # The caller has hung up.
            # Read the request first: the kernel resets a connection
            # that is closed with unread bytes.
            connection.recv(len(request))
            connection.sendall(head.encode() + body)
        return True

    def put(self, scope: str, rank: str, value: bytes) -> None:
        """Stores a rank's address."""
        with self._lock:
            self._store.setdefault(scope, {})[rank] = value

    def get(self, scope: str, rank: str) -> bytes | None:
        """Returns a rank's address; None if the rank has not stored it yet."""
        with self._lock:
            return self._store.get(scope, {}).get(rank)

    def leave(self, scope: str, rank: str) -> None:
        """Notes that a rank has met all other ranks of the scope.

        Once all ranks have left, the scope's addresses are dropped, so that ranks that restart (comm.tune)
        do not find them.
        """
        with self._lock:
            left = self._left.setdefault(scope, set())
            left.add(rank)
            # When the first rank leaves, all ranks have stored their addresses under
            # their numbers. Other keys hold other data.
            if left >= {key for key in self._store.get(scope, {}) if key.isdigit()}:
                self._store.pop(scope, None)
                del self._left[scope]

    def clear(self) -> None:
        """Forgets all addresses."""
        with self._lock:
            self._store.clear()
            self._left.clear()


class Rendezvous(Store):
    """The server at which processes started by hand meet, and which then serves as their store.

    Args:
        address: an address of this host.
        port: the port to listen on; 0: any free port.
        names: the name of each rank's process.
    """

    def __init__(self, address: str, port: int, names: Sequence[str]) -> None:
        super().__init__(address, port)
        self._names = list(names)
        self._claims: dict[int, dict[str, Any]] = {}
        self._is_complete = False

    def claim(self, claim: dict[str, Any]) -> tuple[int, Any]:
        """Records a process's claim to its rank, as the function claim() sends it.

        Returns a status with the host of each rank (_OK), the missing names (_WAITING) or a reason (_REFUSED).
        """
        now = time.monotonic()
        with self._lock:
            if claim["names"] != self._names:
                return _REFUSED, (
                    f"this process expects {', '.join(claim['names'])}, and rank 0 expects {', '.join(self._names)}; "
                    "give all processes the same -np and --num-ps"
                )
            # For a rank out of range, range() raises IndexError, and handle_error drops the caller.
            rank = range(len(self._names))[claim["rank"]]
            if not self._is_complete:
                # A process that no longer claims its rank has ended,
                # and another may take its place.
                oldest = now - MAX_MISSED_CLAIMS * pause_seconds(len(self._names))
                self._claims = {
                    number: other
                    for number, other in self._claims.items()
                    if other["time"] > oldest
                }

            holder = self._claims.get(rank, claim)
            if holder["process"] != claim["process"]:
                name = self._names[rank]
                return (
                    _REFUSED,
                    f"{name} is already running on host {holder['host'][0]}; end one of the two",
                )
            self._claims[rank] = {**claim, "time": now}
            missing = [
                other for number, other in enumerate(self._names) if number not in self._claims
            ]
            if missing:
                return _WAITING, missing
            self._is_complete = True
            return _OK, [self._claims[number]["host"] for number in range(len(self._names))]


def pause_seconds(num_ranks: int) -> float:
    """Returns the seconds between two claims of a process, so that rank 0 gets at most 300 claims per second."""
    return max(0.3, num_ranks / 300)


def claim(
    coordinator: tuple[str, int],
    rank: int,
    names: Sequence[str],
    host: Sequence[str],
    seconds: float,
) -> Any:
    """Claims a rank until all ranks are claimed, and returns each rank's host as [name, address].

    Args:
        coordinator: address and port of rank 0's server.
        rank: the rank of this process.
        names: the name of each rank's process; all processes pass the same list.
        host: name and address of this host.
        seconds: how long to wait.

    Raises:
        ConfigError: the rank is taken, rank 0 expects other processes, or another server answers.
        LostRankError: rank 0's server does not answer in time, or another process does not arrive in time.
    """
    address = "{}:{}".format(*coordinator)
    request = json.dumps({"rank": rank, "names": names, "host": host, "process": uuid.uuid4().hex})
    deadline = time.monotonic() + seconds
    missing: list[str] = []
    while True:
        # Checked before the request, so that at least one is sent, however short the time is.
        is_late = time.monotonic() > deadline
        connection = http.client.HTTPConnection(*coordinator, timeout=SECONDS_FOR_AN_ANSWER)
        try:
            connection.request("POST", "/claim", request)
            response = connection.getresponse()
            answer = json.loads(response.read())
            if response.status not in (_OK, _WAITING, _REFUSED):
                raise ValueError(f"unexpected status {response.status}")
        except OSError as error:
            if missing and isinstance(error, ConnectionError):
                raise LostRankError(
                    f"{names[0]} at {address} ended before {', '.join(missing)} connected; "
                    f"look at the output of {names[0]}"
                ) from error
            # Rank 0's process may start later than this one.
            if is_late:
                raise LostRankError(
                    f"cannot reach {names[0]}: nothing answered at {address} for {seconds:g} s "
                    f"({error.strerror or error}); start it there, or raise --start-timeout"
                ) from error
        except (http.client.HTTPException, ValueError) as error:
            raise ConfigError(
                f"the server at {address} is not this run's {names[0]}; give the same --coordinator as to {names[0]}"
            ) from error
        else:
            if response.status == _OK:
                return answer
            # Waiting would not help: another process has the rank, or
            # expects a different set of processes.
            if response.status == _REFUSED:
                raise ConfigError(answer)
            missing = answer
            if is_late:
                raise LostRankError(
                    f"{', '.join(missing)} did not connect to {address} in time ({seconds:g} s); "
                    "start the missing processes with the same --coordinator, or raise --start-timeout"
                )
        finally:
            connection.close()
        time.sleep(pause_seconds(len(names)))
