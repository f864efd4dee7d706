"""Which rank failed first, on which host, why, and what to do: the last line on the console and the exit code. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hvtrain.errors import RESTART_HELPS, ConfigError
from hvtrain.launch.listen import STOPPED_BY_ANOTHER, End

AGAIN = "start it again with the same run.dir, and it goes on from the newest checkpoint"
_LOST = 255  # What ssh ends with when its connection does; Open MPI too.


@dataclass(frozen=True)
class Failure:
    """What ended a launch. host is "" where nobody knows it; exit_code is the launcher's.

    is_told: bad input that rank 0 refused in a line above, for all ranks.
    """

    place: str
    host: str
    cause: str
    exit_code: int
    is_preemption: bool = False
    is_told: bool = False

    def __str__(self) -> str:
        if self.is_preemption:
            return f"{self.cause}; {AGAIN}"
        where = " ".join(word for word in (self.place, f"host {self.host}" if self.host else "") if word)
        return f"FIRST FAILURE {where}: {self.cause}"


def judge(
    end: End,
    words: Mapping[int, str],
    hosts: Sequence[str],
    out_of_memory: Collection[str] = (),
    lost: Collection[str] = (),
) -> Failure:
    """The failure that an end means.

    Args:
        words: the last error that each rank spoke of.
        hosts: each rank's host.
        out_of_memory: hosts on which the kernel has ended processes for lack of memory meanwhile.
        lost: hosts to which ssh lost its connection, or which do not answer any more.
    """
    end = _really_first(end, words)
    rank = int(end.place) if end.place.isdigit() else None
    # By the name that -H gives it; Open MPI may have another one.
    host = hosts[rank] if rank is not None and rank < len(hosts) else end.host or end.place.partition("[")[0]
    if not end.place and host in hosts:
        rank = hosts.index(host)
    place = f"rank {rank}" if rank is not None else end.place
    # Bad data names its rank in its own words too.
    said = re.sub(rf"^rank {rank} on \S+: ", "", words.get(rank, "")) if rank is not None else ""
    if end.code == _LOST and (host in lost or not end.place):
        return Failure(place, host, f"the connection to host {host} was lost; is it up? then {AGAIN}", RESTART_HELPS)
    name = _signal_name(end.code)
    if name == "SIGKILL" and host in out_of_memory:
        return Failure(place, host, f"killed for lack of memory on {host}; lower train.batch_size or use more hosts", 1)
    if name:
        return Failure(place, host, f"killed by {name}; {AGAIN}", RESTART_HELPS)
    if end.code == RESTART_HELPS:
        # Where the watchdog ends all ranks, one that says nothing may be gone before the one that says why.
        said = said or next(iter(words.values()), "")
        if not said:
            return Failure(place, host, "preempted, saved", RESTART_HELPS, is_preemption=True)
        culprit = re.search(r"\brank (\d+)\b", said)
        if culprit and int(culprit[1]) < len(hosts):
            place, host = f"rank {culprit[1]}", hosts[int(culprit[1])]
        return Failure(place, host, f"{said}; {AGAIN}", RESTART_HELPS)
    cause = said or f"ended with exit code {end.code}; what it said stands above"
    of_chief = words.get(0, "")
    is_told = end.code == ConfigError.exit_code and bool(of_chief) and not STOPPED_BY_ANOTHER.match(of_chief)
    return Failure(place, host, cause, end.code, is_told=is_told)


def _really_first(end: End, words: Mapping[int, str]) -> End:
    """A rank that stops because of another one may be gone before that is."""
    if end.place.isdigit() and STOPPED_BY_ANOTHER.match(words.get(int(end.place), "")):
        for rank, said in words.items():
            if not STOPPED_BY_ANOTHER.match(said):
                return End(str(rank), end.code)
    return end


def _signal_name(code: int) -> str:
    """The signal behind a shell's exit code; Ctrl-C is none here, for a rank that took it says so with 130."""
    if 128 < code < 128 + signal.NSIG and code != 128 + signal.SIGINT:
        try:
            return signal.Signals(code - 128).name
        except ValueError:
            return ""
    return ""
