"""A job to start, whatever starts it: its hosts, where its processes go, and the launcher's command line. Pure."""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvtrain.core.topology import Roles
from hvtrain.errors import ConfigError
from hvtrain.launch.on_host import MARK
from hvtrain.launch.remote_hosts import URI_FILE, HostNetwork, Ssh

HOST_NAME = r"\w[\w.-]*"  # ssh would take a leading dash for an option.

# Until a rank runs on any host. --start-timeout sets it.
SECONDS_TO_BEGIN = 300.0

# Open MPI then notices a lost host or a cut network after 40 to 45 s: after the watchdog, which
# explains it better. By default mpirun waits for that host for a quarter of an hour.
MPI_NOTICES_CUTS = [
    *("-mca", "oob_tcp_keepalive_time", "5"),
    *("-mca", "oob_tcp_keepalive_intvl", "1"),
    *("-mca", "oob_tcp_keepalive_probes", "40"),
]


@dataclass(frozen=True)
class Host:
    """A machine by its name or address, and its number of ranks."""

    name: str
    slots: int


@dataclass(frozen=True)
class Job:
    """One training, and how its ranks are started.

    Every rank runs the same command in the same folder.

    Args:
        command: what every rank runs: python -m hvtrain ...
        num_ranks: ranks that train.
        hosts: where they run; empty if a scheduler chooses.
        controller: Horovod's controller, "gloo" or "mpi".
        environment: the variables that ranks get; no other variable of the launcher travels.
        min_ranks: fewest ranks of an elastic job; None: the number of ranks is fixed.
        max_ranks: most ranks of an elastic job.
        num_ps: parameter servers, started with a coordinator on the first host; 0: neither.
        ssh: how hosts are reached.
        mpirun: start ranks by MPI's own launcher instead of Horovod's.
        interfaces: names joined by commas, instead of those that the launcher chooses.
        discovery_script: prints the hosts of an elastic job.
        seconds_to_begin: how long to wait for the first rank.
    """

    command: tuple[str, ...]
    num_ranks: int
    hosts: tuple[Host, ...] = ()
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


def given(words: Iterable[str]) -> set[str]:
    """The names of the options on a launcher's command line.

    Raises ConfigError for one that came twice, of which a parser takes the last and says nothing.
    """
    counts = Counter(word.partition("=")[0] for word in words if word.startswith("-"))
    for name, times in counts.items():
        if times > 1 and name != "--env":
            raise ConfigError(f"{name} came {times} times; give it once")
    return {*counts}


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of -H s1:4,s2:4; a host without a number has one slot. Raises ConfigError."""
    hosts = []
    for part in text.split(","):
        match = re.fullmatch(rf"({HOST_NAME})(?::(\d+))?", part.strip())
        if not match or match[2] == "0":
            raise ConfigError(f"-H {text}: {part!r} is not a host and a number of ranks; write -H s1:4,s2:4")
        hosts.append(Host(match[1], int(match[2] or 1)))

    # Two numbers of slots for one host would have to be added up or told apart.
    name, times = Counter(host.name for host in hosts).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"-H {text}: {name} is there twice; name each host once, with all its ranks")
    return tuple(hosts)


def parse_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file with lines such as `s1 slots=4`; # begins a comment.

    Raises ConfigError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"--hostfile {path} cannot be read: {error.strerror}; write lines such as: s1 slots=4"
        ) from None

    # In the form of -H, so that both are checked by the same rules.
    entries = [re.sub(r"\s+slots\s*=\s*", ":", line.partition("#")[0].strip()) for line in lines]
    return parse_hosts(",".join(filter(None, entries)))


def hosts_option(hosts: Iterable[Host]) -> str:
    """The hosts as -H takes them."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def used_hosts(rank_hosts: Iterable[str]) -> tuple[Host, ...]:
    """The hosts that get a rank, each with as many slots as it gets ranks.

    Horovod's launcher on Gloo starts a rank in every slot, whatever -np says.
    """
    return tuple(Host(name, slots) for name, slots in Counter(rank_hosts).items())


def place_ranks(job: Job) -> tuple[str, ...]:
    """The host of each process.

    Workers fill the slots in order; the others are added on the first host.

    Raises ConfigError if there are too few slots.
    """
    slots = tuple(host.name for host in job.hosts for _ in range(host.slots))
    if len(slots) < job.num_ranks:
        raise ConfigError(
            f"-np {job.num_ranks} needs as many slots and -H {hosts_option(job.hosts)} has {len(slots)}; "
            "lower -np or add hosts"
        )
    # The coordinator and parameter servers are extra and need no slots (--num-ps).
    return slots[:1] * (job.num_processes - job.num_ranks) + slots[: job.num_ranks]


def launcher_command(
    job: Job,
    network: HostNetwork | None = None,
    folder: Path | None = None,
) -> list[str]:
    """The command that starts the job's ranks from this host.

    Args:
        job: what to start.
        network: of the hosts; mpirun has to be told, horovodrun finds it itself.
        folder: of the launch, as Launch takes it; None: nobody supervises the command from outside.
    """
    rank_command = with_own_python(job.command)
    if job.mpirun:
        line = _mpirun_command(job, network)
        if folder:
            line += ["--report-uri", str(folder / URI_FILE), "-x", MARK]
        return [*line, *rank_command]

    # Without a supervisor outside, the command is horovodrun, which supervises itself.
    line = [f"{sys.prefix}/bin/horovodrun"]
    if folder:
        line = [sys.executable, "-m", "hvtrain.launch.horovod_launcher"]

    hosts = ""
    # The hosts of an elastic job are not known before its script has run.
    if not job.discovery_script:
        hosts = hosts_option(_hosts_of_processes(job))
    values = {
        "-np": job.num_processes,
        "--min-np": job.min_ranks,
        "--max-np": job.max_ranks,
        "--host-discovery-script": job.discovery_script,
        "-H": hosts,
        "--ssh-port": job.ssh.port,
        "--ssh-identity-file": job.ssh.identity_file,
        "--network-interfaces": job.interfaces,
    }
    line.append(f"--{job.controller}")
    for name, value in values.items():
        # What is not set is left to the launcher.
        if value:
            line += [name, str(value)]
    return [*line, *rank_command]


def with_own_python(command: Sequence[str]) -> list[str]:
    """Replaces a leading `python` by this process's interpreter.

    A rank's PATH may lead to another one.
    """
    program, *arguments = command
    if program == "python":
        program = sys.executable
    return [program, *arguments]


def _mpirun_command(job: Job, network: HostNetwork | None) -> list[str]:
    hosts = _hosts_of_processes(job)
    line = [
        f"{sys.prefix}/bin/mpirun",
        "-np",
        str(job.num_processes),
        "-H",
        hosts_option(hosts),
        "--tag-output",
        # As Horovod does: its background thread must not share one core with the rank's others.
        "--bind-to",
        "none",
        "--map-by",
        "slot",
        "-mca",
        "pml",
        "ob1",
        "-mca",
        "btl",
        "^openib",
    ]
    # Open MPI refuses to run as root without it; in a container ranks often are root.
    if os.geteuid() == 0:
        line.append("--allow-run-as-root")

    # What the user names wins over what was found.
    if job.interfaces:
        line += mpi_options(job.interfaces, job.interfaces, job.ssh)
    elif network:
        line += mpi_options(network.subnet, ",".join(network.interfaces), job.ssh)

    # Above 64 hosts Open MPI would connect from host to host, and none has a key for the next.
    line += [
        "-mca",
        "plm_rsh_no_tree_spawn",
        "1",
        "-mca",
        "plm_rsh_num_concurrent",
        str(len(hosts)),
    ]
    # By name alone: a value on a command line is visible to every user of the host.
    for name in sorted(job.environment):
        line += ["-x", name]
    return line


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


def _hosts_of_processes(job: Job) -> tuple[Host, ...]:
    """The hosts, with a slot for each of their processes; ranks of an elastic job may take any slot."""
    return job.hosts if job.is_elastic else used_hosts(place_ranks(job))
