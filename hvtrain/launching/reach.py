"""Before any rank starts: is every host there, does it hold this environment, and over which interface?"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvtrain.errors import RankError
from hvtrain.launching import interfaces
from hvtrain.launching.ssh import Ssh


@dataclass(frozen=True)
class Paths:
    """The way between the hosts: this host's interface, every host's, and the network they share."""

    interface: str
    interfaces: tuple[str, ...]
    network: str


def is_local(host: str) -> bool:
    """True for a name or address of this host. Raises RankError for a name without an address."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        raise RankError(Ssh().trouble(host, "Could not resolve")) from None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def check(hosts: Sequence[str], ssh: Ssh, python: str = sys.executable) -> Paths | None:
    """The way between this host and the others; None where all of them are this one.

    Raises RankError in one line for the first host that cannot take part.
    """
    remote = [host for host in hosts if not is_local(host)]
    if not remote:
        return None
    with ThreadPoolExecutor(min(32, len(remote))) as pool:
        found = list(pool.map(lambda host: _look(host, ssh, python), remote))
    ways = {interfaces.address_towards(socket.gethostbyname(host)) for host in remote}
    mine = {interfaces.interface_of(address) for address in ways}
    if len(mine) != 1 or None in mine:
        listed = ", ".join(sorted(str(name) for name in mine))
        raise RankError(
            f"different interfaces ({listed}) lead to the hosts; give the one that joins them all with "
            "--network-interfaces NAME"
        )
    interface = str(mine.pop())
    return Paths(interface, tuple(sorted({interface, *found})), interfaces.network_of(interface))


def _look(host: str, ssh: Ssh, python: str) -> str:
    """The interface of a host on the way to this one, by its own Python."""
    # The third word of SSH_CONNECTION is the address at which that host was reached.
    script = 'test -x "$0" || exit 86; set -- $SSH_CONNECTION; exec "$0" - "$3"'
    text = Path(interfaces.__file__).read_text(encoding="utf-8")
    try:
        done = ssh.run(host, ["sh", "-c", script, python], text)
    except subprocess.TimeoutExpired:
        raise RankError(f"host {host} let us in by ssh but did not answer within a minute; look at its load") from None
    if done.returncode == 86:
        raise RankError(
            f"host {host} has no {python}; put hvtrain there, at the same path as here, and run its scripts/run once"
        )
    if done.returncode:
        raise RankError(ssh.trouble(host, done.stderr))
    return done.stdout.split()[-1]


def mpi_options(paths: Paths, prefix: str = sys.prefix) -> list[str]:
    """What Open MPI must be told to start and to talk between those hosts.

    The network instead of an interface's name: names may differ from host to host, and Open MPI would try an
    interface that has the same address everywhere (docker0) and wait for ever.
    """
    return [
        *("--prefix", prefix),
        *("-mca", "btl_tcp_if_include", paths.network),
        *("-mca", "oob_tcp_if_include", paths.network),
        *("-x", f"NCCL_SOCKET_IFNAME={','.join(paths.interfaces)}"),
    ]
