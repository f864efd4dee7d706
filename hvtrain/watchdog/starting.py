"""Starts a watchdog on every rank."""

import logging
import secrets
from collections.abc import Callable

from hvtrain.watchdog.hub import Hub
from hvtrain.watchdog.judge import Rules
from hvtrain.watchdog.member import Member
from hvtrain.watchdog.progress import Marks, Progress
from hvtrain.watchdog.rendezvous import Broadcast, Gather, agree
from hvtrain.watchdog.watchdog import Watchdog
from hvtrain.watchdog.wire import WireError

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
# Rank 0 reads so many ranks' beats in a second; with more ranks each sends fewer.
MAX_BEATS_PER_SECOND = 256
MAX_BEAT_SECONDS, MIN_BEAT_SECONDS = 4.0, 0.05


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
        abort_seconds: rank 0's counts; 0: no watchdog, no port.
        marks: see Progress.
        calls_launcher: check whether Gloo's launcher is there; one rank of a host is enough.
        survives_loss: an elastic job goes on without a rank that is gone or fails, and starts another watchdog.
    """
    limit = broadcast(abort_seconds)
    if not limit or size == 1:
        return Watchdog()
    usual = BEAT_SECONDS * max(1.0, size / MAX_BEATS_PER_SECOND)
    beat_seconds = max(MIN_BEAT_SECONDS, min(MAX_BEAT_SECONDS, limit / 20, usual))
    address, listener = agree(rank, gather, broadcast)
    token = broadcast(secrets.token_hex(32))
    progress = Progress(marks, beat_seconds)
    if address is None:
        log.warning("no watchdog: the ranks reach no address of rank 0 that all of them share")
        return Watchdog(progress)
    member = Member(rank, host, Rules(limit, beat_seconds, survives_loss), progress, calls_launcher)
    if listener:
        member.hub_thread = Hub(listener, token, size, member).thread
    try:
        member.join(address, token)
    except (OSError, WireError) as error:
        log.warning("no watchdog on rank %d on %s: %s", rank, host, error)
        return Watchdog(progress)
    return member
