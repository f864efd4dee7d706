"""Before any rank starts: is every host there, does it hold this environment, and over which interface?"""

from __future__ import annotations

import re
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
    with ThreadPoolExecutor(32) as pool:
        remote = [host for host, local in zip(hosts, pool.map(is_local, hosts)) if not local]
        if not remote:
            return None
        found = list(pool.map(lambda host: _look(host, ssh, python), remote))
    mine = {interfaces.interface_of(_address_towards(host)) for host in remote}
    if len(mine) != 1 or None in mine:
        listed = ", ".join(sorted(str(name) for name in mine))
        raise RankError(
            f"different interfaces ({listed}) lead to the hosts; give the one that joins them all with "
            "--network-interfaces NAME"
        )
    interface = str(mine.pop())
    return Paths(interface, tuple(sorted({interface, *found})), interfaces.network_of(interface))


def _address_towards(host: str) -> str:
    try:
        return interfaces.address_towards(socket.gethostbyname(host))
    except OSError as error:
        raise RankError(f"host {host} cannot be reached ({error.strerror}); is it up, and on this network?") from error


def _look(host: str, ssh: Ssh, python: str) -> str:
    """The interface of a host on the way to this one, by its own Python."""
    script = 'test -x "$0" || exit 86; test -d "$1" || exit 87; exec "$0" - "$2"'
    text = Path(interfaces.__file__).read_text(encoding="utf-8")
    try:
        done = ssh.run(host, ["sh", "-c", script, python, str(Path.cwd()), _address_towards(host)], text)
    except subprocess.TimeoutExpired:
        raise RankError(f"host {host} let us in by ssh but did not answer within a minute; look at its load") from None
    if done.returncode == 86:
        raise RankError(
            f"host {host} has no {python}; put hvtrain there, at the same path as here, and run its scripts/run once"
        )
    if done.returncode == 87:
        raise RankError(
            f"host {host} has no folder {Path.cwd()}, in which its ranks would start; make it there, or start from "
            "one that all hosts have"
        )
    if done.returncode:
        raise RankError(ssh.trouble(host, done.stderr))
    # A greeting of the login shell may stand before it.
    said = re.search(rf"^{interfaces.MARK} (\S+)$", done.stdout, re.MULTILINE)
    if not said:
        raise RankError(
            f"host {host} let us in by ssh and ran nothing; its shell's start files (~/.bashrc) must not end the shell"
        )
    if said[1] == "-":
        raise RankError(f"host {host} has no IPv4 way to this host; Horovod needs one")
    return said[1]


def mpi_options(paths: Paths, ssh: Ssh, prefix: str = sys.prefix) -> list[str]:
    """What Open MPI must be told to start and to talk between those hosts.

    The network instead of an interface's name: names may differ from host to host, and Open MPI would try an
    interface that has the same address everywhere (docker0) and wait for ever.
    """
    return [
        *("--prefix", prefix),
        *("-mca", "btl_tcp_if_include", paths.network),
        *("-mca", "oob_tcp_if_include", paths.network),
        *("-mca", "plm_rsh_args", " ".join(ssh.options)),
        *("-x", f"NCCL_SOCKET_IFNAME={','.join(paths.interfaces)}"),
    ]
