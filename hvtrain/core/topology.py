"""This process's rank among all processes, and the roles of all processes, as plain values."""

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvtrain.errors import ConfigError

# Names of roles: the jobs in TF_CONFIG, which TensorFlow users know.
COORDINATOR = "coordinator"
SERVER = "ps"
WORKER = "worker"
# TensorFlow's other name for the coordinator.
CHIEF = "chief"


@dataclass(frozen=True)
class Topology:
    """Place of one process (rank) in a job; the default is a job with a single process.

    Args:
        rank: 0 ... size - 1, over all hosts.
        size: number of ranks.
        local_rank: 0 ... local_size - 1, on this host.
        local_size: number of ranks on this host.
        host: name of this host.
        weights: proportions of the ranks' shares of the data, by rank; empty: equal shares.

    Raises:
        ValueError: a rank is out of range.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    weights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside 0 ... {self.size - 1}")
        if not 0 <= self.local_rank < self.local_size:
            raise ValueError(f"local rank {self.local_rank} is outside 0 ... {self.local_size - 1}")

    @property
    def is_chief(self) -> bool:
        """True on rank 0, the only rank that writes checkpoints and records, and logs to the console."""
        return self.rank == 0

    def share(self, num_items: int) -> Sequence[int]:
        """Returns the indices of this rank's share of num_items.

        Equal shares are rank, rank + size and so on, and differ in size by at most one item.

        >>> list(Topology(rank=1, size=3).share(8))
        [1, 4, 7]
        >>> [list(Topology(rank, 2, weights=(6, 2)).share(9)) for rank in (0, 1)]
        [[0, 1, 2, 4, 5, 6, 8], [3, 7]]
        """
        period, first, width = self.pattern()
        if width == 1:
            return range(first, num_items, period)
        return [
            i
            for begin in range(first, num_items, period)
            for i in range(begin, min(begin + width, num_items))
        ]

    def share_size(self, num_items: int) -> int:
        """Returns the length of share(num_items), without computing the share.

        >>> [Topology(rank, 2, weights=(6, 2)).share_size(9) for rank in (0, 1)]
        [7, 2]
        """
        period, first, width = self.pattern()
        whole, rest = divmod(num_items, period)
        return whole * width + min(max(rest - first, 0), width)

    def pattern(self) -> tuple[int, int, int]:
        """Returns the repeating pattern (period, first, width) of this rank's share.

        Of each `period` items, the rank has `width`, beginning with item `first`. Weights are
        reduced, which makes the period as short as possible.

        >>> Topology(1, 2, weights=(6, 2)).pattern()
        (4, 3, 1)
        """
        weights = reduced(self.weights) or (1,) * self.size
        return sum(weights), sum(weights[: self.rank]), weights[self.rank]


def reduced(weights: Sequence[int]) -> tuple[int, ...]:
    """Reduces proportions to the smallest whole numbers: (48, 16) gives (3, 1)."""
    divisor = math.gcd(*weights) or 1
    return tuple(weight // divisor for weight in weights)


@dataclass(frozen=True)
class Roles:
    """The processes of a run, by role.

    With parameter servers, rank 0 is the coordinator, ranks 1 to num_ps are servers, and the rest are workers.

    Args:
        num_workers: number of processes that train.
        num_ps: number of parameter servers; 0: none, and no coordinator.
        num_replicas: number of replicas that a single worker trains; 0: each worker is one replica.
    """

    num_workers: int
    num_ps: int = 0
    num_replicas: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """The number of processes by role, in rank order."""
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
        return tuple(
            f"{role} {index}" for role, count in self.counts.items() for index in range(count)
        )

    @property
    def reason(self) -> str:
        """The reason why a launcher that starts only equal ranks cannot start these processes; empty if it can.

        >>> Roles(2, 1).reason
        'needs a coordinator and 1 parameter server(s) besides its 2 worker(s)'
        """
        if self.num_ps:
            return f"needs a coordinator and {self.num_ps} parameter server(s) besides its {self.num_workers} worker(s)"
        if self.num_replicas:
            return "trains all its replicas in one process"
        return ""

    def label(self, rank: int) -> str:
        """Returns the name of a rank in messages.

        >>> Roles(2, 1).label(3), Roles(2).label(1)
        ('worker 1 (rank 3)', 'rank 1')
        """
        # Without servers, a worker's index is its rank. The rank may be out of range, since it is
        # read from a launcher's output.
        if self.num_ps and rank < len(self.names):
            return f"{self.names[rank]} (rank {rank})"
        return f"rank {rank}"

    def rank_of(self, role: str, index: int) -> int:
        """Returns the rank of a process, given its role and its index within the role.

        Raises ConfigError if there is no such process.
        """
        # TF_CONFIG has both names for the coordinator.
        job = COORDINATOR if role == CHIEF else role
        if job not in self.counts:
            raise ConfigError(
                f"--job-name {role} is not a job of this run; choose from {', '.join(self.counts)}"
            )

        role = job
        count = self.counts[role]
        if index >= count:
            indices = "only index 0" if count == 1 else f"indices 0 to {count - 1}"
            advice = f"{'--num-ps' if role == SERVER else '-np'} sets the number of processes"
            if role == COORDINATOR:
                advice = "a run has one coordinator"
            raise ConfigError(
                f"--task-index {index} is out of range: {role} has {indices}; {advice}"
            )
        return self.names.index(f"{role} {index}")


def roles_of(strategy: Mapping[str, Any], num_training: int) -> Roles:
    """Returns the processes of a strategy, which follow from its settings alone.

    A strategy with the setting `num_ps` needs that many parameter servers and a coordinator, in
    addition to the workers. One with `num_replicas` is a single process that trains all replicas. With
    any other strategy every rank is a worker. Raises ConfigError if num_ps is out of range.

    Args:
        strategy: the strategy's settings.
        num_training: number of workers, or of replicas.

    >>> roles_of({"num_ps": 1}, 4)
    Roles(num_workers=4, num_ps=1, num_replicas=0)
    >>> roles_of({"num_replicas": None}, 4)
    Roles(num_workers=1, num_ps=0, num_replicas=4)
    """
    if "num_ps" in strategy:
        num_ps = strategy["num_ps"]
        # A bool is an int to isinstance.
        if type(num_ps) is not int or num_ps < 1:
            raise ConfigError(
                f"strategy.num_ps={num_ps} is out of range; it must be a whole number of at least 1"
            )
        return Roles(num_training, num_ps)

    if "num_replicas" in strategy:
        return Roles(1, num_replicas=num_training)
    return Roles(num_training)
