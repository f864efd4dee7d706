"""The first failure of a launch: which rank, on which host, why, and what to do. Pure.

Ranks and horovodrun state it in lines of JSON (system/verdict.py). Only mpirun, ssh and Python are read by their text,
with the patterns of this file.
"""

import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hvtrain.errors import RESTART_HELPS, ConfigError
from hvtrain.system import verdict
from hvtrain.system.verdict import Verdict

AGAIN = "run the same command with the same run.dir to resume from the newest checkpoint"
RULER = "-" * 74  # Open MPI puts one before and after each of its messages.
LOST = 255  # ssh's exit code when its connection breaks; Open MPI's too.

# How ranks ended, in the launchers' words, with runs of blanks as one.
_BY_MPIRUN = (
    r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on signal (?P<signal>\d+)",
    r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\] Exit code: (?P<code>\d+)",
    r"ORTE has lost communication with a remote daemon\..* Remote daemon: \S+ on node (?P<host>\S+)",
)
_BY_HOROVOD = (r"Process name: (?P<rank>\S+) Exit code: (?P<code>-?\d+)", r"[Ee]xit code:? (?P<code>-?\d+)")
# Open MPI says this of a lost host too, if ssh noticed the loss first.
_NOT_STARTED = r"ORTE was unable to reliably start one or more daemons"
_NOISE = r"Primary job terminated normally|ORTE does not know how to route"
_NOISE_LINE = r"mpirun: (killing job|Forwarding signal)|.*resource_tracker: There appear to be"
_SSH = (
    r"Connection to (?P<host>\S+?)(?: port \d+)?(?: closed by remote host|: .*)",
    r"Connection (?:closed|reset) by (?P<host>\S+)",
    r"Timeout, server (?P<host>\S+) not responding",
)
# The last line of a Python traceback: a program of the user's own writes no verdict.
_EXCEPTION = r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning)\b.*"


@dataclass(frozen=True)
class End:
    """How the first rank ended, with a shell's exit code.

    place: its number, or HOST[SLOT] in an elastic job; "" if only a host was lost. host: the launcher's name for it.
    """

    place: str
    code: int
    host: str = ""


def shell_code(code: int) -> int:
    """A shell's exit code: Python reports a child that a signal ended by a negative code, shells by 128 + the signal.

    >>> shell_code(7), shell_code(-9)
    (7, 137)
    """
    return code if code >= 0 else 128 - code


def failed_rank(text: str) -> tuple[str | None, int] | None:
    """The first rank that failed, by its name, and its exit code, from Horovod's error; None where it has no code.

    >>> failed_rank("Process name: 3 Exit code: -9")
    ('3', -9)
    """
    found = _search(_BY_HOROVOD, text)
    return (found.get("rank"), int(found["code"])) if found else None


def _search(patterns: Sequence[str], text: str) -> dict[str, str] | None:
    found = next(filter(None, (re.search(pattern, " ".join(text.split())) for pattern in patterns)), None)
    return found.groupdict() if found else None


class Listener:
    """Reads a launch's output line by line.

    first: how the first rank ended; None so far. verdicts: the verdict of each rank that wrote one, on itself if it
    did. lost: hosts to which ssh lost its connection. held: a begun message of Open MPI's, which is shown as a whole or
    not at all.
    """

    def __init__(self) -> None:
        self.first: End | None = None
        self.verdicts: dict[int, Verdict] = {}
        self.lost: list[str] = []
        self.held: list[str] = []
        self._in_traceback: set[int] = set()

    def launcher(self, line: str) -> str:
        """Reads a line of the launcher's own and returns what to show, now that it is known what it belongs to."""
        text = line.strip()
        if self.held or text == RULER:
            self.held.append(line)
            if text != RULER or len(self.held) == 1:
                return ""
            block = self.rest()
            return "" if self._understands(" ".join(block.split())) else block
        # A process between the launcher and a rank may have begun the line ("Exception in thread ") and died.
        begun, prefix, rest = line.partition(verdict.PREFIX)
        if found := verdict.read(f"{prefix}{rest}"):
            self.first = self.first or End(str(found.rank), shell_code(found.code or 0))
            return f"{begun}\n" if begun else ""
        self._read_ssh(text)
        return "" if re.match(_NOISE_LINE, text) else line

    def rank(self, rank: int, line: str) -> bool:
        """Reads a line of a rank's error output. True for a verdict, which is not shown."""
        text = line.rstrip()
        if found := verdict.read(text):
            # Why it failed comes first; that it stops follows.
            if found.rank == rank or rank not in self.verdicts:
                self.verdicts[rank] = found
        elif text.startswith("Traceback (most recent call last)"):
            self._in_traceback.add(rank)
        elif rank in self._in_traceback and re.fullmatch(_EXCEPTION, text):
            self.verdicts[rank] = Verdict(rank, f"{text}; see its traceback above")
            self._in_traceback.discard(rank)
        else:
            self._read_ssh(text)
        return found is not None

    def rest(self) -> str:
        """Whatever is held back."""
        text, self.held = "".join(self.held), []
        return text

    def _read_ssh(self, text: str) -> None:
        found = _search([f"^{pattern}" for pattern in _SSH], text)
        self.lost += [found["host"]] if found else []

    def _understands(self, text: str) -> bool:
        """True for a message that says nothing more than what is now known."""
        found = _search(_BY_MPIRUN, text)
        if found is None and self.lost and re.search(_NOT_STARTED, text):
            found = {"host": self.lost[0]}
        if found is None:
            return bool(re.search(_NOISE, text))
        code = 128 + int(found["signal"]) if "signal" in found else int(found.get("code", LOST))
        self.first = self.first or End(found.get("rank", ""), code, found.get("host", ""))
        return True


@dataclass(frozen=True)
class Failure:
    """Why a launch ended, and its exit code. place: the rank, or what else failed.

    is_preemption: the ranks were asked to stop. is_shown: a line of rank 0 above says it, for all ranks.
    """

    place: str
    host: str
    cause: str
    exit_code: int
    is_preemption: bool = False
    is_shown: bool = False

    def __str__(self) -> str:
        if self.is_preemption:
            return f"{self.cause}; {AGAIN}"
        where = " ".join(word for word in (self.place, f"host {self.host}" if self.host else "") if word)
        return f"FIRST FAILURE {where}: {self.cause}"


def judge(
    end: End,
    verdicts: Mapping[int, Verdict],
    hosts: Sequence[str],
    out_of_memory: Collection[str] = (),
    lost: Collection[str] = (),
    label: Callable[[int], str] = "rank {}".format,
) -> Failure:
    """The failure behind an end, from verdicts by the rank that wrote them, and each rank's host.

    out_of_memory: hosts whose kernel has ended processes for lack of memory meanwhile. lost: hosts to which ssh lost
    its connection, or which no longer answer. label: how messages name a rank.
    """
    rank = int(end.place) if end.place.isdigit() else None
    own = {number: found for number, found in verdicts.items() if found.rank == number}
    if rank in verdicts and rank not in own and own:
        rank = next(iter(own))  # A rank that stops because of another may be gone before that one.
    # By the name that -H gives it; Open MPI may have another one.
    host = hosts[rank] if rank is not None and rank < len(hosts) else end.host or end.place.partition("[")[0]
    if not end.place and host in hosts:
        rank = hosts.index(host)
    place = label(rank) if rank is not None else end.place
    found = None if rank is None else verdicts.get(rank)
    if end.code == LOST and (host in lost or not end.place):
        return Failure(place, host, f"the connection to host {host} was lost; is it up? then {AGAIN}", RESTART_HELPS)
    # Ctrl-C is not one of these: a rank that took it ends with 130 itself.
    name = {128 + number: number.name for number in signal.Signals if number != signal.SIGINT}.get(end.code)
    if name == "SIGKILL" and host in out_of_memory:
        return Failure(place, host, f"killed for lack of memory on {host}; lower train.batch_size or use more hosts", 1)
    if name:
        return Failure(place, host, f"killed by {name}; {AGAIN}", RESTART_HELPS)
    if end.code == RESTART_HELPS:
        # Where the watchdog ends all ranks, a silent one may be gone before the one that says why.
        found = found or next(iter(verdicts.values()), None)
        if found is None or found.cause.endswith(verdict.UNSAVED):
            cause = found.cause if found else "preempted, saved"
            return Failure(place, host, cause, RESTART_HELPS, is_preemption=True)
        if isinstance(found.rank, int) and found.rank < len(hosts):
            place, host = label(found.rank), hosts[found.rank]
        return Failure(place, host, f"{found.cause}; {AGAIN}", RESTART_HELPS)
    cause = found.cause if found else f"ended with exit code {end.code}; see its output above"
    return Failure(place, host, cause, end.code, is_shown=end.code == ConfigError.exit_code and 0 in own)
