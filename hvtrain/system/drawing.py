"""Rank 0's progress as a drawing, and the line of JSON from which its launcher draws it on the terminal. Pure.

A launcher marks each line of a rank, and shows lines of others between them, so only the launcher itself can draw.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import TextIO

PREFIX = "hvtrain-drawing: "
# "1" if the launcher of this process draws what it sends. HVTRAIN_ lets it travel to other hosts.
_ASKED = "HVTRAIN_DRAWING"


@dataclass(frozen=True)
class Bar:
    """A progress bar: its name, how much is done of the total, and the text behind it."""

    name: str
    done: float
    total: float
    words: str


@dataclass(frozen=True)
class Drawing:
    """Bars, and lines of text below them. One without bars ends the display."""

    bars: tuple[Bar, ...] = ()
    lines: tuple[str, ...] = ()

    def line(self) -> str:
        return f"{PREFIX}{json.dumps(asdict(self))}\n"


class Sender:
    """Sends drawings to the launcher of this process."""

    def show(self, drawing: Drawing) -> None:
        # One write: what mpirun passes on in pieces has a mark in each.
        sys.stdout.write(drawing.line())
        sys.stdout.flush()

    def stop(self) -> None:
        self.show(Drawing())


def cut(line: str) -> tuple[str, Drawing | None]:
    """What to show of a rank's line, and the drawing that stood in it.

    >>> cut("Epoch 1\\n"), cut(Drawing().line()), cut("..." + Drawing((), ("a",)).line())
    (('Epoch 1\\n', None), ('', Drawing(bars=(), lines=())), ('...\\n', Drawing(bars=(), lines=('a',))))
    """
    before, _, text = line.partition(PREFIX)
    try:
        found = json.loads(text)
        bars = [Bar(str(bar["name"]), float(bar["done"]), float(bar["total"]), bar["words"]) for bar in found["bars"]]
        drawing = Drawing(tuple(bars), tuple(map(str, found["lines"])))
    except (ValueError, TypeError, LookupError):
        return line, None
    return f"{before}\n" if before else "", drawing


def can_draw(stream: TextIO) -> bool:
    """True for a capable terminal that a person watches."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


def request(is_drawn: bool) -> dict[str, str]:
    """The variable that asks the ranks of a launch to send drawings, or not to."""
    return {_ASKED: "1" if is_drawn else ""}


def is_requested() -> bool:
    """True if this process's launcher draws what it sends."""
    return bool(os.environ.get(_ASKED))
