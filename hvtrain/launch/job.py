"""A job to start, whatever starts it: the command of a rank, the number of ranks, the hosts. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvtrain.errors import ConfigError
from hvtrain.launch.roles import Roles

HOST_NAME = r"\w[\w.-]*"  # ssh would take a dash in front for an option.


@dataclass(frozen=True)
class Host:
    """A machine by its name or address, and its number of ranks."""

    name: str
    slots: int


@dataclass(frozen=True)
class Job:
    """One training. Every rank runs the same command in the same folder.

    Args:
        command: what every rank runs: python -m hvtrain ...
        num_ranks: ranks that train.
        hosts: where they run; empty if a scheduler chooses.
        controller: Horovod's controller, "gloo" or "mpi".
        environment: the variables that ranks get; no other variable of the launcher travels.
        min_ranks: fewest ranks of an elastic job; None: the number of ranks is fixed.
        max_ranks: most ranks of an elastic job.
        num_ps: parameter servers, started with a coordinator on the first host; 0: neither.
    """

    command: tuple[str, ...]
    num_ranks: int
    hosts: tuple[Host, ...] = ()
    controller: str = "gloo"
    environment: Mapping[str, str] = field(default_factory=dict)
    min_ranks: int | None = None
    max_ranks: int | None = None
    num_ps: int = 0

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
        found = re.fullmatch(rf"({HOST_NAME})(?::(\d+))?", part.strip())
        if not found or found[2] == "0":
            raise ConfigError(f"-H {text}: {part!r} is not a host and a number of ranks; write -H s1:4,s2:4")
        hosts.append(Host(found[1], int(found[2] or 1)))
    name, times = Counter(host.name for host in hosts).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"-H {text}: {name} is there twice; name each host once, with all its ranks")
    return tuple(hosts)


def hosts_word(hosts: Iterable[Host]) -> str:
    """The hosts as -H takes them."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def parse_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file with lines such as `s1 slots=4`; # begins a comment. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        text = f"--hostfile {path} cannot be read: {error.strerror}; write lines such as: s1 slots=4"
        raise ConfigError(text) from None
    words = [re.sub(r"\s+slots\s*=\s*", ":", line.partition("#")[0].strip()) for line in lines]
    return parse_hosts(",".join(filter(None, words)))


def used_hosts(places: Iterable[str]) -> tuple[Host, ...]:
    """The hosts that get a rank, each with as many slots as it gets ranks.

    Horovod's launcher on Gloo starts a rank in every slot, whatever -np says.
    """
    return tuple(Host(name, slots) for name, slots in Counter(places).items())


def rank_places(job: Job) -> tuple[str, ...]:
    """Each process's host. Those that train fill the slots in order; the others are on the first host in addition.

    Raises ConfigError.
    """
    places = tuple(host.name for host in job.hosts for _ in range(host.slots))
    if len(places) < job.num_ranks:
        there = f"-H {hosts_word(job.hosts)} has {len(places)}"
        raise ConfigError(f"-np {job.num_ranks} needs as many slots and {there}; lower -np or add hosts")
    return places[:1] * (job.num_processes - job.num_ranks) + places[: job.num_ranks]
