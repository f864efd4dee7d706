"""How the ranks find an address of rank 0 that every host reaches: by trying all of them."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hvtrain.system import interfaces
from hvtrain.watchdog import host_processes

Address = tuple[str, int]
Gather = Callable[[Any], list[Any]]
Broadcast = Callable[[Any], Any]

LOOPBACK = "127.0.0.1"
SECONDS_TO_REACH = 2.0
MAX_WAITING = 4096


def agree(rank: int, gather: Gather, broadcast: Broadcast) -> tuple[Address | None, socket.socket | None]:
    """The address, None if no address is reached by all, and on rank 0 the socket that listens there (every rank)."""
    networks = gather(host_processes.network())
    one_host = len(set(networks)) == 1
    listeners = []
    if rank == 0:
        listeners = list(filter(None, map(listening, [LOOPBACK] if one_host else own_addresses())))
    offers: list[Address] = broadcast([listener.getsockname() for listener in listeners])
    if one_host:
        votes = [[True] * len(offers)]
    else:
        # One rank of each host would be enough; but which, if hosts have different numbers of ranks?
        here = networks[0] == host_processes.network()
        with ThreadPoolExecutor(max(1, len(offers))) as pool:
            votes = gather([True] * len(offers) if here else list(pool.map(reaches, offers)))
    chosen = next((at for at in range(len(offers)) if all(vote[at] for vote in votes)), None)
    for at, listener in enumerate(listeners):
        if at != chosen:
            listener.close()
    if chosen is None:
        return None, None
    return offers[chosen], listeners[chosen] if listeners else None


def own_addresses() -> list[str]:
    """This host's IPv4 addresses without loopback's, that of Horovod's interface first."""
    named = os.environ.get("HOROVOD_GLOO_IFACE", "")
    found = sorted(interfaces.all_interfaces(), key=lambda item: item["name"] != named)
    return [item["address"] for item in found if not item["address"].startswith("127.")]


def listening(address: str) -> socket.socket | None:
    """A socket that listens at a free port; None if there is none, for no rank may fail alone here."""
    try:
        return socket.create_server((address, 0), backlog=MAX_WAITING)
    except OSError:
        return None


def reaches(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=SECONDS_TO_REACH).close()
    except OSError:
        return False
    return True
