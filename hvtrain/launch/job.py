"""A job: its hosts, the placement of its processes, and the launcher's command line.

Starts nothing. The same Job describes a launch by Horovod's launcher, by mpirun, or on a cluster.
"""

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hvtrain.core.topology import Roles
from hvtrain.errors import ConfigError
from hvtrain.launch.on_host import MARK
from hvtrain.launch.remote_hosts import URI_FILE, HostNetwork, Ssh

HOST_NAME = r"\w[\w.-]*"  # No leading dash: ssh would take such a name as an option.

# The first rank must run on some host within this time. --start-timeout sets it.
SECONDS_TO_BEGIN = 300.0

# With these options, Open MPI notices a lost host or a cut network after 40 to 45 s: later than the
# watchdog, whose message is better. By default, mpirun waits a quarter of an hour for such a host.
MPI_KEEPALIVE_OPTIONS = shlex.split(
    "-mca oob_tcp_keepalive_time 5 -mca oob_tcp_keepalive_intvl 1 -mca oob_tcp_keepalive_probes 40"
)


@dataclass(frozen=True)
class Host:
    """A machine, by name or address, and its number of slots for ranks."""

    name: str
    slots: int


Hosts = tuple[Host, ...]


@dataclass(frozen=True)
class Job:
    """A training job, and how to start its ranks.

    Every rank runs the same command in the same folder.

    Args:
        command: the command of every rank: python -m hvtrain ...
        num_ranks: the number of ranks that train.
        hosts: where they run; empty if a scheduler chooses.
        controller: Horovod's controller, "gloo" or "mpi".
        environment: environment variables of the ranks; no others are sent to them.
        min_ranks: minimum number of ranks of an elastic job; None: the number of ranks is fixed.
        max_ranks: maximum number of ranks of an elastic job.
        num_ps: number of parameter servers, which are started on the first host, along with a
            coordinator; 0: neither servers nor a coordinator.
        ssh: how to reach the hosts.
        mpirun: True to start ranks with MPI's own launcher instead of Horovod's.
        interfaces: comma-separated network interfaces; None: the launcher chooses.
        discovery_script: a script that prints the hosts of an elastic job.
        seconds_to_begin: how long to wait until a rank begins.
    """

    command: tuple[str, ...]
    num_ranks: int
    hosts: Hosts = ()
    controller: str = "gloo"
    environment: Mapping[str, str] = field(default_factory=dict)
    min_ranks: int | None = None
    max_ranks: int | None = None
    num_ps: int = 0
    ssh: Ssh = field(default_factory=Ssh)
    mpirun: bool = False
    interfaces: str | None = None
    discovery_script: str | None = None
    seconds_to_begin: float = SECONDS_TO_BEGIN

    @property
    def is_elastic(self) -> bool:
        return self.min_ranks is not None

    @property
    def roles(self) -> Roles:
        return Roles(self.num_ranks, self.num_ps)

    @property
    def num_processes(self) -> int:
        return len(self.roles.names)


def option_names(arguments: Iterable[str]) -> set[str]:
    """Returns the names of the options on a launcher's command line.

    Raises ConfigError for a repeated option, except --env: a parser would silently take the last.
    """
    counts = Counter(
        argument.partition("=")[0] for argument in arguments if argument.startswith("-")
    )
    for name, times in counts.items():
        if times > 1 and name != "--env":
            raise ConfigError(f"{name} was given {times} times; give it once")
    return {*counts}


def parse_hosts(text: str, file: Path | None = None) -> Hosts:
    """Parses hosts in the form of -H, s1:4,s2:4; a host without a number has one slot.

    Args:
        text: the hosts.
        file: the hostfile that they come from, for messages; None: they come from -H.

    Raises:
        ConfigError: the text has another form, or names a host twice.
    """
    source = f"--hostfile {file}" if file else f"-H {text}"
    advice = "lines such as: s1 slots=4" if file else "-H s1:4,s2:4"
    hosts = []
    for part in text.split(","):
        match = re.fullmatch(rf"({HOST_NAME})(?::(\d+))?", part.strip())
        if not match or match[2] == "0":
            raise ConfigError(
                f"{source}: {part!r} is not a host and a number of ranks; write {advice}"
            )
        hosts.append(Host(match[1], int(match[2] or 1)))

    # If a host had two numbers of slots, it would be unclear whether to add them.
    name, times = Counter(host.name for host in hosts).most_common(1)[0]
    if times > 1:
        raise ConfigError(
            f"{source}: {name} is listed {times} times; name each host once, with all its ranks"
        )
    return tuple(hosts)


def parse_hostfile(path: Path) -> Hosts:
    """Reads the hosts from a file with lines such as `s1 slots=4`; # begins a comment.

    Raises ConfigError if the file cannot be read, or as parse_hosts does.
    """
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"--hostfile {path} cannot be read: {error.strerror}; name a file with lines such as: s1 slots=4"
        ) from None

    # Converted to the form of -H, so that the same checks apply.
    entries = [re.sub(r"\s+slots\s*=\s*", ":", line.partition("#")[0].strip()) for line in lines]
    return parse_hosts(",".join(filter(None, entries)), path)


def hosts_option(hosts: Iterable[Host]) -> str:
    """Formats the hosts as the value of -H."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def used_hosts(rank_hosts: Iterable[str]) -> Hosts:
    """Returns the hosts that have ranks, each with exactly as many slots as ranks.

    With Gloo, Horovod's launcher starts a rank in every slot, whatever -np says.
    """
    return tuple(Host(name, slots) for name, slots in Counter(rank_hosts).items())


def place_ranks(job: Job) -> tuple[str, ...]:
    """Returns the name of each process's host, in the order of job.roles.

    Workers fill the slots in order; the other processes go on the first host.

    Raises ConfigError if there are too few slots.
    """
    slots = tuple(host.name for host in job.hosts for _ in range(host.slots))
    if len(slots) < job.num_ranks:
        raise ConfigError(
            f"-np {job.num_ranks} needs as many slots and -H {hosts_option(job.hosts)} has {len(slots)}; "
            "lower -np or add hosts"
        )
    # The coordinator and the parameter servers (--num-ps) need no slots.
    num_others = job.num_processes - job.num_ranks
    return slots[:1] * num_others + slots[: job.num_ranks]


def launcher_command(
    job: Job, network: HostNetwork | None = None, folder: Path | None = None
) -> list[str]:
    """Returns the command that starts the job's ranks from this host.

    Args:
        job: the job to start.
        network: the hosts' network, for mpirun; horovodrun finds it itself.
        folder: the launch's folder (see supervisor.Launch); None: nothing supervises the command.
    """
    rank_command = with_own_python(job.command)
    if job.mpirun:
        command = _mpirun_command(job, network)
        if folder:
            command += ["--report-uri", str(folder / URI_FILE), "-x", MARK, "-x", "SPT_NOENV"]
        return [*command, *rank_command]

    # Without a supervisor, the command is horovodrun, which supervises its launch itself.
    command = [f"{sys.prefix}/bin/horovodrun"]
    if folder:
        command = [sys.executable, "-m", "hvtrain.launch.horovod_launcher"]

    values = {
        "-np": job.num_processes,
        "--min-np": job.min_ranks,
        "--max-np": job.max_ranks,
        "--host-discovery-script": job.discovery_script,
        # Empty for an elastic job, whose hosts are unknown until its script has run.
        "-H": hosts_option(_hosts_of_processes(job)),
        "--ssh-port": job.ssh.port,
        "--ssh-identity-file": job.ssh.identity_file,
        "--network-interfaces": job.interfaces,
    }
    command.append(f"--{job.controller}")
    for name, value in values.items():
        # Unset values are left to the launcher.
        if value:
            command += [name, str(value)]
    return [*command, *rank_command]


def with_own_python(command: Sequence[str]) -> list[str]:
    """Replaces a leading `python` with this process's interpreter.

    A rank's PATH may lead to a different one.
    """
    program, *arguments = command
    if program == "python":
        program = sys.executable
    return [program, *arguments]


def _mpirun_command(job: Job, network: HostNetwork | None) -> list[str]:
    hosts = _hosts_of_processes(job)
    command = [
        f"{sys.prefix}/bin/mpirun",
        *f"-np {job.num_processes} -H {hosts_option(hosts)} --tag-output".split(),
        # As in Horovod's launcher: Horovod's background thread must not share one core with other
        # threads.
        *shlex.split("--bind-to none --map-by slot -mca pml ob1 -mca btl ^openib"),
    ]
    # Otherwise, Open MPI refuses to run as root, and ranks in a container often do.
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")

    # The user's choice overrides the detected network.
    if job.interfaces:
        command += mpi_options(job.interfaces, job.interfaces, job.ssh)
    elif network:
        command += mpi_options(network.subnet, network.interfaces, job.ssh)

    # Above 64 hosts, Open MPI would start its daemons from host to host, but the hosts have no ssh
    # keys for each other.
    command += f"-mca plm_rsh_no_tree_spawn 1 -mca plm_rsh_num_concurrent {len(hosts)}".split()
    # Names only: a value on a command line is visible to every user of the host.
    for name in sorted(job.environment):
        command += ["-x", name]
    return command


def mpi_options(subnet: str, interface_names: str, ssh: Ssh) -> list[str]:
    """Returns Open MPI's options to start ranks on the hosts and to let them communicate.

    If no network is named, Open MPI tries an interface that has the same address everywhere
    (docker0), and waits forever.

    Args:
        subnet: the network for Open MPI. Interfaces work too, but their names may differ from host
            to host.
        interface_names: the interfaces for NCCL, unless the user has set NCCL_SOCKET_IFNAME.
        ssh: how to reach the hosts.
    """
    return [
        *start_options(subnet, ssh),
        *("-mca", "btl_tcp_if_include", subnet),
        *("-x", f"NCCL_SOCKET_IFNAME={os.environ.get('NCCL_SOCKET_IFNAME', interface_names)}"),
    ]


def start_options(networks: str, ssh: Ssh) -> list[str]:
    """Returns Open MPI's options to start ranks by ssh, over these interfaces or subnets."""
    return [
        *("--prefix", sys.prefix),
        *("-mca", "oob_tcp_if_include", networks),
        *("-mca", "plm_rsh_args", " ".join(ssh.options)),
        *MPI_KEEPALIVE_OPTIONS,
    ]


def _hosts_of_processes(job: Job) -> Hosts:
    """Returns the hosts with a slot for each process; those of an elastic job unchanged."""
    # Ranks of an elastic job may take any slot.
    if job.is_elastic:
        return job.hosts
    return used_hosts(place_ranks(job))


class ClusterKind:
    """A kind of cluster. Each subclass is a dataclass of its settings, cluster.SETTING=VALUE.

    Attributes:
        kind: its name.
        about: one line of help.
        files: names of the files to submit.
        submit: the command that submits the files; {} stands for their folder.
        program: the program that the command needs; "": its first word.
        no_elastic: why --min-np is not supported, and what to do instead; "": it is supported.
        no_hosts: the same for -H.
        starts_servers: True if it can start parameter servers and a coordinator.
        starts_replicas: True if it can start one process for several GPUs.
    """

    kind: ClassVar[str]
    about: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    submit: ClassVar[str]
    program = ""
    no_elastic = ""
    no_hosts = ""
    starts_servers = False
    starts_replicas = False

    def values(self, job: Job) -> dict[str, Any]:
        """Returns the values that the templates need besides job and settings.

        Raises ConfigError for a job that cannot run on this kind of cluster.
        """
        raise NotImplementedError

    def check_texts(self, pattern: str, needed: str, *names: str) -> None:
        """Raises ConfigError if a setting does not match the pattern; null is always valid.

        Args:
            pattern: a regular expression for the whole value.
            needed: the end of the message after "is not": what is valid, and what to write.
            *names: the settings to check.
        """
        for name in names:
            value = getattr(self, name)
            if value is not None and not re.fullmatch(pattern, value):
                raise ConfigError(f"cluster.{name}={value} is not {needed}")
