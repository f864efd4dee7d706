"""Explains the first failure of a launch: which rank failed, on which host, why, and what to do. Pure.

Ranks and horovodrun report it in lines of JSON (console.Verdict). Only the output of mpirun, ssh,
Gloo and Python is matched as text, by the patterns in this file; tests/launch/transcripts has real
output of each launcher.
"""

import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvtrain.core.commands import first_word
from hvtrain.errors import RESTART_HELPS, ConfigError
from hvtrain.system.console import UNSAVED, VERDICT_PREFIX, Verdict, read_verdict

AGAIN = "run the same command again"
RESUME = "run the same command with the same run.dir to resume from the newest checkpoint"
RULER = "-" * 74  # Open MPI prints one before and after each of its messages.
LOST = 255  # Exit code of ssh, and of Open MPI, when the connection to a host breaks.

# How launchers report the end of a rank or the loss of a host. _search matches these patterns and
# _SSH with whitespace collapsed to single spaces.
_BY_MPIRUN = (
    r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on signal (?P<signal>\d+)",
    r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\] Exit code: (?P<code>\d+)",
    r"ORTE has lost communication with a remote daemon\..* Remote daemon: \S+ on node (?P<host>\S+)",
)
_BY_HOROVOD = (
    r"Process name: (?P<rank>\S+) Exit code: (?P<code>-?\d+)",
    r"[Ee]xit code:? (?P<code>-?\d+)",
)
# Open MPI also writes this about a lost host, if ssh noticed the loss first.
_NOT_STARTED = "ORTE was unable to reliably start one or more daemons"
# Messages of Open MPI, and single lines, that follow from a failure but explain nothing.
_NOISE = r"Primary job terminated normally|ORTE does not know how to route"
_NOISE_LINE = r"mpirun: (killing job|Forwarding signal)|.*resource_tracker: There appear to be"
_SSH = (
    r"^Connection to (?P<host>\S+?)(?: port \d+)?(?: closed by remote host|: .*)",
    r"^Connection (?:closed|reset) by (?P<host>\S+)",
    r"^Timeout, server (?P<host>\S+) not responding",
)
# The last line of a Python traceback: a user's own program writes no verdict.
_EXCEPTION = r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning)\b.*"
# Gloo's last message if packets to another rank, or to the launcher, are dropped. A refused
# connection is left out: it may only mean that the other rank has ended.
_UNREACHABLE = (
    r"\s*what\(\): .*(Connect timeout \S+|connect \S+: No route to host|HTTP request failed)"
)
OPEN_PORTS = "open all ports between the hosts, or set --network-interfaces to a network on which they are open"
# Exit codes of ranks that were killed by a signal. SIGINT is left out: a rank that handles Ctrl-C
# exits with 130 itself.
_SIGNALS = {128 + number: number.name for number in signal.Signals if number != signal.SIGINT}


@dataclass(frozen=True)
class End:
    """The rank that ended first, and how it ended.

    Args:
        rank: its number, or HOST[SLOT] in an elastic job; "" if only a host was lost.
        code: its exit code, as a shell would report it.
        host: the launcher's name for its host; "" if the launcher named none.
    """

    rank: str
    code: int
    host: str = ""


def restart_advice(command: Sequence[str]) -> str:
    """Returns the advice after a failure that a restart may fix.

    Only training with hvtrain itself is sure to resume from run.dir.

    >>> restart_advice(["horovodrun", "-np", "2", "python", "-m", "hvtrain", "model=mlp"]) == RESUME
    True
    >>> restart_advice(["horovodrun", "-np", "2", "python", "train.py"]) == AGAIN
    True
    """
    names = [Path(part).name for part in command]
    if "hvtrain" in names and not first_word(names[names.index("hvtrain") + 1 :]):
        return RESUME
    return AGAIN


def shell_code(code: int) -> int:
    """Converts a child's exit code from Python's form to a shell's: -N (signal N) becomes 128 + N.

    >>> shell_code(7), shell_code(-9)
    (7, 137)
    """
    return code if code >= 0 else 128 - code


def failed_rank(text: str) -> tuple[str | None, int] | None:
    """Returns the name and exit code of the first rank that failed, from the text of Horovod's error.

    The name is None if the text has only an exit code. Returns None if it has no exit code.

    >>> failed_rank("Process name: 3 Exit code: -9")
    ('3', -9)
    """
    match = _search(_BY_HOROVOD, text)
    return (match.get("rank"), int(match["code"])) if match else None


def _search(patterns: Sequence[str], text: str) -> dict[str, str] | None:
    """Returns the named groups of the first pattern that occurs in the text, or None.

    Whitespace in the text is collapsed first, since launchers wrap their messages.
    """
    text = " ".join(text.split())
    for pattern in patterns:
        match = re.search(pattern, text)
        if match:
            return match.groupdict()
    return None


class Listener:
    """Reads a launch's output line by line.

    Attributes:
        first: how the first rank ended; None until one has.
        verdicts: each rank's verdict: the one on itself if it wrote one, else one on another rank.
        lost: hosts to which ssh lost its connection.
        held: an unfinished message from Open MPI, which is shown as a whole or not at all.
    """

    first: End | None = None

    def __init__(self) -> None:
        self.verdicts: dict[int, Verdict] = {}
        self.lost: list[str] = []
        self.held: list[str] = []
        self._in_traceback: set[int] = set()

    def read_launcher(self, line: str) -> str:
        """Reads a line that the launcher itself wrote.

        Returns the text to show now: "" while a message is incomplete, or if it is not to be shown.
        """
        text = line.strip()
        if self.held or text == RULER:
            self.held.append(line)
            if text != RULER or len(self.held) == 1:
                return ""
            message = self.flush()
            return "" if self._read_message(" ".join(message.split())) else message

        # A process between the launcher and a rank may have begun the line ("Exception in thread ")
        # and died.
        unfinished, prefix, rest = line.partition(VERDICT_PREFIX)
        # Here the verdict comes from horovodrun, which knows only the rank's name.
        verdict = read_verdict(f"{prefix}{rest}")
        if verdict:
            self.first = self.first or End(str(verdict.rank), shell_code(verdict.code or 0))
            return f"{unfinished}\n" if unfinished else ""

        self._read_ssh(text)
        return "" if re.match(_NOISE_LINE, text) else line

    def read_rank(self, rank: int, line: str) -> bool:
        """Reads a line of a rank's stderr. Returns True for a verdict, which is not shown."""
        text = line.rstrip()
        verdict = read_verdict(text)
        if verdict:
            # A failing rank may write why, and later that it stops because of another rank. The
            # verdict on itself counts.
            if verdict.rank == rank or rank not in self.verdicts:
                self.verdicts[rank] = verdict
            return True

        unreachable = re.match(_UNREACHABLE, text)
        if text.startswith("Traceback (most recent call last)"):
            self._in_traceback.add(rank)
        elif unreachable:
            cause = (
                f"no connection to another rank or to the launcher ({unreachable[1]}); {OPEN_PORTS}"
            )
            self.verdicts[rank] = Verdict(rank, cause, ConfigError.exit_code)
        elif rank in self._in_traceback and re.fullmatch(_EXCEPTION, text):
            known = self.verdicts.get(rank)
            # A traceback at the rank's exit does not replace the verdict that it wrote on itself.
            if not (known and self._explains_itself(rank, known)):
                self.verdicts[rank] = Verdict(rank, f"{text}; see its traceback above")
            self._in_traceback.discard(rank)
        else:
            self._read_ssh(text)
        return False

    @staticmethod
    def _explains_itself(rank: int, verdict: Verdict) -> bool:
        """True for a verdict that hvtrain wrote on this rank, with its exit code; Gloo's message is none."""
        is_own = verdict.rank == rank and bool(verdict.code)
        return is_own and not verdict.cause.endswith(OPEN_PORTS)

    def flush(self) -> str:
        """Returns the text that was held back, and clears it."""
        text = "".join(self.held)
        self.held = []
        return text

    def _read_ssh(self, text: str) -> None:
        match = _search(_SSH, text)
        if match:
            self.lost.append(match["host"])

    def _read_message(self, message: str) -> bool:
        """Reads a whole message from Open MPI, and notes the end that it reports, if any.

        Returns True for a message that adds nothing to the launch's last line, and is not shown.
        """
        match = _search(_BY_MPIRUN, message)
        if match is None and self.lost and _NOT_STARTED in message:
            match = {"host": self.lost[0]}
        if match is None:
            return bool(re.search(_NOISE, message))

        code = int(match.get("code", LOST))
        if "signal" in match:
            code = 128 + int(match["signal"])
        self.first = self.first or End(match.get("rank", ""), code, match.get("host", ""))
        return True


@dataclass(frozen=True)
class Ending:
    """The end of a launch.

    Args:
        code: its exit code.
        message: the last line, which says why it ended and what to do; "" after success or Ctrl-C, and
            if no rank was started.
        host: the host at fault; "" if there is none.
        is_shown: True if rank 0 has already printed the message, for all ranks.
    """

    code: int
    message: str = ""
    host: str = ""
    is_shown: bool = False


def judge(
    end: End,
    verdicts: Mapping[int, Verdict],
    hosts: Sequence[str],
    out_of_memory: Collection[str] = (),
    lost: Collection[str] = (),
    label: Callable[[int], str] = "rank {}".format,
    advice: str = AGAIN,
) -> Ending:
    """Explains the end of a launch by the rank that ended first.

    Args:
        end: how the first rank ended.
        verdicts: the ranks' verdicts, by the rank that wrote them.
        hosts: each rank's host, as named in -H.
        out_of_memory: hosts whose kernel has killed processes for lack of memory during the launch.
        lost: hosts to which ssh lost its connection, or which no longer answer.
        label: returns the name of a rank in messages.
        advice: what to do where a restart may help; see `restart_advice`.
    """
    rank, host = _locate(end, verdicts, hosts)
    who = end.rank
    verdict = None
    if rank is not None:
        who = label(rank)
        verdict = verdicts.get(rank)

    quoted = None
    code = RESTART_HELPS
    signal_name = _SIGNALS.get(end.code)
    if end.code == LOST and (host in lost or not end.rank):
        cause = f"the connection to host {host} was lost; check that it is up, then {advice}"
    elif signal_name == "SIGKILL" and host in out_of_memory:
        cause = f"killed for lack of memory on {host}; lower train.batch_size or use more hosts"
        code = 1
    elif signal_name and verdict and verdict.code:
        quoted = verdict
        cause = verdict.cause
        code = verdict.code
    elif signal_name:
        cause = f"killed by {signal_name}; {advice}"
    elif end.code == RESTART_HELPS:
        # When the watchdog ends all ranks, one without a verdict may end before the one that says
        # why.
        quoted = verdict or next(iter(verdicts.values()), None)
        if quoted is None:
            return Ending(code, f"preempted after saving; {advice}")
        cause = f"{quoted.cause}; {advice}"
        if quoted.cause.endswith(UNSAVED):
            return Ending(code, cause)
    else:
        quoted = verdict
        cause = f"ended with exit code {end.code}; see its output above"
        if verdict:
            cause = verdict.cause
        code = end.code
    # The rank that ended first may report another's fault: an error of rank 0's disk is raised on
    # all ranks.
    if quoted and isinstance(quoted.rank, int) and quoted.rank < len(hosts):
        who = label(quoted.rank)
        host = hosts[quoted.rank]

    where = f"{who} host {host}".strip() if host else who
    # All ranks check the settings in the same way, and only rank 0 prints what is wrong with them.
    rank_0_reported = 0 in verdicts and 0 in (rank, verdicts[0].rank)
    is_shown = end.code == ConfigError.exit_code and rank_0_reported
    return Ending(code, f"FIRST FAILURE {where}: {cause}", host, is_shown)


def _locate(
    end: End, verdicts: Mapping[int, Verdict], hosts: Sequence[str]
) -> tuple[int | None, str]:
    """Returns the rank that failed (None if it has no number), and its host, as named in -H if known."""
    rank = int(end.rank) if end.rank.isdigit() else None
    self_reported = [writer for writer, verdict in verdicts.items() if verdict.rank == writer]
    # A rank that stops because of another may end before that one.
    if rank in verdicts and rank not in self_reported and self_reported:
        rank = self_reported[0]

    # Open MPI may use another name for the host than -H.
    host = end.host or end.rank.partition("[")[0]
    if rank is not None and rank < len(hosts):
        host = hosts[rank]
    if not end.rank and host in hosts:
        rank = hosts.index(host)
    return rank, host
