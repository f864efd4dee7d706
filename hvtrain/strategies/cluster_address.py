"""Addresses of the ranks in a TensorFlow cluster. The ranks exchange them through Horovod, so any launcher will do."""

import os
import socket

from hvtrain.errors import ConfigError, RankError
from hvtrain.keras.early_exchange import exchange
from hvtrain.system import interfaces
from hvtrain.watchdog.starting import LOOPBACK, agree


def refuse_own_cluster(strategy: str) -> None:
    """Raises ConfigError if the environment describes a cluster already."""
    if "TF_CONFIG" in os.environ:
        raise ConfigError(
            f"TF_CONFIG is set, and strategy={strategy} builds its cluster from the launcher's ranks; unset it"
        )


def cluster_addresses(rank: int, strategy: str) -> list[str]:
    """Each rank's address and a free port, by rank: 10.0.0.1:41234 (every rank).

    Call it before TensorFlow has initialized a device. Raises RankError if the ranks do not reach rank 0.
    """
    found, listener = agree(rank, exchange, lambda value: exchange(value)[0])
    if listener:
        listener.close()
    if found is None:
        raise RankError(f"strategy={strategy}: no address of rank 0 can be reached from all ranks")
    own = LOOPBACK if found[0] == LOOPBACK else interfaces.address_towards(found[0])
    with socket.create_server((own, 0)) as free:
        return exchange(f"{own}:{free.getsockname()[1]}")
