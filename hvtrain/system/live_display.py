"""Progress bars at the bottom of a terminal while a run trains; lines of text scroll by above them."""

import atexit
import sys
from typing import Any

from hvtrain.system.drawing import Bar, Drawing, can_draw


class LiveDisplay:
    """Begins with the first drawing and redraws only when told to, without a thread of its own. stop clears it.

    Whatever this process writes meanwhile should be whole lines. rich is imported when it is needed, because a launcher
    often does without.
    """

    def __init__(self) -> None:
        self._live: Any = None

    def prepare(self) -> None:
        """Does what only the first drawing needs, so that a launcher does it while its ranks load TensorFlow."""
        if can_draw(sys.stdout):
            console = _console()
            with console.capture():
                console.print(_picture(Drawing((Bar("Run", 0, 1, ""),), ("",))))

    def show(self, drawing: Drawing) -> None:
        """Shows the bars, and below them the lines."""
        if not drawing.bars:
            self.stop()
            return
        if not self._live:
            self._begin()
        self._live.update(_picture(drawing), refresh=True)

    def stop(self) -> None:
        atexit.unregister(self.stop)
        if self._live:
            self._live.stop()
            self._live = None

    def _begin(self) -> None:
        from rich.live import Live

        console = _console()
        # What 2>FILE redirects stays there.
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty())
        self._live.start()
        # A run that is killed must not leave the terminal without a cursor.
        console.show_cursor(True)
        atexit.register(self.stop)


def _console() -> Any:
    """This process's output; what others print may hold [brackets], which are no markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def _picture(drawing: Drawing) -> Any:
    """Bars of one length, and each line on as many lines of the terminal as it needs."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    for bar in drawing.bars:
        grid.add_row(bar.name, ProgressBar(total=max(bar.total, 1e-9), completed=bar.done), bar.words)
    return Group(grid, *(Text(line) for line in drawing.lines if line))
