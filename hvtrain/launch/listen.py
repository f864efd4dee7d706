"""What launchers say about ranks that ended, taken out of their output: which was first, how, and its last words."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvtrain.launch.exit_code import of_shell

RULER = "-" * 74  # Open MPI puts it around what it has to say.
_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_CODE = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code: +(\d+)")
_LOST = re.compile(r"ORTE has lost communication with a remote daemon\..*Remote daemon: \S+ on node (\S+)", re.DOTALL)
_NOT_STARTED = "ORTE was unable to reliably start one or more daemons"
_NOTHING_MORE = ("Primary job terminated normally", "ORTE does not know how to route")
_BY_GLOO = re.compile(r"horovodrun: rank (\S+) ended with exit code (-?\d+)$")
_NOISE = re.compile(r"mpirun: (killing job|Forwarding signal)|.*resource_tracker: There appear to be")
# Its own words when the other end closes, is silent for too long, or the network fails.
_SSH = re.compile(
    r"(?:Connection to (\S+?)(?: port \d+)?(?: closed by remote host|: .*)|Connection (?:closed|reset) by (\S+)"
    r"|Timeout, server (\S+) not responding).*"
)
# A line that hvtrain's door says, and the last one of a Python traceback.
_OWN_WORDS = re.compile(r"hvtrain: (?:rank \d+(?: on \S+ failed)?: )?(.+)")
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning)\b.*)")
STOPPED_BY_ANOTHER = re.compile(r"stopped because ")


@dataclass(frozen=True)
class End:
    """How the first rank ended. place: its number, or HOST[SLOT] in an elastic job; "" where only a host was lost.

    code: its exit code, or 128 + the number of the signal that ended it. host: as the launcher names it, or "".
    """

    place: str
    code: int
    host: str = ""


class Listener:
    """Takes a launcher's text. `first` is the rank that failed first, None where the launcher speaks of none.

    words: the last error that each rank spoke of, by its number. cut: hosts to which ssh lost its connection.
    """

    def __init__(self) -> None:
        self.first: End | None = None
        self.words: dict[int, str] = {}
        self.cut: list[str] = []
        self._block: list[str] | None = None
        self._in_traceback: set[int] = set()

    def launcher(self, line: str) -> str:
        """Hears a line that no rank said; what of it is to be shown, now that it is known what it belongs to."""
        text = line.strip()
        if self._block is not None:
            self._block.append(line)
            if text != RULER:
                return ""
            block, self._block = "".join(self._block), None
            return "" if self._understood(block) else block
        if text == RULER:
            self._block = [line]
            return ""
        by_gloo = _BY_GLOO.search(text)
        if by_gloo:
            self._end(End(by_gloo[1], of_shell(int(by_gloo[2]))))
            return ""
        self._heard_ssh(text)
        return "" if _NOISE.match(text) else line

    def rank(self, rank: int, line: str) -> None:
        """Hears a line of a rank's error output."""
        text = line.rstrip()
        own = _OWN_WORDS.fullmatch(text)
        if text.startswith("Traceback (most recent call last)"):
            self._in_traceback.add(rank)
        elif own:
            # What it says first is why; what follows, that it stops.
            if not STOPPED_BY_ANOTHER.match(own[1]) or rank not in self.words:
                self.words[rank] = own[1]
        elif rank in self._in_traceback and (error := _EXCEPTION.fullmatch(text)):
            self.words[rank] = f"{error[1]}; its traceback stands above"
            self._in_traceback.discard(rank)
        else:
            self._heard_ssh(text)

    @property
    def is_holding(self) -> bool:
        """True inside a block, which is shown or not as a whole."""
        return self._block is not None

    def rest(self) -> str:
        """What is still held back at the end."""
        held, self._block = "".join(self._block or []), None
        return held

    def _heard_ssh(self, text: str) -> None:
        found = _SSH.match(text)
        if found:
            self.cut.append(next(name for name in found.groups() if name))

    def _understood(self, block: str) -> bool:
        """True when the block says nothing but what is remembered now."""
        text = " ".join(block.split())
        by_signal, by_code, lost = _SIGNAL.search(text), _CODE.search(text), _LOST.search(text)
        if by_signal:
            self._end(End(by_signal[1], 128 + int(by_signal[3]), by_signal[2]))
        elif by_code:
            self._end(End(by_code[1], int(by_code[2])))
        elif lost or (_NOT_STARTED in text and self.cut):
            self._end(End("", 255, lost[1] if lost else self.cut[0]))
        else:
            return any(words in text for words in _NOTHING_MORE)
        return True

    def _end(self, end: End) -> None:
        self.first = self.first or end
