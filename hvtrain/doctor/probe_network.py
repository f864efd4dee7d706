"""A host among hosts: names, interfaces, and whether free ports can be reached. Part of the probe: standard library."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

_SIOCGIFCONF, _SIOCGIFNETMASK = 0x8912, 0x891B  # linux/sockios.h
_IFREQ_BYTES = 40  # On 64-bit machines: 16 for the name, 24 for the largest answer.

LOOKUP_SECONDS = 6.0
CONNECT_SECONDS = 2.0
# Once one way between two hosts works, both are there: the other way must work soon, or does not.
GRACE_SECONDS = 3.0


def addresses(names: Sequence[str]) -> dict[str, str | None]:
    """The IPv4 address that each name has here; None for a name without one, or one that is not found in time."""
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


def all_interfaces() -> list[dict[str, str]]:
    """Name, address and network of each IPv4 address of this host, second addresses of an interface too."""
    size = 64 * 1024
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        room = array.array("B", bytes(size))
        asked = struct.pack("iL", size, room.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(control.fileno(), _SIOCGIFCONF, asked))[0]
        found = []
        for start in range(0, used, _IFREQ_BYTES):
            request = room[start : start + _IFREQ_BYTES].tobytes()
            # The request holds name and address, so the mask is that of this address.
            mask = socket.inet_ntoa(fcntl.ioctl(control.fileno(), _SIOCGIFNETMASK, request)[20:24])
            address = socket.inet_ntoa(request[20:24])
            network = str(ipaddress.ip_network(f"{address}/{mask}", strict=False))
            found.append({"name": request[:16].split(b"\0")[0].decode(), "address": address, "network": network})
        return found


def free_port() -> int:
    """A port above 1023 that nothing listens at, chosen as Horovod and MPI have theirs chosen: by the kernel."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Exchange:
    """Listens at a port and connects to the other hosts, all at the same time.

    Args:
        me: this host's name.
        port: where it listens.
        token: known to these hosts alone; who does not say it does not count.
        others: address and port of each other host.
    """

    def __init__(self, me: str, port: int, token: str, others: Mapping[str, Sequence[Any]]) -> None:
        self._me = me
        self._token = token
        self._others = others
        self._reached: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._clocks: dict[str, tuple[float, float]] = {}
        self._reasons: dict[str, str] = {}
        self._server = socket.create_server(("", port), backlog=len(others) + 8)

    def run(self, seconds: float) -> dict[str, Any]:
        """The hosts that were reached, and for each missing one why. Ends within the seconds.

        clocks: seconds that a host's clock is ahead of this one's, and the error of that, half of the call's time.
        """
        threading.Thread(target=self._listen, daemon=True).start()
        for name in self._others:
            threading.Thread(target=self._connect, args=(name,), daemon=True).start()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(map(self._is_settled, self._others)):
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
