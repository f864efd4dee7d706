"""Progress bars on a terminal. Rank 0 sends each drawing as a line of JSON to its launcher.

The launcher shows the drawings. A rank cannot draw on the terminal itself, since the launcher marks
the rank's lines and mixes them with those of other ranks.
"""

import atexit
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

PREFIX = "hvtrain-drawing: "
# "1" if the launcher shows the drawings of its ranks. Variables whose names begin with HVTRAIN_ are
# passed on to other hosts.
_VARIABLE = "HVTRAIN_DRAWING"


@dataclass(frozen=True)
class Bar:
    """A progress bar: its name, how much of the total is done, and the text after it."""

    name: str
    done: float
    total: float
    text: str


@dataclass(frozen=True)
class Drawing:
    """Bars, with lines of text below them. A drawing without bars ends the display."""

    bars: tuple[Bar, ...] = ()
    lines: tuple[str, ...] = ()

    def line(self) -> str:
        return f"{PREFIX}{json.dumps(asdict(self))}\n"


class Sender:
    """Sends drawings to the launcher of this process."""

    def show(self, drawing: Drawing) -> None:
        # A single write: mpirun puts a mark before each piece that it passes on.
        sys.stdout.write(drawing.line())
        sys.stdout.flush()


def split_line(line: str) -> tuple[str, Drawing | None]:
    """Splits a rank's line into the text to show and the drawing in it, if any.

    >>> split_line("Epoch 1\\n"), split_line(Drawing().line()), split_line("..." + Drawing((), ("a",)).line())
    (('Epoch 1\\n', None), ('', Drawing(bars=(), lines=())), ('...\\n', Drawing(bars=(), lines=('a',))))
    """
    before, _, text = line.partition(PREFIX)
    try:
        fields = json.loads(text)
        drawing = Drawing(tuple(Bar(**bar) for bar in fields["bars"]), tuple(fields["lines"]))
    except (ValueError, TypeError, LookupError):
        return line, None  # A line without a drawing, or one that was truncated.
    visible = f"{before}\n" if before else ""
    return visible, drawing


def can_draw() -> bool:
    """True if stdout is a capable terminal that a person watches."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


def request(is_drawn: bool) -> dict[str, str]:
    """Returns the environment variable that tells the ranks of a launch whether to send drawings."""
    return {_VARIABLE: "1" if is_drawn else ""}


def is_requested() -> bool:
    """True if the launcher of this process shows the drawings that the process sends."""
    return bool(os.environ.get(_VARIABLE))


class LiveDisplay:
    """Progress bars at the bottom of a terminal while a run trains; other output scrolls above.

    The display begins with the first drawing and is redrawn only on request, without a thread.
    stop() clears it. Write only whole lines while it is shown.

    rich is imported only when needed, because most launches do not draw.
    """

    _live: Any = None

    def show(self, drawing: Drawing) -> None:
        """Shows the bars with the lines below them; without bars, ends the display."""
        if not drawing.bars:
            self.stop()
            return
        if not self._live:
            from rich.console import Console
            from rich.live import Live

            # Users may print [brackets], which must not be taken as markup.
            console = Console(markup=False, emoji=False, highlight=False)
            # With 2>FILE, errors must still go to the file.
            self._live = Live(
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
            # rich has hidden the cursor, which a killed run could not show again.
            console.show_cursor(True)
            atexit.register(self.stop)
        self._live.update(_picture(drawing), refresh=True)

    def stop(self) -> None:
        atexit.unregister(self.stop)
        if self._live:
            self._live.stop()
            self._live = None


def _picture(drawing: Drawing):
    """Returns a rich renderable: bars of equal length, and below them the text, wrapped."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    for bar in drawing.bars:
        grid.add_row(
            bar.name, ProgressBar(total=max(bar.total, 1e-9), completed=bar.done), bar.text
        )
    return Group(grid, *(Text(line) for line in drawing.lines if line))
