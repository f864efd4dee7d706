"""Which addresses and free ports of other hosts this one finds and reaches. Part of the probe: standard library."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

LOOKUP_SECONDS = 6.0
CONNECT_SECONDS = 2.0
# Once one direction between two hosts works, both are there: the other one works soon or not at all.
GRACE_SECONDS = 3.0


def addresses(names: Sequence[str]) -> dict[str, str | None]:
    """The IPv4 address that each name has here; None for a name without one, or not found in time."""
    found: dict[str, str | None] = dict.fromkeys(names)

    def look(name: str) -> None:
        with contextlib.suppress(OSError):
            found[name] = socket.gethostbyname(name)

    threads = [threading.Thread(target=look, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LOOKUP_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def free_port() -> int:
    """A port above 1023 that is free. The kernel chooses it, as it does for Horovod and MPI."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Exchange:
    """Listens at a port and connects to the other hosts, all at the same time.

    request: me, this host's name; port, where it listens; token, known to these hosts alone, so that a caller that does
    not send it does not count; others, address and port of each other host; seconds, for all of it.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._me, self._token, self._others = request["me"], request["token"], request["others"]
        self._deadline = time.monotonic() + request["seconds"]
        self._reached: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._clocks: dict[str, tuple[float, float]] = {}
        self._reasons: dict[str, str] = {}
        self._server = socket.create_server(("", request["port"]), backlog=len(self._others) + 8)

    def run(self) -> dict[str, Any]:
        """The hosts that were reached, and why each other one was not.

        clocks: seconds that a host's clock is ahead of this one's, and the error: half of the call's time.
        """
        threading.Thread(target=self._listen, daemon=True).start()
        for name in self._others:
            threading.Thread(target=self._connect, args=(name,), daemon=True).start()
        while time.monotonic() < self._deadline and not all(map(self._is_settled, self._others)):
            time.sleep(0.02)
        missing = {name: self._reasons.get(name, "no answer") for name in self._others if name not in self._reached}
        return {"reached": sorted(self._reached), "missing": missing, "clocks": dict(self._clocks)}

    def _is_settled(self, name: str) -> bool:
        times = [known[name] for known in (self._reached, self._heard) if name in known]
        return len(times) == 2 or (len(times) == 1 and time.monotonic() - times[0] > GRACE_SECONDS)

    def _listen(self) -> None:
        while True:
            caller, _ = self._server.accept()
            threading.Thread(target=self._answer, args=(caller,), daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError), caller, caller.makefile("rw", encoding="utf-8") as stream:
            caller.settimeout(CONNECT_SECONDS)
            token, _, name = stream.readline(200).strip().partition(" ")
            if token == self._token and name in self._others:
                stream.write(f"{self._token} {time.time()}\n")
                stream.flush()
                self._heard.setdefault(name, time.monotonic())

    def _connect(self, name: str) -> None:
        address, port = self._others[name]
        while name not in self._reached:
            try:
                with socket.create_connection((address, port), CONNECT_SECONDS) as call:
                    asked = time.time()
                    call.sendall(f"{self._token} {self._me}\n".encode())
                    token, _, clock = call.makefile("r", encoding="utf-8").readline(200).strip().partition(" ")
                    answered = time.time()
                    if token == self._token:
                        self._clocks[name] = (float(clock) - (asked + answered) / 2, (answered - asked) / 2)
                        self._reached[name] = time.monotonic()
                        return
                    self._reasons[name] = "another program answers there"
            except OSError as error:
                self._reasons[name] = error.strerror or str(error)
            time.sleep(0.1)
