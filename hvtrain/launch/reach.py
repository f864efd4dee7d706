"""The hosts of a launch: checks before any rank starts, the interface that joins them, and calls on all of them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvtrain.errors import RankError
from hvtrain.launch import on_host
from hvtrain.launch.on_host import Answer
from hvtrain.launch.ssh import LOADER, SSH_FAILED, Ssh, answer, request
from hvtrain.system import host_facts, interfaces

URI_FILE = "uri"  # mpirun writes its address there, which begins with the number of its job.
SECONDS_FOR_A_HOST = 20.0
FEWEST_FILES = 128
"""That a login can open at the same time; systems allow 1,024 and more."""
_FILE = "hosts.json"
ON_HOST = (host_facts, interfaces, on_host)


@dataclass(frozen=True)
class Reached:
    """Whoever starts the ranks knows it, and whoever supervises them needs it; those may be two processes.

    places: each rank's host, by the name that -H gives it. remote: all hosts but this one, with their
    on_host.oom_kills() before the start.
    """

    places: tuple[str, ...] = ()
    remote: Mapping[str, int | None] = field(default_factory=dict)
    ssh: Ssh = field(default_factory=Ssh)

    def write(self, folder: Path) -> None:
        """Into the launch's folder, for read()."""
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Reached":
        """What the other process wrote; nothing if it did not get that far."""
        with suppress(OSError):
            tree = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            return cls(tuple(tree["places"]), tree["remote"], Ssh(**tree["ssh"]))
        return cls()

    def clear(self, mark: str, job: int | None = None) -> dict[str, Answer | None]:
        """Calls on_host.clear on all hosts. The answers of the others; None if ssh did not get there."""
        on_host.clear(mark, job)
        with ThreadPoolExecutor(32) as pool:
            return dict(zip(self.remote, pool.map(lambda host: self.call(host, "clear", mark, job), self.remote)))

    def call(self, host: str, function: str, mark: str, *arguments: int | None) -> Answer | None:
        """Calls a function of on_host on another host. None if ssh did not get there."""
        text = request(ON_HOST, function, mark, *arguments)
        try:
            done = self.ssh.run(host, [sys.executable, "-c", LOADER], text, SECONDS_FOR_A_HOST)
        except subprocess.TimeoutExpired:
            return None
        found: Answer | None = answer(done.stdout)
        return found or (None if done.returncode == SSH_FAILED else Answer(count=0, oom_kills=None))


def mpirun_job(folder: Path) -> int | None:
    """The number of mpirun's own job, if mpirun runs."""
    with suppress(OSError, ValueError):
        return int((folder / URI_FILE).read_text(encoding="utf-8").partition(".")[0])
    return None


@dataclass(frozen=True)
class Paths:
    """The way between the hosts: this host's interface, every host's, and the network that they share.

    oom_kills: what on_host.oom_kills() says on the other hosts so far.
    """

    interface: str
    interfaces: tuple[str, ...]
    network: str
    oom_kills: Mapping[str, int | None] = field(default_factory=dict)


def is_local(host: str) -> bool:
    """True for a name or address of this host. Raises RankError for a name without an address."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        raise RankError(Ssh().trouble(host, "Could not resolve")) from None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def check(hosts: Sequence[str], ssh: Ssh) -> Paths | None:
    """The way between this host and the others; None if all of them are this one.

    Raises RankError in one line for the first host that cannot take part.
    """
    with ThreadPoolExecutor(32) as pool:
        others = [host for host, local in zip(hosts, pool.map(is_local, hosts)) if not local]
        if not others:
            return None
        found = dict(zip(others, pool.map(lambda host: _look(host, ssh), others)))
    # This host's own versions count if it has a rank; a host that only launches may be another kind of machine.
    versions = {host: host_facts.versions() for host in hosts if host not in found}
    versions.update((host, facts["versions"]) for host, facts in found.items())
    first, *rest = versions
    for host in rest:
        for name, version in versions[first].items():
            if (other := versions[host].get(name)) != version:
                differs = f"has {name} {other or 'none'} in {sys.prefix} and host {first} has {version or 'none'}"
                fix = "recreate the environment there from this folder: scripts/run true"
                raise RankError(f"host {host} {differs}; {fix}")
    mine = {interfaces.interface_of(_address_towards(host)) for host in others}
    if len(mine) != 1 or None in mine:
        listed = ", ".join(sorted(str(name) for name in mine))
        fix = "give the one that joins them all with --network-interfaces NAME"
        raise RankError(f"different interfaces ({listed}) lead to the hosts; {fix}")
    interface = str(mine.pop())
    names = tuple(sorted({interface, *(facts["interface"] for facts in found.values())}))
    kills = {host: facts["oom_kills"] for host, facts in found.items()}
    network = next(found["network"] for found in interfaces.all_interfaces() if found["name"] == interface)
    return Paths(interface, names, network, kills)


def absent(hosts: Sequence[str], ssh: Ssh) -> dict[str, str]:
    """The hosts that cannot take part, and why."""

    def reason(host: str) -> str:
        try:
            if not is_local(host):
                _look(host, ssh)
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


def _look(host: str, ssh: Ssh) -> dict[str, Any]:
    script = 'test -x "$0" || exit 86; test -d "$1" || exit 87; exec "$0" -c "$2"'
    text = request(ON_HOST, "look", _address_towards(host))
    try:
        done = ssh.run(host, ["sh", "-c", script, sys.executable, str(Path.cwd()), LOADER], text)
    except subprocess.TimeoutExpired:
        raise RankError(f"host {host} let us in by ssh but did not answer within a minute; look at its load") from None
    facts: dict[str, Any] | None = answer(done.stdout)
    if done.returncode == 86:
        wrong = f"has no {sys.executable}; put hvtrain there, at the same path as here, and run its scripts/run once"
    elif done.returncode == 87:
        wrong = f"has no folder {Path.cwd()}, in which its ranks would start; make it there, or start from a common one"
    elif done.returncode:
        raise RankError(ssh.trouble(host, done.stderr))
    elif facts is None:
        wrong = "let us in by ssh and ran nothing; its shell's start files (~/.bashrc) must not end the shell"
    elif facts["interface"] is None:
        wrong = "has no IPv4 way to this host; Horovod needs one"
    elif 0 <= facts["files"] < FEWEST_FILES:
        limit = f"lets a login open {facts['files']} files, too few for MPI, which would wait forever"
        wrong = f"{limit}; raise `ulimit -n` there, in its shell's start files or /etc/security/limits.conf"
    else:
        return facts
    raise RankError(f"host {host} {wrong}")


# Open MPI then notices a lost host or a cut network after 40 to 45 s: after the watchdog, which says it better. By
# default mpirun waits for that host for a quarter of an hour.
MPI_NOTICES_CUTS = [
    *("-mca", "oob_tcp_keepalive_time", "5"),
    *("-mca", "oob_tcp_keepalive_intvl", "1"),
    *("-mca", "oob_tcp_keepalive_probes", "40"),
]


def mpi_options(network: str, interfaces: str, ssh: Ssh) -> list[str]:
    """Open MPI's options to start and talk between those hosts.

    network: rather than an interface, for names may differ from host to host, and Open MPI would try an interface that
    has the same address everywhere (docker0) and wait forever. NCCL's interface is the user's own choice, if there is
    one.
    """
    return [
        *("--prefix", sys.prefix),
        *("-mca", "btl_tcp_if_include", network),
        *("-mca", "oob_tcp_if_include", network),
        *("-mca", "plm_rsh_args", " ".join(ssh.options)),
        *MPI_NOTICES_CUTS,
        *("-x", f"NCCL_SOCKET_IFNAME={os.environ.get('NCCL_SOCKET_IFNAME', interfaces)}"),
    ]
