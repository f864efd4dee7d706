"""The role of each rank in a run with parameter servers (coordinator, parameter server or worker), and its GPU."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from hvtrain.errors import ConfigError
from hvtrain.keras.devices import View, _uuids, choose_gpus, visible_names
from hvtrain.keras.early_exchange import exchange

CHIEF, PS, WORKER = "chief", "ps", "worker"


@dataclass(frozen=True)
class Role:
    """A process's job in the cluster, and its number among those with that job."""

    job: str
    index: int

    def __str__(self) -> str:
        return "coordinator" if self.job == CHIEF else f"{self.job} {self.index}"


def roles_of(size: int, num_ps: int, name: str) -> list[Role]:
    """Roles by rank: the coordinator, then the parameter servers, then the workers. Raises ConfigError.

    >>> [str(role) for role in roles_of(4, 1, "parameter_server")]
    ['coordinator', 'ps 0', 'worker 0', 'worker 1']
    """
    if size < num_ps + 2:
        raise ConfigError(
            f"strategy={name} needs {num_ps + 2} processes or more (a coordinator, {num_ps} ps and a worker), and "
            f"the launcher started {size}; start it with horovodrun -np {num_ps + 3} for two workers, or "
            f"python -m hvtrain launch -np 2 --num-ps {num_ps}"
        )
    servers = [Role(PS, index) for index in range(num_ps)]
    return [Role(CHIEF, 0), *servers, *(Role(WORKER, index) for index in range(size - 1 - num_ps))]


def num_workers(roles: Sequence[Role]) -> int:
    return sum(role.job == WORKER for role in roles)


def choose_places(roles: list[Role], share_gpus: bool) -> tuple[list[str], list[int | None]]:
    """The host and the GPU of each rank; coordinator and parameter servers have no GPU (every process)."""
    visible = len(tf.config.list_physical_devices("GPU"))
    names = visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), visible)
    seen = exchange((socket.gethostname(), names, _uuids(visible)), "hvtrain.places")
    hosts = [host for host, *_ in seen]
    workers = [rank for rank, role in enumerate(roles) if role.job == WORKER]
    views = [
        View(hosts[rank], sum(hosts[other] == hosts[rank] for other in workers if other < rank), *seen[rank][1:])
        for rank in workers
    ]
    chosen = dict(zip(workers, choose_gpus(views, share_gpus)))
    return hosts, [chosen.get(rank) for rank in range(len(roles))]
