"""The processes of a run and their roles, from the settings of its strategy alone. Pure.

A strategy with the setting `num_ps` needs that many parameter servers and a coordinator, besides the workers that
train. One with `num_replicas` is one process that trains all replicas. Under other strategies every rank is a worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvtrain.errors import ConfigError

COORDINATOR, SERVER, WORKER = "coordinator", "ps", "worker"
_ALSO = {"chief": COORDINATOR}  # TensorFlow's name for it in TF_CONFIG.


@dataclass(frozen=True)
class Roles:
    """Rank 0 is the coordinator, ranks 1 to num_ps are parameter servers, the others workers.

    num_ps: 0: none, and no coordinator. num_replicas: trained by the only worker; 0: each worker is one.
    """

    num_workers: int
    num_ps: int = 0
    num_replicas: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each rank's process.

        >>> Roles(2, 1).names
        ('coordinator 0', 'ps 0', 'worker 0', 'worker 1')
        >>> Roles(2).names
        ('worker 0', 'worker 1')
        """
        counts = {COORDINATOR: int(self.num_ps > 0), SERVER: self.num_ps, WORKER: self.num_workers}
        return tuple(f"{job} {index}" for job, count in counts.items() for index in range(count))

    @property
    def reason(self) -> str:
        """Why launchers that start equal ranks cannot start these processes; empty if they can.

        >>> Roles(2, 1).reason
        'needs a coordinator and 1 parameter server(s) besides its 2 worker(s)'
        """
        if self.num_ps:
            return f"needs a coordinator and {self.num_ps} parameter server(s) besides its {self.num_workers} worker(s)"
        return "trains all its replicas in one process" if self.num_replicas else ""

    def label(self, rank: int) -> str:
        """A rank as messages name it.

        >>> Roles(2, 1).label(3), Roles(2).label(1)
        ('worker 1 (rank 3)', 'rank 1')
        """
        return f"{self.names[rank]} (rank {rank})" if self.num_ps and rank < len(self.names) else f"rank {rank}"

    def rank_of(self, job: str, index: int) -> int:
        """The rank of a process, by its job and its index there. Raises ConfigError if there is no such process."""
        job = _ALSO.get(job, job)
        known = {name.split()[0]: 0 for name in self.names}
        for name in self.names:
            known[name.split()[0]] += 1
        if job not in known:
            listed = [*known, *(also for also, name in _ALSO.items() if name in known)]
            raise ConfigError(f"--job-name {job} is not a job of this run; it has {', '.join(listed)}")
        if index >= known[job]:
            fix = "--num-ps" if job == SERVER else "-np"
            last = f"0 to {known[job] - 1}" if known[job] > 1 else "0"
            raise ConfigError(f"--task-index {index} is out of range: {job} has {last}; {fix} says how many there are")
        return self.names.index(f"{job} {index}")


def roles_of(strategy: Mapping[str, Any], number: int) -> Roles:
    """The processes of a strategy with these settings; number: how many train. Raises ConfigError.

    >>> roles_of({"num_ps": 1}, 4)
    Roles(num_workers=4, num_ps=1, num_replicas=0)
    >>> roles_of({"num_replicas": None}, 4)
    Roles(num_workers=1, num_ps=0, num_replicas=4)
    """
    if "num_ps" in strategy:
        num_ps = strategy["num_ps"]
        if isinstance(num_ps, bool) or not isinstance(num_ps, int) or num_ps < 1:
            raise ConfigError(f"strategy.num_ps={num_ps} is out of range; it must be a whole number of at least 1")
        return Roles(number, num_ps)
    return Roles(1, num_replicas=number) if "num_replicas" in strategy else Roles(number)
