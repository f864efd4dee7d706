"""Which network interface leads where. Standard library alone: its text runs on hosts by ssh, whatever is there.

python interfaces.py ADDRESS     prints MARK and the interface that leads to that IPv4 address, or -
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys

MARK = "hvtrain-interface:"
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h


def address_towards(address: str) -> str:
    """This host's own IPv4 address on the way to another one. Raises OSError where no way leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # Nothing is sent: the kernel only chooses the way.
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that holds the IPv4 address; None when it is none of this host's."""
    return next((name for name in names() if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """The IPv4 address of one of this host's interfaces; None where it has none."""
    return _asked(interface, _SIOCGIFADDR)


def network_of(interface: str) -> str:
    """The interface's network as Open MPI takes it: "10.0.0.0/24". Raises OSError where it has no address."""
    address, mask = _asked(interface, _SIOCGIFADDR), _asked(interface, _SIOCGIFNETMASK)
    if address is None or mask is None:
        raise OSError(f"interface {interface} has no IPv4 address")
    return str(ipaddress.ip_network(f"{address}/{mask}", strict=False))


def names() -> list[str]:
    """The names of this host's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _asked(interface: str, what: int) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(control.fileno(), what, request)[20:24])
        except OSError:
            return None


if __name__ == "__main__":
    try:
        _found = interface_of(address_towards(sys.argv[1]))
    except OSError:
        _found = None
    print(MARK, _found or "-")
