"""Progress bars at the bottom of a terminal while a run trains; lines of text scroll by above them."""

import atexit
import sys
from typing import Any

from hvtrain.system.drawing import Drawing


class LiveDisplay:
    """Begins with the first drawing and redraws only when told to, without a thread of its own. stop clears it.

    Whatever this process writes meanwhile should be whole lines. rich is imported by the first drawing, because a
    launcher often needs none.
    """

    def __init__(self) -> None:
        self._live: Any = None

    @property
    def is_on(self) -> bool:
        return self._live is not None

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
        from rich.console import Console
        from rich.live import Live

        # Other text than ours may hold [brackets], which are no markup; and 2>FILE stays there.
        console = Console(markup=False, emoji=False, highlight=False)
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty())
        self._live.start()
        # A run that is killed must not leave the terminal without a cursor.
        console.show_cursor(True)
        atexit.register(self.stop)


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
