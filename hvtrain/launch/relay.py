"""A launcher's error output passed through as it comes, but for what the last line says better."""

from __future__ import annotations

import codecs
import os
import sys
from typing import IO

from hvtrain.launch.listen import RULER, Listener
from hvtrain.launch.output import MARK


class Relay:
    """Unlike RankOutput it leaves standard output to the launcher, which writes it itself."""

    merged = False

    def __init__(self) -> None:
        self.listener = Listener()
        self._begun = ""
        self._begun_by: dict[str, str] = {}
        self._shown = 0

    def take(self, stream: IO[str]) -> None:
        """Passes on all of the stream until its end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while data := os.read(stream.fileno(), 65536):
            _write(self.text(decoder.decode(data)))
        _write(self._begun[self._shown :] + self.listener.rest())

    def text(self, text: str) -> str:
        """What is to be shown now that this has come: whole lines, and a begun one that cannot become a ruler."""
        *lines, begun = (self._begun + text).split("\n")
        shown = []
        for line in lines:
            shown.append(self._line(f"{line}\n")[self._shown :])
            self._shown = 0
        self._begun = begun
        if not RULER.startswith(begun) and not self.listener.is_holding:
            shown.append(begun[self._shown :])
            self._shown = len(begun)
        return "".join(shown)

    def _line(self, line: str) -> str:
        own, *pieces = MARK.split(line)
        for rank, text in zip(pieces[::3], pieces[2::3]):
            whole = self._begun_by.pop(rank, "") + text
            if whole.endswith("\n"):
                self.listener.rank(int(rank), whole)
            else:
                self._begun_by[rank] = whole
        return line if pieces else self.listener.launcher(own)


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
