"""A terminal for programs under test: what a person sees on it, from the few control sequences that rich writes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

import launching

ROWS = 30
_TOKEN = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|([\r\n\x08])|([^\x1b\r\n\x08]+)")


class Screen:
    """Text of `columns` columns, of which the last ROWS lines can be written to; any unknown sequence is an error."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self.lines = [""]
        self.shows_cursor = True
        self._row = self._column = 0
        self._rest = ""

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)

    def write(self, text: str) -> None:
        text = self._rest + text
        cut = re.search(r"\x1b(\[[\d;?]*)?$", text)
        self._rest = cut[0] if cut else ""
        text = text.removesuffix(self._rest) if self._rest else text
        position = 0
        while position < len(text):
            token = _TOKEN.match(text, position)
            assert token, f"unknown control sequence: {text[position : position + 20]!r}"
            position = token.end()
            numbers, letter, control, plain = token.groups()
            if plain:
                self._print(plain)
            elif control:
                self._move({"\r": (0, -self._column), "\n": (1, 0), "\x08": (0, -1)}[control])
            else:
                self._obey(numbers, letter)

    def _obey(self, numbers: str, letter: str) -> None:
        if letter == "A":
            self._move((-int(numbers or 1), 0))
        elif letter == "K" and numbers == "2":
            self.lines[self._row] = ""
        elif letter in "hl" and numbers == "?25":
            self.shows_cursor = letter == "h"
        else:
            assert letter == "m", f"unknown control sequence: {numbers}{letter}"

    def _move(self, by: tuple[int, int]) -> None:
        self._row = max(self._row + by[0], len(self.lines) - ROWS, 0)
        self._column = max(self._column + by[1], 0)
        while self._row >= len(self.lines):
            self.lines.append("")

    def _print(self, text: str) -> None:
        for character in text:
            if self._column == self.columns:
                self._move((1, -self._column))
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1


def run(
    line: Sequence[str],
    cwd: Path,
    columns: int = 80,
    seen: Callable[[Screen], None] | None = None,
    **variables: str,
) -> tuple[int, Screen]:
    """Runs a command on a terminal: exit code and the terminal at the end. seen: called whenever output pauses."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    environment = launching.environment(TERM="xterm-256color", CI="", **variables)
    process = subprocess.Popen(line, cwd=cwd, env=environment, stdin=its, stdout=its, stderr=its)
    os.close(its)
    screen, rest = Screen(columns), b""
    try:
        while data := rest + os.read(own, 65536):
            text = data.decode(errors="ignore")
            rest = data[len(text.encode()) :]
            screen.write(text)
            if seen and not select.select([own], [], [], 0.02)[0]:
                seen(screen)
    except OSError:  # Linux ends a terminal that nobody holds any more with EIO.
        pass
    os.close(own)
    return process.wait(), screen
