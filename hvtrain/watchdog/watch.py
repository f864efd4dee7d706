"""What the run sees of the watch: start, say what goes on, fail, ask for the cause, stop."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from hvtrain.errors import UserError
from hvtrain.watchdog.host_processes import Launcher, Stacks
from hvtrain.watchdog.hub import Hub
from hvtrain.watchdog.judge import Rules, Verdict
from hvtrain.watchdog.meeting import Broadcast, Gather, meet
from hvtrain.watchdog.member import Member
from hvtrain.watchdog.progress import Marks, Progress
from hvtrain.watchdog.wire import WireError

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
# Rank 0 reads so many ranks' beats in a second; with more ranks each sends fewer.
MOST_BEATS_A_SECOND = 256
SLOWEST_BEAT_SECONDS, SHORTEST_BEAT_SECONDS = 4.0, 0.05


class Watch:
    """Of one rank. Idle, and for nothing, until `start` makes one that is not.

    folder: the run folder, for stacks and for the advice how to go on; set it once it is known.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.folder: Path | None = None
        self.progress = progress or Progress()
        self._member: Member | None = None
        self._hub: Hub | None = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What happens inside is of that kind, one of progress.py's. Not collective, as nothing here is but start."""
        return self.progress.phase(name)

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks why this one leaves them."""
        if self._member:
            self._member.fail(*_in_short(error))

    def cause(self, seconds: float = 3.0) -> Verdict | None:
        """Why the others are gone, where anybody knows; whoever asks ends the process himself then."""
        return self._member.cause(seconds) if self._member else None

    @property
    def spokesman(self) -> int:
        """The first of the ranks that are left."""
        return self._member.spokesman if self._member else 0

    def stop(self) -> None:
        """Leaves the watch, and with rank 0 all do. Another may be started."""
        if self._member:
            self._member.stop()
            self._member = None
        if self._hub:
            self._hub.thread.join(1.0)
            self._hub = None


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
) -> Watch:
    """A watch over all ranks, or an idle one where rank 0 wants none (every rank).

    Args:
        abort_seconds: rank 0's counts; 0: no watch, no port.
        marks: see Progress.
        calls_launcher: one rank of a host is enough to ask whether Gloo's launcher is there.
        survives_loss: an elastic job goes on without a rank that is gone or fails; it begins another watch then.
    """
    limit = broadcast(abort_seconds)
    if not limit or size == 1:
        return Watch()
    usual = BEAT_SECONDS * max(1.0, size / MOST_BEATS_A_SECOND)
    beat_seconds = max(SHORTEST_BEAT_SECONDS, min(SLOWEST_BEAT_SECONDS, limit / 20, usual))
    rules = Rules(limit, beat_seconds, survives_loss)
    address, listener = meet(rank, gather, broadcast)
    token = broadcast(secrets.token_hex(32))
    watch = Watch(Progress(marks, beat_seconds))
    if address is None:
        log.warning("no watchdog: the ranks reach no address of rank 0 that all of them share")
        return watch
    stacks, launcher = Stacks(), Launcher(calls_launcher)
    if listener:
        watch._hub = Hub(listener, token, size, rules, lambda: watch.folder, stacks.process)
        watch._hub.thread.start()
    try:
        watch._member = Member(rank, host, rules, lambda: watch.folder, watch.progress, stacks, launcher)
        watch._member.join(address, token)
    except (OSError, WireError) as error:
        log.warning("no watchdog on rank %d on %s: %s", rank, host, error)
        watch._member = None
    return watch


def _in_short(error: BaseException) -> tuple[str, int]:
    """An error in one line, and the exit code that it leads to."""
    line = str(error).strip().partition("\n")[0][:300]
    if isinstance(error, UserError):
        return line, error.exit_code
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code
    return f"{type(error).__name__}: {line}".rstrip(": "), code
