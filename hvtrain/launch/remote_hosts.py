"""The hosts of a launch: checks before any rank starts, the network that joins them, and calls on all of them."""

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
from hvtrain.launch.ssh import LOADER, SSH_FAILED, Ssh, answer, request
from hvtrain.system import host_facts

URI_FILE = "uri"  # mpirun writes its address there, which begins with the number of its job.
SECONDS_FOR_A_HOST = 20.0
# Open files that a login must allow; systems allow 1,024 and more. With fewer MPI waits forever.
FEWEST_FILES = 128
ON_HOST = (host_facts, on_host)

_FILE = "hosts.json"
# Hosts that are asked at the same time. Each is an ssh process on this host.
_PARALLEL_CALLS = 32

# Exit codes by which _LOOK tells a host that lacks something from an ssh that failed (255).
_NO_PYTHON = 86
_NO_FOLDER = 87
_LOOK = f'test -x "$0" || exit {_NO_PYTHON}; test -d "$1" || exit {_NO_FOLDER}; exec "$0" -c "$2"'

# Open MPI then notices a lost host or a cut network after 40 to 45 s: after the watchdog, which
# explains it better. By default mpirun waits for that host for a quarter of an hour.
MPI_NOTICES_CUTS = [
    *("-mca", "oob_tcp_keepalive_time", "5"),
    *("-mca", "oob_tcp_keepalive_intvl", "1"),
    *("-mca", "oob_tcp_keepalive_probes", "40"),
]


Answers = dict[str, dict[str, int] | None]
"""What a function of on_host returned on each host; None: ssh did not reach it."""


@dataclass(frozen=True)
class HostCalls:
    """Calls functions of on_host on the hosts of a launch.

    Whoever starts the ranks writes the hosts into the launch's folder, where the supervisor reads
    them: often another process.

    Args:
        rank_hosts: each rank's host, by the name that -H gives it.
        remote: all hosts but this one, with their on_host.oom_kills() before the start.
        ssh: how they are reached.
    """

    rank_hosts: tuple[str, ...] = ()
    remote: Mapping[str, int] = field(default_factory=dict)
    ssh: Ssh = field(default_factory=Ssh)

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "HostCalls":
        """Reads what was written; no hosts if the launch did not get that far."""
        with suppress(OSError):
            fields = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            return cls(tuple(fields["rank_hosts"]), fields["remote"], Ssh(**fields["ssh"]))
        return cls()

    def clear(self, mark: str, job: int | None = None) -> Answers:
        """Calls on_host.clear on all hosts.

        Returns the others' answers; None for a host that ssh did not reach.
        """
        on_host.clear(mark, job)
        with ThreadPoolExecutor(_PARALLEL_CALLS) as pool:
            answers = pool.map(lambda host: self.call(host, "clear", mark, job), self.remote)
            return dict(zip(self.remote, answers))

    def count(self, function: str, mark: str, *arguments: int) -> int:
        """Calls a function of on_host here, and then on the other hosts until one has ranks.

        Returns their number.
        """
        count: int = getattr(on_host, function)(mark, *arguments)["count"]
        for host in self.remote:
            if count:
                break
            result = self.call(host, function, mark, *arguments)
            count = result.get("count", 0) if result else 0
        return count

    def call(self, host: str, function: str, mark: str, *arguments: int | None) -> dict[str, int] | None:
        """Calls a function of on_host on another host. Returns None if ssh did not reach it."""
        text = request(ON_HOST, function, mark, *arguments)
        try:
            done = self.ssh.run(host, [sys.executable, "-c", LOADER], text, SECONDS_FOR_A_HOST)
        except subprocess.TimeoutExpired:
            return None

        result: dict[str, int] | None = answer(done.stdout)
        # ssh was let in, but Python did not run there: the host is not lost, and nothing is known
        # of it.
        if result is None and done.returncode != SSH_FAILED:
            return {}
        return result


def mpirun_job(folder: Path) -> int | None:
    """The number of mpirun's own job, if mpirun runs."""
    with suppress(OSError, ValueError):
        return int((folder / URI_FILE).read_text(encoding="utf-8").partition(".")[0])
    return None


@dataclass(frozen=True)
class HostNetwork:
    """The network that joins the hosts.

    Args:
        interface: this host's interface to it.
        interfaces: every host's, each name once.
        subnet: its address and prefix length, 10.0.0.0/24.
        oom_kills: on_host.oom_kills() on the other hosts so far.
    """

    interface: str
    interfaces: tuple[str, ...]
    subnet: str
    oom_kills: Mapping[str, int] = field(default_factory=dict)


def is_local(host: str) -> bool:
    """True for a name or address of this host. Raises RankError for a name without an address."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        raise RankError(Ssh().trouble(host, "Could not resolve")) from None

    # Only an address of this host can be bound to.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def check(hosts: Sequence[str], ssh: Ssh) -> HostNetwork | None:
    """Checks that all hosts can take part.

    Returns their network; None if all of them are this host.

    Raises RankError in one line for the first host that cannot take part.
    """
    with ThreadPoolExecutor(_PARALLEL_CALLS) as pool:
        others = [host for host, local in zip(hosts, pool.map(is_local, hosts)) if not local]
        if not others:
            return None
        facts = dict(zip(others, pool.map(lambda host: _look(host, ssh), others)))

    _check_versions(hosts, facts)
    interface = common_interface(others)
    names = {interface, *(fact["interface"] for fact in facts.values())}
    subnet = next(item["network"] for item in host_facts.all_interfaces() if item["name"] == interface)
    kills = {host: fact["oom_kills"] for host, fact in facts.items()}
    return HostNetwork(interface, tuple(sorted(names)), subnet, kills)


def _check_versions(hosts: Sequence[str], facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises RankError for the first host whose packages differ from the first host's."""
    # This host's own versions count if it has a rank; a host that only launches may be another kind
    # of machine.
    versions = {host: host_facts.versions() for host in hosts if host not in facts}
    versions.update((host, fact["versions"]) for host, fact in facts.items())
    first, *others = versions
    for host in others:
        for name, version in versions[first].items():
            other = versions[host].get(name)
            if other != version:
                raise RankError(
                    f"host {host} has {name} {other or 'none'} in {sys.prefix} and host {first} has "
                    f"{version or 'none'}; recreate the environment there from this folder: scripts/run true"
                )


def common_interface(hosts: Sequence[str]) -> str:
    """This host's interface towards all of the hosts; towards itself, the one that holds its address.

    Raises RankError if there are several or none.
    """
    names = {host_facts.interface_of(address_towards(host)) for host in hosts}
    if len(names) != 1 or None in names:
        listed = ", ".join(sorted(str(name) for name in names))
        raise RankError(
            f"different interfaces ({listed}) lead to the hosts; "
            "give the one that joins them all with --network-interfaces NAME"
        )
    return str(names.pop())


def absent(hosts: Sequence[str], ssh: Ssh) -> dict[str, str]:
    """The hosts that cannot take part, and why."""

    def reason(host: str) -> str:
        try:
            if not is_local(host):
                _look(host, ssh)
        except RankError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(_PARALLEL_CALLS) as pool:
        return {host: why for host, why in zip(hosts, pool.map(reason, hosts)) if why}


def address_towards(host: str) -> str:
    """This host's address on the route to another host. Raises RankError if there is no route."""
    try:
        return host_facts.address_towards(socket.gethostbyname(host))
    except OSError as error:
        raise RankError(f"host {host} cannot be reached ({error.strerror}); is it up, and on this network?") from error


def _look(host: str, ssh: Ssh) -> dict[str, Any]:
    """Calls on_host.look on another host. Raises RankError if the host cannot take part."""
    text = request(ON_HOST, "look", address_towards(host))
    try:
        done = ssh.run(host, ["sh", "-c", _LOOK, sys.executable, str(Path.cwd()), LOADER], text)
    except subprocess.TimeoutExpired:
        raise RankError(f"host {host} let us in by ssh but did not answer within a minute; look at its load") from None

    facts: dict[str, Any] | None = answer(done.stdout)
    if done.returncode == _NO_PYTHON:
        fault = f"has no {sys.executable}; put hvtrain there, at the same path as here, and run its scripts/run once"
    elif done.returncode == _NO_FOLDER:
        fault = f"has no folder {Path.cwd()}, in which its ranks would start; make it there, or start from a common one"
    elif done.returncode:
        raise RankError(ssh.trouble(host, done.stderr))
    elif facts is None:
        fault = "let us in by ssh and ran nothing; its shell's start files (~/.bashrc) must not end the shell"
    elif facts["interface"] is None:
        fault = "has no IPv4 way to this host; Horovod needs one"
    elif 0 <= facts["files"] < FEWEST_FILES:  # -1 is no limit.
        fault = (
            f"lets a login open {facts['files']} files, too few for MPI, which would wait forever; "
            "raise `ulimit -n` there, in its shell's start files or /etc/security/limits.conf"
        )
    else:
        return facts
    raise RankError(f"host {host} {fault}")


def mpi_options(subnet: str, interface_names: str, ssh: Ssh) -> list[str]:
    """Open MPI's options to start ranks on those hosts and to let them talk.

    The subnet rather than an interface is given: names may differ from host to host, and Open MPI
    would try an interface that has the same address everywhere (docker0) and wait forever. A user's
    own choice of NCCL's interface wins over interface_names.
    """
    nccl_interface = os.environ.get("NCCL_SOCKET_IFNAME", interface_names)
    return [
        *("--prefix", sys.prefix),
        *("-mca", "btl_tcp_if_include", subnet),
        *("-mca", "oob_tcp_if_include", subnet),
        *("-mca", "plm_rsh_args", " ".join(ssh.options)),
        *MPI_NOTICES_CUTS,
        *("-x", f"NCCL_SOCKET_IFNAME={nccl_interface}"),
    ]
