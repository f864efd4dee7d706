"""Starts a watchdog on every rank.

The ranks try all addresses of rank 0 to find one that every host can reach.
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

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
# With more ranks than this, each rank sends fewer beats, so that rank 0 reads at most this many per
# second; but each rank sends at least one in MAX_BEAT_SECONDS.
MAX_BEATS_PER_SECOND = 256
MAX_BEAT_SECONDS = 4.0
MIN_BEAT_SECONDS = 0.05
LOOPBACK = "127.0.0.1"
SECONDS_TO_REACH = 2.0
LISTEN_BACKLOG = 4096


def start(
    rank: int,
    size: int,
    host: str,
    abort_seconds: float,
    gather: Gather,
    marks: Callable[[], Marks],
    calls_launcher: bool = True,
    survives_loss: bool = False,
) -> Watchdog:
    """Starts a watchdog over all ranks, or returns one that watches nothing (call on every rank).

    Args:
        rank: the rank of this process.
        size: the number of ranks.
        host: the name of this rank's host in messages.
        abort_seconds: how long the run may make no progress; 0: no watchdog and no open port. All ranks
            use rank 0's value.
        gather: returns every rank's value to all ranks.
        marks: see Progress.
        calls_launcher: True to check whether Gloo's launcher is still running; one rank per host is enough.
        survives_loss: True for an elastic job, which continues without a rank that is lost or fails, and
            starts a new watchdog.
    """
    # The same on all ranks, since either all or none must make the collective calls below.
    limit = gather(abort_seconds)[0]
    if not limit or size == 1:
        return Watchdog()

    address, listener = agree_on_address(rank, gather)
    # Each watchdog has a new token, so that ranks of an earlier one cannot join it.
    token = gather(secrets.token_hex(32))[0]
    if address is None:
        log.warning(
            "no watchdog: no address of rank 0 can be reached from all ranks; check the firewall of its host"
        )
        return Watchdog()

    rules = Rules(limit, beat_seconds(size, limit), survives_loss)
    member = Member(rank, host, rules, Progress(marks), calls_launcher)
    if listener:
        member.hub_thread = Hub(listener, token, size, member).thread
    try:
        member.join(address, token)
    except (OSError, WireError) as error:
        log.warning(f"no watchdog on rank {rank} on {host}: {error}")
        return Watchdog()
    return member


def beat_seconds(size: int, limit: float) -> float:
    """Returns the seconds between two beats of a rank.

    They are at most limit / 20, but at least MIN_BEAT_SECONDS, so that a rank usually counts as silent
    (BEATS_UNTIL_SILENT) long before the limit.
    """
    seconds = BEAT_SECONDS * max(1.0, size / MAX_BEATS_PER_SECOND)
    return max(MIN_BEAT_SECONDS, min(MAX_BEAT_SECONDS, limit / 20, seconds))


def agree_on_address(rank: int, gather: Gather) -> tuple[Address | None, socket.socket | None]:
    """Finds an address of rank 0 that all ranks can reach (call on every rank).

    Returns:
        The address, or None if there is none; and on rank 0 the socket that listens there, else None.
    """
    networks = gather(machine_id("net"))
    listeners = []
    if rank == 0:
        # On a single host the port need not be reachable from outside.
        addresses = [LOOPBACK] if len(set(networks)) == 1 else _own_addresses()
        listeners = list(filter(None, map(listen, addresses)))

    offers = gather([listener.getsockname() for listener in listeners])[0]
    # One vote per host would be enough, but all ranks have to take part in the gather.
    own_vote = [True] * len(offers)
    if networks[0] != machine_id("net"):
        with ThreadPoolExecutor(max(1, len(offers))) as pool:
            own_vote = list(pool.map(can_reach, offers))
    votes = gather(own_vote)

    # The first address that all ranks reach; those of Horovod's own interface come first.
    chosen = next((index for index, reached in enumerate(zip(*votes)) if all(reached)), None)
    for index, listener in enumerate(listeners):
        if index != chosen:
            listener.close()
    if chosen is None:
        return None, None
    return offers[chosen], listeners[chosen] if listeners else None


def _own_addresses() -> list[str]:
    """Returns this host's addresses except loopback, those of Horovod's interface first."""
    first = os.environ.get("HOROVOD_GLOO_IFACE", "")
    interfaces = sorted(host_facts.all_interfaces(), key=lambda item: item["name"] != first)
    return [item["address"] for item in interfaces if not item["address"].startswith("127.")]


def listen(address: str) -> socket.socket | None:
    """Returns a socket that listens on a free port; None if that fails, since no rank may raise alone here."""
    try:
        return socket.create_server((address, 0), backlog=LISTEN_BACKLOG)
    except OSError:
        return None


def can_reach(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=SECONDS_TO_REACH).close()
    except OSError:
        return False
    return True
