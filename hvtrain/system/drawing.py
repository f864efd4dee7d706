"""Progress bars on a terminal.

Rank 0 sends each drawing as a line of JSON, and its launcher shows it.

A launcher marks each line of a rank, and shows lines of others between them, so only the launcher
itself can draw.
"""

import atexit
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any, TextIO

PREFIX = "hvtrain-drawing: "
# "1" if the launcher of this process draws what it sends. HVTRAIN_ lets it travel to other hosts.
_ASKED = "HVTRAIN_DRAWING"


@dataclass(frozen=True)
class Bar:
    """A progress bar: its name, how much is done of the total, and the text behind it."""

    name: str
    done: float
    total: float
    text: str


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
    """Splits a rank's line into the text to show and the drawing that it holds, if any.

    >>> cut("Epoch 1\\n"), cut(Drawing().line()), cut("..." + Drawing((), ("a",)).line())
    (('Epoch 1\\n', None), ('', Drawing(bars=(), lines=())), ('...\\n', Drawing(bars=(), lines=('a',))))
    """
    before, _, text = line.partition(PREFIX)
    try:
        fields = json.loads(text)
        bars = []
        for bar in fields["bars"]:
            bars.append(Bar(str(bar["name"]), float(bar["done"]), float(bar["total"]), bar["text"]))
        drawing = Drawing(tuple(bars), tuple(map(str, fields["lines"])))
    except (ValueError, TypeError, LookupError):
        return line, None  # Any other line, or one that was cut.
    shown = f"{before}\n" if before else ""
    return shown, drawing


def can_draw(stream: TextIO) -> bool:
    """True for a capable terminal that a person watches."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


def request(is_drawn: bool) -> dict[str, str]:
    """The variable that asks the ranks of a launch to send drawings, or not to."""
    return {_ASKED: "1" if is_drawn else ""}


def is_requested() -> bool:
    """True if this process's launcher draws what it sends."""
    return bool(os.environ.get(_ASKED))


class LiveDisplay:
    """Progress bars at the bottom of a terminal while a run trains; lines of text scroll by above them.

    It begins with the first drawing and redraws only when told to, without a thread of its own.
    stop() clears it.

    Write only whole lines meanwhile. rich is imported when it is needed, because a launcher
    often does without.
    """

    def __init__(self) -> None:
        self._live: Any = None

    def prepare(self) -> None:
        """Loads what the first drawing needs, while the ranks load TensorFlow."""
        if can_draw(sys.stdout):
            console = _console()
            with console.capture():
                # What is printed here is thrown away: it only loads rich.
                console.print(_picture(Drawing((Bar("Run", 0, 1, ""),), ("",))))

    def show(self, drawing: Drawing) -> None:
        """Shows the bars, and below them the lines."""
        # A drawing without bars is the end.
        if not drawing.bars:
            self.stop()
            return
        if not self._live:
            self._begin()
        self._live.update(_picture(drawing), refresh=True)

    def stop(self) -> None:
        # stop may be called several times.
        atexit.unregister(self.stop)
        if self._live:
            self._live.stop()
            self._live = None

    def _begin(self) -> None:
        from rich.live import Live

        console = _console()
        # With 2>FILE, errors must still go to the file.
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty())
        self._live.start()
        # rich hides the cursor, and a run that is killed could not show it again.
        console.show_cursor(True)
        atexit.register(self.stop)


def _console() -> Any:
    """This process's output.

    What users print may hold [brackets], which must not be taken for markup.
    """
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def _picture(drawing: Drawing) -> Any:
    """Bars of one length, and below them the text, wrapped."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    for bar in drawing.bars:
        grid.add_row(bar.name, ProgressBar(total=max(bar.total, 1e-9), completed=bar.done), bar.text)
    return Group(grid, *(Text(line) for line in drawing.lines if line))
