"""This host's network interfaces. Standard library only: launch/ssh.py runs this text on other hosts."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct

_SIOCGIFCONF, _SIOCGIFNETMASK = 0x8912, 0x891B  # linux/sockios.h
_IFREQ_BYTES = 40  # On 64-bit machines: 16 for the name, 24 for the largest answer.
_MAX_BYTES = 64 * 1024


def all_interfaces() -> list[dict[str, str]]:
    """Name, address and network ("10.0.0.0/24") of each IPv4 address of this host; an interface may have several."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        room = array.array("B", bytes(_MAX_BYTES))
        asked = struct.pack("iL", _MAX_BYTES, room.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(control.fileno(), _SIOCGIFCONF, asked))[0]
        interfaces = []
        for start in range(0, used, _IFREQ_BYTES):
            request = room[start : start + _IFREQ_BYTES].tobytes()
            # The request holds name and address, so the mask is that of this address.
            mask = socket.inet_ntoa(fcntl.ioctl(control.fileno(), _SIOCGIFNETMASK, request)[20:24])
            address = socket.inet_ntoa(request[20:24])
            network = str(ipaddress.ip_network(f"{address}/{mask}", strict=False))
            interfaces.append({"name": request[:16].split(b"\0")[0].decode(), "address": address, "network": network})
        return interfaces


def address_towards(address: str) -> str:
    """This host's own IPv4 address on the way to another one. Raises OSError if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # Nothing is sent: the kernel only chooses the way.
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that holds the IPv4 address; None if it is not this host's."""
    for interface in all_interfaces():
        if interface["address"] == address:
            return interface["name"]
    return None
