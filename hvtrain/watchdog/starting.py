"""Starts a watchdog on every rank.

By trying them all, the ranks find an address of rank 0 that every host reaches.
"""

import logging
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hvtrain.system import host_facts
from hvtrain.watchdog.connections import WireError
from hvtrain.watchdog.hub import Hub
from hvtrain.watchdog.member import Member, Watchdog
from hvtrain.watchdog.processes import machine_id
from hvtrain.watchdog.progress import Marks, Progress, Rules

Address = tuple[str, int]
Gather = Callable[[Any], list[Any]]
Broadcast = Callable[[Any], Any]

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
# Rank 0 reads so many ranks' beats in a second; with more ranks each sends fewer.
MAX_BEATS_PER_SECOND = 256
MAX_BEAT_SECONDS = 4.0
MIN_BEAT_SECONDS = 0.05
LOOPBACK = "127.0.0.1"
SECONDS_TO_REACH = 2.0
MAX_WAITING = 4096


def start(
    rank: int,
    size: int,
    host: str,
    abort_seconds: float,
    gather: Gather,
    broadcast: Broadcast,
    marks: Callable[[], Marks],
    calls_launcher: bool = True,
    survives_loss: bool = False,
) -> Watchdog:
    """A watchdog over all ranks, or one that watches nobody if rank 0 wants none (every rank).

    Args:
        rank: this one's.
        size: the number of ranks.
        host: as messages name this rank's host.
        abort_seconds: how long the run may make no progress; rank 0's counts; 0: no watchdog, no
            port.
        gather: returns every rank's value to all ranks.
        broadcast: returns rank 0's value to all ranks.
        marks: see Progress.
        calls_launcher: check whether Gloo's launcher is there; one rank of a host is enough.
        survives_loss: an elastic job goes on without a rank that is gone or fails, and starts
            another watchdog.
    """
    # Rank 0's counts for all: what follows is collective.
    limit = broadcast(abort_seconds)
    if not limit or size == 1:
        return Watchdog()

    address, listener = agree(rank, gather, broadcast)
    # New for each watchdog, so that a rank of an earlier one is a stranger.
    token = broadcast(secrets.token_hex(32))
    progress = Progress(marks)
    if address is None:
        log.warning("no watchdog: the ranks reach no address of rank 0 that all of them share")
        return Watchdog(progress)

    rules = Rules(limit, beat_seconds(size, limit), survives_loss)
    member = Member(rank, host, rules, progress, calls_launcher)
    if listener:
        member.hub_thread = Hub(listener, token, size, member).thread
    try:
        member.join(address, token)
    except (OSError, WireError) as error:
        log.warning("no watchdog on rank %d on %s: %s", rank, host, error)
        return Watchdog(progress)
    return member


def beat_seconds(size: int, limit: float) -> float:
    """Seconds between two beats of a rank: at most a twentieth of the limit, so that silence is noticed well before."""
    seconds = BEAT_SECONDS * max(1.0, size / MAX_BEATS_PER_SECOND)
    return max(MIN_BEAT_SECONDS, min(MAX_BEAT_SECONDS, limit / 20, seconds))


def agree(rank: int, gather: Gather, broadcast: Broadcast) -> tuple[Address | None, socket.socket | None]:
    """Finds an address of rank 0 that all ranks reach (every rank).

    Returns the address, None if there is none; and on rank 0 the socket that listens there.
    """
    networks = gather(machine_id("net"))
    is_one_host = len(set(networks)) == 1
    listeners: list[socket.socket] = []
    if rank == 0:
        # On one host nothing outside may reach the port.
        addresses = [LOOPBACK] if is_one_host else _own_addresses()
        listeners = list(filter(None, map(listen, addresses)))

    offers: list[Address] = broadcast([listener.getsockname() for listener in listeners])
    if is_one_host:
        votes = [[True] * len(offers)]
    else:
        # One rank of each host would be enough; but which, if their numbers of ranks differ?
        own_vote = [True] * len(offers)
        if networks[0] != machine_id("net"):
            with ThreadPoolExecutor(max(1, len(offers))) as pool:
                own_vote = list(pool.map(reaches, offers))
        votes = gather(own_vote)

    # The first that all reach: it is of Horovod's own interface if that will do.
    chosen = next((index for index in range(len(offers)) if all(vote[index] for vote in votes)), None)
    for index, listener in enumerate(listeners):
        if index != chosen:
            listener.close()
    if chosen is None:
        return None, None
    return offers[chosen], listeners[chosen] if listeners else None


def _own_addresses() -> list[str]:
    """This host's addresses without loopback's, that of Horovod's interface first."""
    first = os.environ.get("HOROVOD_GLOO_IFACE", "")
    items = sorted(host_facts.all_interfaces(), key=lambda item: item["name"] != first)
    return [item["address"] for item in items if not item["address"].startswith("127.")]


def listen(address: str) -> socket.socket | None:
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
