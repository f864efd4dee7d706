"""Resolves the names of other hosts and tests connections to them. Part of the probe: standard library only."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

LOOKUP_SECONDS = 6.0
CONNECT_SECONDS = 2.0
# Once one direction works, both hosts are listening: the other direction then works within this time or not at all.
GRACE_SECONDS = 3.0


def addresses(names: Sequence[str]) -> dict[str, str | None]:
    """The IPv4 address that this host finds for each name; None if it finds none within LOOKUP_SECONDS."""
    found: dict[str, str | None] = dict.fromkeys(names)

    def resolve(name: str) -> None:
        with contextlib.suppress(OSError):
            found[name] = socket.gethostbyname(name)

    threads = [threading.Thread(target=resolve, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LOOKUP_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def free_port() -> int:
    """A free port above 1023, chosen by the kernel, as ports for Horovod and MPI are."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Exchange:
    """Listens on a port and connects to all other hosts, which do the same at the same time.

    request: me, this host's name; port, to listen on; token, a secret that these hosts share, without which a
    caller is ignored; others, the [address, port] of each other host by name; seconds, the time limit in all.
    Raises OSError if the port is taken.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._me, self._token, self._others = request["me"], request["token"], request["others"]
        self._deadline = time.monotonic() + request["seconds"]
        # By host: when this one got through to it, and when it got through to this one (time.monotonic).
        self._reached: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._clocks: dict[str, tuple[float, float]] = {}
        self._reasons: dict[str, str] = {}
        self._server = socket.create_server(("", request["port"]), backlog=len(self._others) + 8)

    def run(self) -> dict[str, Any]:
        """Returns the hosts reached, the reason for each host missing, and the clocks of those reached.

        clocks: by how many seconds a host's clock is ahead of this one's, and the error: half the round-trip time.
        """
        threading.Thread(target=self._listen, daemon=True).start()
        for name in self._others:
            threading.Thread(target=self._connect, args=(name,), daemon=True).start()
        while time.monotonic() < self._deadline and not all(map(self._is_settled, self._others)):
            time.sleep(0.02)
        missing = {name: self._reasons.get(name, "no answer") for name in self._others if name not in self._reached}
        return {"reached": sorted(self._reached), "missing": missing, "clocks": dict(self._clocks)}

    def _is_settled(self, name: str) -> bool:
        times = [found[name] for found in (self._reached, self._heard) if name in found]
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
