"""A job to start, whatever starts it: its hosts, the role of each process, and the launcher's command line.

Pure.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvtrain.errors import ConfigError
from hvtrain.launch.on_host import MARK
from hvtrain.launch.remote_hosts import URI_FILE, HostNetwork, Ssh

HOST_NAME = r"\w[\w.-]*"  # ssh would take a leading dash for an option.

# The jobs of TF_CONFIG, which users of TensorFlow know.
COORDINATOR, SERVER, WORKER = "coordinator", "ps", "worker"
# Until a rank runs on any host. --start-timeout sets it.
SECONDS_TO_BEGIN = 300.0
CHIEF = "chief"  # TensorFlow's name for the coordinator in TF_CONFIG.

# Open MPI then notices a lost host or a cut network after 40 to 45 s: after the watchdog, which
# explains it better. By default mpirun waits for that host for a quarter of an hour.
MPI_NOTICES_CUTS = [
    *("-mca", "oob_tcp_keepalive_time", "5"),
    *("-mca", "oob_tcp_keepalive_intvl", "1"),
    *("-mca", "oob_tcp_keepalive_probes", "40"),
]


@dataclass(frozen=True)
class Roles:
    """The processes of a run.

    Rank 0 is the coordinator, ranks 1 to num_ps are parameter servers, the rest workers.

    Args:
        num_workers: processes that train.
        num_ps: parameter servers; 0: none, and no coordinator.
        num_replicas: replicas that the only worker trains; 0: each worker is one.
    """

    num_workers: int
    num_ps: int = 0
    num_replicas: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """The number of processes of each role that the run has, in the order of their ranks."""
        # Without parameter servers there is no coordinator, and rank 0 is worker 0.
        counts = {COORDINATOR: int(self.num_ps > 0), SERVER: self.num_ps, WORKER: self.num_workers}
        return {role: count for role, count in counts.items() if count}

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each rank's process.

        >>> Roles(2, 1).names
        ('coordinator 0', 'ps 0', 'worker 0', 'worker 1')
        >>> Roles(2).names
        ('worker 0', 'worker 1')
        """
        return tuple(f"{role} {index}" for role, count in self.counts.items() for index in range(count))

    @property
    def reason(self) -> str:
        """The reason why launchers that start equal ranks cannot start these processes; empty if they can.

        >>> Roles(2, 1).reason
        'needs a coordinator and 1 parameter server(s) besides its 2 worker(s)'
        """
        if self.num_ps:
            return f"needs a coordinator and {self.num_ps} parameter server(s) besides its {self.num_workers} worker(s)"
        if self.num_replicas:
            return "trains all its replicas in one process"
        return ""

    def label(self, rank: int) -> str:
        """A rank as messages name it.

        >>> Roles(2, 1).label(3), Roles(2).label(1)
        ('worker 1 (rank 3)', 'rank 1')
        """
        # Without servers a rank and the index of its worker are the same number.
        if self.num_ps and rank < len(self.names):
            return f"{self.names[rank]} (rank {rank})"
        return f"rank {rank}"

    def rank_of(self, role: str, index: int) -> int:
        """The rank of a process, by its role and its index there.

        Raises ConfigError if there is no such process.
        """
        # TF_CONFIG has both names for it.
        if role == CHIEF:
            role = COORDINATOR
        if role not in self.counts:
            raise ConfigError(f"--job-name {role} is not a job of this run; it has {', '.join(self.counts)}")

        count = self.counts[role]
        if index >= count:
            indices = "0" if count == 1 else f"0 to {count - 1}"
            option = "--num-ps" if role == SERVER else "-np"
            raise ConfigError(
                f"--task-index {index} is out of range: {role} has {indices}; {option} says how many there are"
            )
        return self.names.index(f"{role} {index}")


def roles_of(strategy: Mapping[str, Any], num_training: int) -> Roles:
    """The processes of a strategy, known by its settings alone. Raises ConfigError.

    A strategy with the setting `num_ps` needs that many parameter servers and a coordinator,
    besides the workers. One with `num_replicas` is one process that trains all replicas. Under
    other strategies every rank is a worker.

    >>> roles_of({"num_ps": 1}, 4)
    Roles(num_workers=4, num_ps=1, num_replicas=0)
    >>> roles_of({"num_replicas": None}, 4)
    Roles(num_workers=1, num_ps=0, num_replicas=4)
    """
    if "num_ps" in strategy:
        num_ps = strategy["num_ps"]
        # In Python True is an int.
        if isinstance(num_ps, bool) or not isinstance(num_ps, int) or num_ps < 1:
            raise ConfigError(f"strategy.num_ps={num_ps} is out of range; it must be a whole number of at least 1")
        return Roles(num_training, num_ps)

    if "num_replicas" in strategy:
        return Roles(1, num_replicas=num_training)
    return Roles(num_training)


@dataclass(frozen=True)
class Host:
    """A machine by its name or address, and its number of ranks."""

    name: str
    slots: int


@dataclass(frozen=True)
class Job:
    """One training, and how its ranks are started. Every rank runs the same command in the same folder.

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
        network: what joins the hosts; mpirun is told it, horovodrun finds it itself.
        folder: the launch's, as Launch takes it; None: nobody supervises the command from outside.
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
    """The command with this process's interpreter in place of its first word, if that is `python`.

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
    ]
    # As Horovod does: its background thread must not share one core with the rank's others.
    line += [
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
