"""The server on rank 0's host at which processes started by hand meet, and later the store of Horovod's Gloo.

Each process claims its rank. Once all have come, each gets everyone's place, or the reason why not. A process keeps its
connection open while it waits; if the connection breaks, the rank is free again. Afterwards the server is the HTTP
store of Horovod's Gloo (PUT, GET and DELETE /SCOPE/RANK). Nothing is unpickled, and whoever reaches the port is trusted
as a rank.
"""

import http.client
import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hvtrain.errors import ConfigError, LostRankError

SECONDS_BETWEEN_TRIES = 0.3
_MAX_BYTES = 1 << 20
_OK, _NOT_YET, _TOO_LATE, _REFUSED = 200, 404, 408, 409
_CLAIMS = "/claim"
WAITING_CONNECTIONS = 1024
"""That the kernel keeps for the server: all processes may come at once."""
_WHOLE_GET = re.compile(rb"GET /([^/ ]+)/([^/ ]+) HTTP/1\.[01]\r\n(?:.+\r\n)?\r\n", re.DOTALL)
_MAX_GET = 4096


class Rendezvous(ThreadingHTTPServer):
    """Listens once it is created; serve() answers. names: the process of each rank."""

    request_queue_size = WAITING_CONNECTIONS
    daemon_threads = False  # So that close() waits until all are answered.

    def __init__(self, address: str, port: int, names: Sequence[str]) -> None:
        super().__init__((address, port), _Handler)
        self._names = list(names)
        self._places: dict[int, list[str]] = {}
        self._changed = threading.Condition()
        self._given_up = False
        self._store: dict[str, dict[str, bytes]] = {}
        self._left: dict[str, set[str]] = {}

    def serve(self) -> None:
        """Answers, in threads of its own."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a request, in a thread of its own unless it only asks for an address."""
        if answer_get(request, self.get):
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def close(self) -> None:
        """Answers those who wait that the others will not come, and frees the port."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hangs up or sends what no rank would is left without an answer."""

    def meet(self, claim: dict[str, Any], connection: socket.socket) -> tuple[int, Any] | None:
        """Returns the answer to a claim: a status, and each rank's place or a reason. None: the caller hung up."""
        deadline = time.monotonic() + float(claim["seconds"])
        with self._changed:
            if claim["names"] != self._names:
                theirs, ours = ", ".join(claim["names"]), ", ".join(self._names)
                fix = "give all the same -np and --num-ps"
                return _REFUSED, f"this process expects {theirs}, and rank 0 expects {ours}; {fix}"
            rank = range(len(self._names))[claim["rank"]]
            if holder := self._places.get(rank):
                return _REFUSED, f"{self._names[rank]} is there already, on host {holder[0]}; end one of the two"
            self._places[rank] = [str(part) for part in claim["place"]]
            self._changed.notify_all()
            while len(self._places) < len(self._names):
                self._changed.wait(0.1)
                if _has_hung_up(connection):
                    del self._places[rank]
                    return None
                if self._given_up or time.monotonic() > deadline:
                    missing = [name for number, name in enumerate(self._names) if number not in self._places]
                    if rank and not self._given_up:  # Without rank 0 all give up.
                        del self._places[rank]
                    return _TOO_LATE, missing
            return _OK, [self._places[number] for number in range(len(self._names))]

    def put(self, scope: str, rank: str, value: bytes) -> None:
        """Stores a rank's address."""
        with self._changed:
            self._store.setdefault(scope, {})[rank] = value

    def get(self, scope: str, rank: str) -> bytes | None:
        """A rank's address; None if it has not come yet."""
        with self._changed:
            return self._store.get(scope, {}).get(rank)

    def leave(self, scope: str, rank: str) -> None:
        """Notes that a rank has met all others of the scope. After the last one, their addresses are dropped.

        So ranks that start again (comm.tune) do not find the earlier addresses.
        """
        with self._changed:
            left = self._left.setdefault(scope, set())
            left.add(rank)
            # Each rank has stored its address under its number, and more under other keys, before anyone leaves.
            if left >= {key for key in self._store.get(scope, {}) if key.isdigit()}:
                self._store.pop(scope, None)
                del self._left[scope]


def answer_get(connection: socket.socket, get: Callable[[str, str], bytes | None]) -> bool:
    """Answers a GET of a rank's address that has arrived whole. Returns False, and reads nothing, for anything else.

    get: the address of a scope and rank, or None. Each of N ranks asks for the N - 1 others. A thread and a parser of
    HTTP for each question cost several times what the answer does.
    """
    try:
        request = connection.recv(_MAX_GET, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    asked = _WHOLE_GET.fullmatch(request)
    if asked is None:
        return False
    scope, rank = asked[1].decode("latin-1"), asked[2].decode("latin-1")
    value = get(scope, rank)
    status = "404 Not Found" if value is None else "200 OK"
    body = value or b""
    head = f"HTTP/1.0 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
    with suppress(OSError):  # The caller has hung up.
        connection.recv(len(request))  # The kernel resets a connection that is closed with bytes to read.
        connection.sendall(head.encode() + body)
    return True


class _Handler(BaseHTTPRequestHandler):
    server: Rendezvous
    timeout = 5  # For a caller that sends nothing.

    def do_POST(self) -> None:
        if self.path != _CLAIMS:
            self._answer(_NOT_YET)
        elif (found := self.server.meet(json.loads(self._body()), self.connection)) is not None:
            self._answer(found[0], json.dumps(found[1]).encode())

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


def claim(coordinator: tuple[str, int], rank: int, names: Sequence[str], place: Sequence[str], seconds: float) -> Any:
    """Claims a rank, waits for all others, and returns the place of each rank.

    coordinator: address and port. Raises ConfigError if the rank is taken, LostRankError if a process does not come.
    """
    where, deadline = "{}:{}".format(*coordinator), time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        request = {"rank": rank, "names": list(names), "place": list(place), "seconds": left}
        # The server answers in time; this limit is for a network that is cut.
        connection = http.client.HTTPConnection(*coordinator, timeout=left + 5)
        try:
            connection.connect()
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(SECONDS_BETWEEN_TRIES)
                continue
            raise LostRankError(
                f"cannot reach {names[0]}: nothing answered at {where} for {seconds:g} s "
                f"({error.strerror or error}); start it there, or raise --start-timeout"
            ) from error
        return _answer_to(connection, request, names, where, seconds)


def _answer_to(
    connection: http.client.HTTPConnection, request: dict[str, Any], names: Sequence[str], where: str, seconds: float
) -> Any:
    try:
        connection.request("POST", _CLAIMS, json.dumps(request))
        response = connection.getresponse()
        status, body = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        name = type(error).__name__
        raise LostRankError(f"the connection to {where} broke ({name}); look at the output of {names[0]}") from error
    finally:
        connection.close()
    if status not in (_OK, _TOO_LATE, _REFUSED):
        raise ConfigError(f"what answers at {where} is not this run's {names[0]}; give the port of its --coordinator")
    answer = json.loads(body)
    if status == _TOO_LATE:
        raise LostRankError(
            f"{', '.join(answer)} did not connect to {where} in time ({seconds:g} s); start what is missing with the "
            "same --coordinator, or raise --start-timeout"
        )
    if status == _REFUSED:
        raise ConfigError(answer)
    return answer


def _has_hung_up(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and not connection.recv(1, socket.MSG_PEEK)
