"""The hosts of a launch: ssh to them, checks before any rank starts, the network that joins them, calls on all of them.

ssh asks nothing, and its failures are explained in one line. A function that it runs on a host needs only Python there:
the text of its modules is sent along.
"""

import getpass
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

# For ssh to reach a host; a host that is down answers nothing at all.
CONNECT_SECONDS = 10
# ssh's own exit code; any other is that of the command on the host.
SSH_FAILED = 255
_ANSWER = "hvtrain-answer:"
# Creates the modules that are sent, under their own names, with or without hvtrain on that host.
LOADER = f"""
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

Answers = dict[str, dict[str, int] | None]
"""What a function of on_host returned on each host; None: ssh did not reach it."""


@dataclass(frozen=True)
class Ssh:
    """Options of ssh: `-p` and `-i` of horovodrun.

    Users and everything else go into ~/.ssh/config.
    """

    port: int | None = None
    identity_file: str | None = None

    @property
    def options(self) -> list[str]:
        """The options between ssh and the host.

        A new host becomes known; one whose key has changed is refused.
        """
        settings = [
            # A question for a password would wait for an answer that nobody gives.
            "BatchMode=yes",
            "StrictHostKeyChecking=accept-new",
            f"ConnectTimeout={CONNECT_SECONDS}",
            # A lost host is noticed within a minute, also in the middle of a run.
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
        self,
        host: str,
        command: list[str],
        stdin: str = "",
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host. Raises subprocess.TimeoutExpired."""
        return subprocess.run(
            ["ssh", *self.options, host, shlex.join(command)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def trouble(self, host: str, output: str) -> str:
        """Explains in one line, from its error output, why ssh failed and what to do."""
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        # ssh gives its reason last, behind what a banner or a warning has said.
        last = ["it said nothing", *lines][-1]
        reason = last.split(": ")[-1]
        port = f" -p {self.port}" if self.port else ""

        if "Could not resolve" in output or "Name or service not known" in output:
            return (
                f"host {host} has no IPv4 address here; "
                "add it to /etc/hosts or DNS (an alias of ~/.ssh/config is not enough), or give -H its address"
            )
        if "Permission denied" in output:
            return (
                f"host {host} does not let {getpass.getuser()} in without a password: {reason}; "
                f"ssh-copy-id{port} -i {self.identity_file or '~/.ssh/id_ed25519'} {host} "
                "(no key yet: ssh-keygen -t ed25519), or name the key with -i"
            )
        if "HOST IDENTIFICATION HAS CHANGED" in output or "Host key verification failed" in output:
            name = f"[{host}]:{self.port}" if self.port else host
            return f"host {host} shows another host key than before; if it was reinstalled: ssh-keygen -R {name}"
        if "refused" in output:
            return f"nothing answers ssh on host {host}, port {self.port or 22}; start sshd there, or name its port: -p"
        if "timed out" in output or "No route" in output or "unreachable" in output:
            return f"host {host} cannot be reached ({reason}); is it up, and on this network?"
        return f"ssh to host {host} failed: {last}; try: ssh{port} {host} true"


def request(modules: Sequence[ModuleType], function: str, *arguments: Any) -> str:
    """The input of `python -c LOADER`, which then calls a function of the last module; the others are its imports."""
    # The loader makes an empty package for each, so that imports between the modules find them.
    packages = sorted({"hvtrain", *(module.__name__.rpartition(".")[0] for module in modules)})
    texts = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in modules]
    call = (modules[-1].__name__, function, arguments)
    return json.dumps(([*((package, "") for package in packages), *texts], call))


def answer(output: str) -> Any:
    """The function's result from what `python -c LOADER` printed; None if it is not there.

    The greeting of a login shell may stand before it.
    """
    match = re.search(rf"^{_ANSWER} (.*)$", output, re.MULTILINE)
    return json.loads(match[1]) if match else None


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
        # Here without ssh, which would need an account that may log in to itself.
        on_host.clear(mark, job)
        with ThreadPoolExecutor(_PARALLEL_CALLS) as pool:
            answers = pool.map(lambda host: self.call(host, "clear", mark, job), self.remote)
            return dict(zip(self.remote, answers))

    def count(self, function: str, mark: str, *arguments: int) -> int:
        """Calls a function of on_host here, and then on the other hosts until one has ranks.

        Returns their number.
        """
        # Most launches have ranks here, and then no other host has to be asked.
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
        # ssh got in but Python did not run: the host is not lost, and nothing is known of it.
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
        interface: this host's interface to that network.
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
        # Names are looked up at the same time: a slow name server would add up.
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
    # This host's own versions count if it has a rank; a host that only launches may be of another
    # kind.
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
    # Which of several networks is meant, only the user knows.
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
        fault = "has no IPv4 route to this host; Horovod needs one"
    elif 0 <= facts["files"] < FEWEST_FILES:  # -1 is no limit.
        fault = (
            f"lets a login open {facts['files']} files, too few for MPI, which would wait forever; "
            "raise `ulimit -n` there, in its shell's start files or /etc/security/limits.conf"
        )
    else:
        return facts
    raise RankError(f"host {host} {fault}")
