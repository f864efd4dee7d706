"""Reaches the hosts of a launch over ssh: checks them, finds their common network, and calls functions on them.

ssh never prompts, and its failures are explained in one line. To call a function, a host needs only
Python: the source of the function's modules is sent along.
"""

import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hvtrain.errors import RankError
from hvtrain.launch import on_host
from hvtrain.system import host_facts
from hvtrain.system.files import read_json, write_json

# Time for ssh to reach a host; a host that is down does not answer at all.
CONNECT_SECONDS = 10
# ssh's exit code for its own failures; any other code is that of the command on the host.
SSH_FAILED = 255
_ANSWER = "hvtrain-answer:"
# Creates the sent modules under their own names, whether or not hvtrain is installed on that host.
_LOADER = f"""
import json, sys, types
modules, (name, function, arguments) = json.load(sys.stdin)
for full_name, text in modules:
    module = sys.modules[full_name] = types.ModuleType(full_name)
    parent, _, leaf = full_name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    exec(compile(text, full_name, "exec"), module.__dict__)
print("{_ANSWER}", json.dumps(getattr(sys.modules[name], function)(*arguments)))
"""
# In one line, since the login shell may be csh, where a line break ends a quoted word.
LOADER = f"exec({_LOADER!r})"

URI_FILE = "uri"  # The file for mpirun's address, which begins with the number of its job.
SECONDS_FOR_A_HOST = 20.0  # Time limit of HostCalls.call, including the time for ssh to connect.
# Open files that a login must allow: with fewer, MPI waits forever. Most systems allow 1,024 or more.
MIN_OPEN_FILES = 128
ON_HOST = (host_facts, on_host)
_FILE = "hosts.json"
# Hosts called at the same time. Each call is an ssh process on this host.
_PARALLEL_CALLS = 32

# Exit codes of _RUN_PYTHON for a host that lacks something, as opposed to a failure of ssh itself (255).
NO_PYTHON = 86
_NO_FOLDER = 87
_RUN_PYTHON = (
    f'test -x "$0" || exit {NO_PYTHON}; test -d "$1" || exit {_NO_FOLDER}; exec "$0" -c "$2"'
)

Answers = dict[str, int | None]
"""The number that an on_host function returned, by host; None: ssh did not reach the host."""


@dataclass(frozen=True)
class Ssh:
    """Runs commands over ssh, with the port and the key of the options -p and -i.

    User names and everything else go into ~/.ssh/config.
    """

    port: int | None = None
    identity_file: str | None = None

    @property
    def options(self) -> list[str]:
        """The options between `ssh` and the host's name.

        The key of a new host is accepted; a host whose key has changed is refused.
        """
        settings = [
            # Otherwise ssh could wait forever at a password prompt.
            "BatchMode=yes",
            "StrictHostKeyChecking=accept-new",
            f"ConnectTimeout={CONNECT_SECONDS}",
            # A lost host is noticed within a minute, even in the middle of a run.
            "ServerAliveInterval=10",
            "ServerAliveCountMax=3",
        ]
        options = [part for setting in settings for part in ("-o", setting)]
        if self.port:
            options += ["-p", str(self.port)]
        if self.identity_file:
            options += ["-i", self.identity_file]
        return options

    def run(
        self, host: str, command: list[str], stdin: str = "", timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host. Raises subprocess.TimeoutExpired, or RankError if ssh is not installed here."""
        try:
            return capture(["ssh", *self.options, host, shlex.join(command)], stdin, timeout)
        except FileNotFoundError:
            raise RankError("ssh is not installed here; install openssh-client") from None

    def explain_failure(self, host: str, output: str) -> str:
        """Returns a line that says why ssh failed, judging by its stderr `output`, and what to do."""
        # ssh gives its reason last, after any banner or warning.
        last = output.strip().rpartition("\n")[2].strip() or "no error message"
        reason = last.split(": ")[-1]
        port = f" -p {self.port}" if self.port else ""

        if "Could not resolve" in output or "Name or service not known" in output:
            return unknown_host(host)
        if "Permission denied" in output:
            return (
                f"host {host} does not let you in without a password: {reason}; "
                f"run ssh-copy-id{port} -i {self.identity_file or '~/.ssh/id_ed25519'} {host} "
                "(if you have no key, first run ssh-keygen -t ed25519), or name the key with -i"
            )
        if "HOST IDENTIFICATION HAS CHANGED" in output or "Host key verification failed" in output:
            name = f"[{host}]:{self.port}" if self.port else host
            return f"host {host} has a different host key than before; if it was reinstalled, run ssh-keygen -R {name}"
        if "refused" in output:
            return f"nothing answers ssh on host {host}, port {self.port or 22}; start sshd there, or give -p PORT"
        if "timed out" in output or "No route" in output or "unreachable" in output:
            return f"host {host} cannot be reached ({reason}); check that it is up, and on this network"
        return f"ssh to host {host} failed: {last}; try: ssh{port} {host} true"


def unknown_host(host: str) -> str:
    """Returns the message for a host whose name does not resolve."""
    return (
        f"host {host} has no IPv4 address here; "
        "add it to /etc/hosts or DNS (an alias in ~/.ssh/config is not enough), or give its address"
    )


def capture(command: list[str], stdin: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs a command and captures its output. Raises subprocess.TimeoutExpired."""
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        # A host's greeting may be in any encoding.
        errors="replace",
        timeout=timeout,
    )


def request(modules: Sequence[ModuleType], function: str, *arguments: Any) -> str:
    """Returns the stdin for `python -c LOADER`, which then calls a function of the last module.

    The other modules are its imports.
    """
    # The loader creates these packages empty, so that the modules can import each other.
    packages = sorted({"hvtrain", *(module.__name__.rpartition(".")[0] for module in modules)})
    texts = [(module.__name__, Path(str(module.__file__)).read_text("utf-8")) for module in modules]
    call = (modules[-1].__name__, function, arguments)
    return json.dumps(([*((package, "") for package in packages), *texts], call))


def answer(output: str) -> Any:
    """Returns the function's result from the output of `python -c LOADER`; None if there is none.

    The greeting of a login shell may come before the result.
    """
    match = re.search(rf"^{_ANSWER} (.*)$", output, re.MULTILINE)
    return json.loads(match[1]) if match else None


@dataclass(frozen=True)
class HostCalls:
    """Calls functions of on_host on the hosts of a launch.

    The process that starts the ranks writes the hosts into the launch's folder, where the supervisor,
    often another process, reads them.

    Args:
        rank_hosts: each rank's host, by its name in -H.
        remote: all hosts but this one, with their on_host.oom_kills() before the start.
        ssh: how the hosts are reached.
    """

    rank_hosts: tuple[str, ...] = ()
    remote: Mapping[str, int] = field(default_factory=dict)
    ssh: Ssh = field(default_factory=Ssh)

    def write(self, folder: Path) -> None:
        # Replaced atomically, since the supervisor may read the file at any moment.
        write_json(folder / _FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "HostCalls":
        """Reads the hosts from the launch's folder; there are none if `write` has not been called yet."""
        fields = read_json(folder / _FILE, dict)
        if fields:
            return cls(tuple(fields["rank_hosts"]), fields["remote"], Ssh(**fields["ssh"]))
        return cls()

    def clean_up(self, folder: Path) -> Answers:
        """Calls on_host.clean_up on all hosts for the launch with this folder.

        Returns the answers of the other hosts; None for a host that ssh did not reach.
        """
        mark = str(folder)
        job = mpirun_job(folder)
        # Called here without ssh, which this host may not accept from itself.
        on_host.clean_up(mark, job)
        with ThreadPoolExecutor(_PARALLEL_CALLS) as pool:
            answers = pool.map(lambda host: self.call(host, "clean_up", mark, job), self.remote)
            return dict(zip(self.remote, answers))

    def count(self, function: str, mark: str, *arguments: int) -> int:
        """Calls a function of on_host here, and then on the other hosts in turn, until a host counts ranks.

        Returns that count; 0 if no host has any.
        """
        # Most launches have ranks on this host, so that no other host has to be called.
        count = getattr(on_host, function)(mark, *arguments)
        for host in self.remote:
            if count:
                break
            count = self.call(host, function, mark, *arguments) or 0
        return count

    def call(self, host: str, function: str, mark: str, *arguments: int | None) -> int | None:
        """Calls a function of on_host on another host, and returns its result; None if ssh did not reach the host."""
        text = request(ON_HOST, function, mark, *arguments)
        try:
            done = self.ssh.run(host, [sys.executable, "-c", LOADER], text, SECONDS_FOR_A_HOST)
        except subprocess.TimeoutExpired:
            return None

        result = answer(done.stdout)
        # ssh connected, so the host is not lost, but Python did not run there.
        if result is None and done.returncode != SSH_FAILED:
            return 0
        return result


def mpirun_job(folder: Path) -> int | None:
    """Returns the number of mpirun's own job; None if mpirun is not running."""
    with suppress(OSError, ValueError):
        return int((folder / URI_FILE).read_text("utf-8").partition(".")[0])
    return None


@dataclass(frozen=True)
class HostNetwork:
    """The network that joins the hosts.

    Args:
        interface: this host's interface to that network.
        interfaces: the interface names of all hosts, without duplicates, separated by commas.
        subnet: the network's address and prefix length, such as 10.0.0.0/24.
        oom_kills: on_host.oom_kills() on the other hosts so far.
    """

    interface: str
    interfaces: str
    subnet: str
    oom_kills: Mapping[str, int]


def is_local(host: str) -> bool:
    """True for a name or address of this host. Raises RankError for a name that does not resolve."""
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError):  # UnicodeError for a name such as s1..x.
        raise RankError(unknown_host(host)) from None

    # Binding a socket proves nothing where net.ipv4.ip_nonlocal_bind is set, as for keepalived.
    return address.startswith("127.") or host_facts.interface_of(address) is not None


def check(rank_hosts: Sequence[str], ssh: Ssh) -> HostNetwork | None:
    """Checks that each rank's host can take part, and returns the hosts' network; None if all are this host.

    Raises RankError, in one line, for the first host that cannot take part.
    """
    hosts = list(dict.fromkeys(rank_hosts))
    with ThreadPoolExecutor(_PARALLEL_CALLS) as pool:
        # Names are looked up in parallel, since the delays of a slow name server would add up.
        others = [host for host, local in zip(hosts, pool.map(is_local, hosts)) if not local]
        if not others:
            return None
        facts = dict(zip(others, pool.map(lambda host: _describe_host(host, ssh), others)))

    _check_versions(hosts, facts)
    interface = common_interface(others)
    names = {interface, *(fact["interface"] for fact in facts.values())}
    # By address, since an interface may have addresses in several networks.
    addresses = {address_towards(host) for host in others}
    subnet = next(
        item["network"] for item in host_facts.all_interfaces() if item["address"] in addresses
    )
    kills = {host: fact["oom_kills"] for host, fact in facts.items()}
    return HostNetwork(interface, ",".join(sorted(names)), subnet, kills)


def _check_versions(hosts: Sequence[str], facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises RankError for the first host whose packages differ from the first host's."""
    # This host's own versions count only if it has a rank: a host that only launches may differ.
    versions = {host: host_facts.versions() for host in hosts if host not in facts}
    versions.update((host, fact["versions"]) for host, fact in facts.items())
    first, *others = versions
    for host in others:
        for name, version in versions[first].items():
            other = versions[host].get(name)
            if other != version:
                raise RankError(
                    f"host {host} has {name} {other or 'none'} in {sys.prefix} and host {first} has "
                    f"{version or 'none'}; recreate the environment on {host} from this folder: scripts/run true"
                )


def common_interface(hosts: Sequence[str]) -> str:
    """Returns this host's interface towards all of the hosts.

    For a name of this host, that is the interface with the address that the name resolves to.

    Raises RankError if several interfaces lead to the hosts, or none.
    """
    names = {host_facts.interface_of(address_towards(host)) for host in hosts}
    # Only the user knows which of several networks is meant.
    if len(names) != 1 or None in names:
        known = ", ".join(sorted(filter(None, names))) or "none"
        raise RankError(
            f"no single interface of this host leads to all hosts (found: {known}); give the one that joins them "
            "with --network-interfaces NAME"
        )
    return str(names.pop())


def absent(hosts: Sequence[str], ssh: Ssh) -> dict[str, str]:
    """Returns the hosts that cannot take part, each with the reason."""

    def reason(host):
        try:
            if not is_local(host):
                _describe_host(host, ssh)
        except RankError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(_PARALLEL_CALLS) as pool:
        return {host: why for host, why in zip(hosts, pool.map(reason, hosts)) if why}


def address_towards(host: str) -> str:
    """Returns this host's address on the route to another host. Raises RankError if there is no route."""
    try:
        return host_facts.address_towards(socket.gethostbyname(host))
    except (OSError, UnicodeError) as error:
        raise RankError(
            f"host {host} cannot be reached ({getattr(error, 'strerror', error)}); "
            "check that it is up, and on this network"
        ) from error


def _describe_host(host: str, ssh: Ssh) -> dict[str, Any]:
    """Calls on_host.describe_host on another host. Raises RankError if the host cannot take part."""
    text = request(ON_HOST, "describe_host", address_towards(host))
    try:
        done = ssh.run(
            host, ["sh", "-c", _RUN_PYTHON, sys.executable, str(Path.cwd()), LOADER], text
        )
    except subprocess.TimeoutExpired:
        raise RankError(
            f"host {host} accepted ssh but did not answer within a minute; check its load"
        ) from None

    facts = answer(done.stdout)
    if done.returncode == NO_PYTHON:
        fault = f"has no {sys.executable}; put hvtrain there, at the same path as here, and run its scripts/run once"
    elif done.returncode == _NO_FOLDER:
        fault = (
            f"has no folder {Path.cwd()}, in which its ranks would start; "
            "make it there, or start from a folder that all hosts have"
        )
    elif done.returncode:
        raise RankError(ssh.explain_failure(host, done.stderr))
    elif facts is None:
        fault = "accepted ssh but did not run the command; check that its shell startup files (~/.bashrc) do not exit"
    elif facts["interface"] is None:
        fault = "has no IPv4 route to this host; Horovod needs one"
    elif 0 <= facts["files"] < MIN_OPEN_FILES:  # -1 means no limit.
        fault = (
            f"lets a login open {facts['files']} files, too few for MPI, which needs {MIN_OPEN_FILES} or would wait "
            "forever; raise `ulimit -n` there, in its shell startup files or /etc/security/limits.conf"
        )
    else:
        return facts
    raise RankError(f"host {host} {fault}")
