"""Passes horovodrun's outputs on, rank 0's text without the launchers' marks, and draws rank 0's progress."""

import codecs
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import IO

from hvtrain.launch.first_failure import RULER, Listener
from hvtrain.launch.output import MARK, MARK_BEGUN, write
from hvtrain.system import drawing
from hvtrain.system.drawing import Drawing
from hvtrain.system.live_display import LiveDisplay

# From here on a begun line may become a verdict or a drawing.
_MAY_BE_HIDDEN = re.compile(rf"(?:hvtrain-.*|{'|'.join('hvtrain'[:length] for length in range(7, 0, -1))})$", re.DOTALL)
_NOBODY = -1


class Unmarked:
    """Both outputs of a launcher, each for itself; the listener hears the error output."""

    merged = False

    def __init__(self) -> None:
        self.listener = Listener()
        self._display = LiveDisplay()
        self._came = self._drawn = Drawing()  # the last drawing that came, and the one on the terminal
        self.takers: list[Callable[[IO[str]], None]] = [self._take_errors, self._take_output]

    def _take_errors(self, stream: IO[str]) -> None:
        channel = Channel(self._read_error, lambda: bool(self._came.bars or self.listener.held))
        for text in _texts(stream, channel):
            write(sys.stderr, text)
        write(sys.stderr, self.listener.rest())

    def _take_output(self, stream: IO[str]) -> None:
        self._display.prepare()
        for text in _texts(stream, Channel(self._read_output, lambda: bool(self._came.bars))):
            write(sys.stdout, text)
            # After the text, which may end a line that was begun before.
            if self._came is not self._drawn:
                self._drawn = self._came
                self._display.show(self._drawn)
        self._display.stop()

    def _read_error(self, rank: int | None, line: str) -> str:
        if rank is None:
            return self.listener.launcher(line)
        return "" if self.listener.rank(rank, line) else line

    def _read_output(self, rank: int | None, line: str) -> str:
        shown, found = drawing.cut(line)
        self._came = found or self._came
        return shown


class Channel:
    """One output of a launcher: text in any pieces, in which marks say which rank wrote what follows.

    The launcher's own text and rank 0's are shown as they come; other ranks' by whole lines, with the mark.
    read: what to show of a whole line of that rank, or of the launcher (None). shows_lines: true while nothing else may
    be shown.
    """

    def __init__(self, read: Callable[[int | None, str], str], shows_lines: Callable[[], bool]) -> None:
        self._read = read
        self._shows_lines = shows_lines
        self._cut = ""  # the end of the text so far, with which a mark may begin
        self._source: tuple[int | None, str] = None, ""  # rank and mark of the last piece in this line
        self._begun: dict[int | None, tuple[str, str]] = {}  # mark and begun line
        self._shown: dict[int | None, int] = {}  # how much of the begun line is shown
        self._last: int | None = _NOBODY  # whose line is begun on the console

    def text(self, text: str) -> str:
        """The text to show now."""
        text = self._cut + text
        cut = MARK_BEGUN.search(text)
        self._cut = cut[0] if cut else ""
        shown = ""
        for line in re.findall(r"[^\n]*\n|[^\n]+", text[: len(text) - len(self._cut)]):
            marks = [*MARK.finditer(line)]
            ends = [mark.start() for mark in marks] + [len(line)]
            pieces = [(*self._source, line[: ends[0]])]
            pieces += [(int(mark[1]), mark[0], line[mark.end() : end]) for mark, end in zip(marks, ends[1:])]
            shown += "".join(self._piece(*piece) for piece in pieces if piece[2])
            self._source = (None, "") if line.endswith("\n") else pieces[-1][:2]
        return shown

    def rest(self) -> str:
        """Whatever is held back, at the end."""
        shown = self._piece(*self._source, self._cut) if self._cut else ""
        for rank, (mark, text) in self._begun.items():
            shown += self._next(rank, (mark if rank else "") + text[self._shown.get(rank, 0) :])
        return shown

    def _piece(self, rank: int | None, mark: str, text: str) -> str:
        line = self._begun.pop(rank, ("", ""))[1] + text
        if not line.endswith("\n"):
            self._begun[rank] = mark, line
            if rank or self._shows_lines() or RULER.startswith(line):
                return ""
            held = _MAY_BE_HIDDEN.search(line)
            begin, self._shown[rank] = self._shown.get(rank, 0), held.start() if held else len(line)
            return self._next(rank, line[begin : self._shown[rank]])
        shown = self._read(rank, line)[self._shown.pop(rank, 0) :]
        return self._next(rank, f"{mark}{shown}" if rank and shown else shown)

    def _next(self, rank: int | None, text: str) -> str:
        """The text, on a line of its own where another's is begun."""
        if not text:
            return ""
        between = "" if self._last in (rank, _NOBODY) else "\n"
        self._last = _NOBODY if text.endswith("\n") else rank
        return between + text


def _texts(stream: IO[str], channel: Channel) -> Iterator[str]:
    """All of the stream until its end, as it is to be shown."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := os.read(stream.fileno(), 65536):
        yield channel.text(decoder.decode(data))
    yield channel.rest()
