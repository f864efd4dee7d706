"""The HTTP store in which Gloo's ranks find each other's addresses, and the meeting of processes started by hand.

The store takes PUT, GET and DELETE /SCOPE/RANK, as Horovod's does. It unpickles nothing, takes as
many connections at once as a large job opens, answers most questions without a thread, and forgets
the addresses of all ranks that have met, so that ranks can start again (comm.tune).

Processes started by hand first claim their ranks at rank 0's server. Once all have arrived, each
gets the host of every rank, or the reason why not. A process keeps its connection open while it
waits; if the connection breaks, the rank is free again. Whoever reaches the port is trusted as a
rank.
"""

import http.client
import json
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hvtrain.errors import ConfigError, LostRankError

SECONDS_BETWEEN_TRIES = 0.3
# Connections that the kernel keeps for the server: all processes may connect at once.
WAITING_CONNECTIONS = 1024

# Of a body, whatever its head says: strangers reach the port too.
_MAX_BYTES = 1 << 20
_OK, _NOT_YET, _TOO_LATE, _REFUSED = 200, 404, 408, 409
_CLAIMS = "/claim"
_WHOLE_GET = re.compile(rb"GET /([^/ ]+)/([^/ ]+) HTTP/1\.[01]\r\n(?:.+\r\n)?\r\n", re.DOTALL)
_MAX_GET = 4096


class _Handler(BaseHTTPRequestHandler):
    server: "Store"
    timeout = 5  # For a caller that sends nothing.

    def do_PUT(self) -> None:
        self.server.put(*self._key(), self._body())
        self._answer(_OK)

    def do_GET(self) -> None:
        value = self.server.get(*self._key())
        self._answer(_NOT_YET if value is None else _OK, value or b"")

    def do_DELETE(self) -> None:
        self.server.leave(*self._key())
        self._answer(_OK)

    def log_message(self, *_: Any) -> None:
        """Logs nothing: ranks ask many times for what is not there yet."""

    def _key(self) -> tuple[str, str]:
        _, scope, rank = self.path.split("/")
        return scope, rank

    def _body(self) -> bytes:
        return self.rfile.read(min(int(self.headers["Content-Length"]), _MAX_BYTES))

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Store(ThreadingHTTPServer):
    """The store of Horovod's Gloo. It listens once it is created; `serve` answers.

    Args:
        address: an address of this host; "": all.
        port: where to listen; 0: at a free port.
    """

    request_queue_size = WAITING_CONNECTIONS
    get_waits = False  # True if `get` may wait for other ranks.

    def __init__(self, address: str, port: int, handler: type[_Handler] = _Handler) -> None:
        super().__init__((address, port), handler)
        self._changed = threading.Condition()
        self._store: dict[str, dict[str, bytes]] = {}
        self._left: dict[str, set[str]] = {}
        self._strangers: set[str] = set()

    def serve(self) -> None:
        """Answers, in threads of its own."""
        # shutdown() waits for one interval.
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a request, in a thread of its own unless it only asks for an address."""
        if not self.get_waits and self._answer_get(request):
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leaves a caller without an answer, and prints one line for each address, instead of a traceback."""
        host = client_address[0]
        if host not in self._strangers:
            self._strangers.add(host)
            sys.stderr.write(f"hvtrain: {host} sent what no rank would to this launch's port; it was dropped\n")

    def _answer_get(self, connection: socket.socket) -> bool:
        """Answers a GET of a rank's address that has arrived whole.

        Returns False, and reads nothing, for anything else.

        Each of N ranks asks for the N - 1 others. A thread and a parser of HTTP for each question cost
        several times what the answer does.
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
            connection.recv(len(request))  # The kernel resets a connection that is closed with bytes to read.
            connection.sendall(head.encode() + body)
        return True

    def put(self, scope: str, rank: str, value: bytes) -> None:
        """Stores a rank's address."""
        with self._changed:
            self._store.setdefault(scope, {})[rank] = value

    def get(self, scope: str, rank: str) -> bytes | None:
        """A rank's address; None if the rank has not stored it yet."""
        with self._changed:
            return self._store.get(scope, {}).get(rank)

    def leave(self, scope: str, rank: str) -> None:
        """Notes that a rank has met all others of the scope.

        After the last one, their addresses are dropped.

        So ranks that start again (comm.tune) do not find the earlier addresses.
        """
        with self._changed:
            left = self._left.setdefault(scope, set())
            left.add(rank)
            # Each rank has stored its address under its number, and more under other keys, before
            # anyone leaves.
            if left >= {key for key in self._store.get(scope, {}) if key.isdigit()}:
                self._store.pop(scope, None)
                del self._left[scope]

    def clear(self) -> None:
        """Forgets all addresses."""
        with self._changed:
            self._store.clear()
            self._left.clear()


class _ClaimHandler(_Handler):
    server: "Rendezvous"

    def do_POST(self) -> None:
        if self.path != _CLAIMS:
            self._answer(_NOT_YET)
            return
        result = self.server.meet(json.loads(self._body()), self.connection)
        if result is not None:
            status, content = result
            self._answer(status, json.dumps(content).encode())


class Rendezvous(Store):
    """The meeting of processes started by hand, and then their store.

    Args:
        address: an address of this host.
        port: where to listen; 0: at a free port.
        names: the name of each rank's process.
    """

    daemon_threads = False  # So that close() waits until all are answered.

    def __init__(self, address: str, port: int, names: Sequence[str]) -> None:
        super().__init__(address, port, _ClaimHandler)
        self._names = list(names)
        self._rank_hosts: dict[int, list[str]] = {}
        self._given_up = False

    def close(self) -> None:
        """Tells those who wait that the others will not arrive, and frees the port."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        self.shutdown()
        self.server_close()

    def meet(self, claim: dict[str, Any], connection: socket.socket) -> tuple[int, Any] | None:
        """Answers a claim once all processes have arrived, or cannot.

        Returns a status, and the host of each rank or a reason; None if the caller hung up.
        """
        deadline = time.monotonic() + float(claim["seconds"])
        num_ranks = len(self._names)
        with self._changed:
            if claim["names"] != self._names:
                return _REFUSED, (
                    f"this process expects {', '.join(claim['names'])}, and rank 0 expects {', '.join(self._names)}; "
                    "give all the same -np and --num-ps"
                )
            # A rank out of range is an IndexError, which handle_error drops with the caller.
            rank = range(num_ranks)[claim["rank"]]
            holder = self._rank_hosts.get(rank)
            if holder:
                return (
                    _REFUSED,
                    f"{self._names[rank]} is there already, on host {holder[0]}; end one of the two",
                )

            self._rank_hosts[rank] = [str(part) for part in claim["host"]]
            self._changed.notify_all()
            while len(self._rank_hosts) < num_ranks:
                # In short intervals: nothing notifies of a caller that hangs up.
                self._changed.wait(0.1)
                if _has_hung_up(connection):
                    del self._rank_hosts[rank]
                    return None
                if self._given_up or time.monotonic() > deadline:
                    missing = [name for number, name in enumerate(self._names) if number not in self._rank_hosts]
                    if rank and not self._given_up:  # Without rank 0 all give up.
                        del self._rank_hosts[rank]
                    return _TOO_LATE, missing
            return _OK, [self._rank_hosts[number] for number in range(num_ranks)]


def claim(
    coordinator: tuple[str, int],
    rank: int,
    names: Sequence[str],
    host: Sequence[str],
    seconds: float,
) -> Any:
    """Claims a rank, waits for all others, and returns the host of each rank.

    Args:
        coordinator: address and port of rank 0's server.
        rank: this process's.
        names: the name of each rank's process, which has to be the same for all.
        host: name and address of this host.
        seconds: how long to wait.

    Raises ConfigError if the rank is taken, LostRankError if a process does not arrive.
    """
    address = "{}:{}".format(*coordinator)
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        request = {"rank": rank, "names": list(names), "host": list(host), "seconds": left}
        # The server answers in time; this limit is for a network that is cut.
        connection = http.client.HTTPConnection(*coordinator, timeout=left + 5)
        try:
            connection.connect()
        except OSError as error:
            # Rank 0's process may start later than this one.
            if time.monotonic() < deadline:
                time.sleep(SECONDS_BETWEEN_TRIES)
                continue
            raise LostRankError(
                f"cannot reach {names[0]}: nothing answered at {address} for {seconds:g} s "
                f"({error.strerror or error}); start it there, or raise --start-timeout"
            ) from error
        return _answer_to(connection, request, names[0], address, seconds)


def _answer_to(
    connection: http.client.HTTPConnection,
    request: dict[str, Any],
    first: str,
    address: str,
    seconds: float,
) -> Any:
    """Sends a claim and returns the answer. first: rank 0's process.

    Raises UserError unless all have met.
    """
    try:
        connection.request("POST", _CLAIMS, json.dumps(request))
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        name = type(error).__name__
        raise LostRankError(f"the connection to {address} broke ({name}); look at the output of {first}") from error
    finally:
        connection.close()

    if response.status not in (_OK, _TOO_LATE, _REFUSED):
        raise ConfigError(f"what answers at {address} is not this run's {first}; give the port of its --coordinator")
    answer = json.loads(body)
    if response.status == _TOO_LATE:
        raise LostRankError(
            f"{', '.join(answer)} did not connect to {address} in time ({seconds:g} s); start what is missing with the "
            "same --coordinator, or raise --start-timeout"
        )
    if response.status == _REFUSED:
        raise ConfigError(answer)
    return answer


def _has_hung_up(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and not connection.recv(1, socket.MSG_PEEK)
