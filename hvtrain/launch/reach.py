"""Before any rank starts: is every host there, does it hold this environment, and over which interface?"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hvtrain.errors import RankError
from hvtrain.launch import host_versions
from hvtrain.launch.ssh import Ssh
from hvtrain.system import interfaces


@dataclass(frozen=True)
class Paths:
    """The way between the hosts: this host's interface, every host's, and the network they share.

    oom_kills: the other hosts, with the processes that each one's kernel has killed for lack of memory so far.
    """

    interface: str
    interfaces: tuple[str, ...]
    network: str
    oom_kills: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Seen:
    """What a look at a host finds: its interface on the way here, its on_host.oom_kills(), its versions."""

    interface: str
    oom_kills: int | None
    versions: Mapping[str, str]


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
    # This host's own count where it has a rank; a host that only launches may be another kind of machine.
    of_ranks = {host: seen.versions for host, seen in zip(remote, found)}
    here = {host: host_versions.versions() for host in hosts if host not in of_ranks}
    _compare({**here, **of_ranks})
    mine = {interfaces.interface_of(_address_towards(host)) for host in remote}
    if len(mine) != 1 or None in mine:
        listed = ", ".join(sorted(str(name) for name in mine))
        raise RankError(
            f"different interfaces ({listed}) lead to the hosts; give the one that joins them all with "
            "--network-interfaces NAME"
        )
    interface = str(mine.pop())
    names = tuple(sorted({interface, *(seen.interface for seen in found)}))
    kills = {host: seen.oom_kills for host, seen in zip(remote, found)}
    return Paths(interface, names, interfaces.network_of(interface), kills)


def absent(hosts: Sequence[str], ssh: Ssh, python: str = sys.executable) -> dict[str, str]:
    """The hosts that cannot take part, and why."""

    def reason(host: str) -> str:
        try:
            if not is_local(host):
                _look(host, ssh, python)
        except RankError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(32) as pool:
        return {host: why for host, why in zip(hosts, pool.map(reason, hosts)) if why}


def _address_towards(host: str) -> str:
    try:
        return interfaces.address_towards(socket.gethostbyname(host))
    except OSError as error:
        raise RankError(f"host {host} cannot be reached ({error.strerror}); is it up, and on this network?") from error


def _compare(found: Mapping[str, Mapping[str, str]]) -> None:
    """Raises RankError where a host's Python or a package of it has another version than the first one's."""
    first, *others = found
    for host in others:
        for name, version in found[first].items():
            if found[host].get(name) != version:
                raise RankError(
                    f"host {host} has {name} {found[host].get(name)} in {sys.prefix} and host {first} has {version}; "
                    "make the environment there anew from this folder: scripts/run true"
                )


def _look(host: str, ssh: Ssh, python: str) -> _Seen:
    """What a host's own Python says of it."""
    script = 'test -x "$0" || exit 86; test -d "$1" || exit 87; grep "^oom_kill " /proc/vmstat; exec "$0" - "$2"'
    text = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (interfaces, host_versions))
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
    kills = re.search(r"^oom_kill (\d+)$", done.stdout, re.MULTILINE)
    its_versions = re.search(rf"^{host_versions.MARK} (.*)$", done.stdout, re.MULTILINE)
    return _Seen(said[1], int(kills[1]) if kills else None, json.loads(its_versions[1]) if its_versions else {})


# A host that vanished, or a cut network, is noticed after 40 to 45 s: after the ranks' own watch, which says it better.
# Without, mpirun waits for that host for a quarter of an hour.
MPI_NOTICES_CUTS = [
    *("-mca", "oob_tcp_keepalive_time", "5"),
    *("-mca", "oob_tcp_keepalive_intvl", "1"),
    *("-mca", "oob_tcp_keepalive_probes", "40"),
]


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
        *MPI_NOTICES_CUTS,
        *("-x", f"NCCL_SOCKET_IFNAME={','.join(paths.interfaces)}"),
    ]
