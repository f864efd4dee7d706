"""Progress bars at the bottom of a terminal while a run trains; log lines scroll by above them."""

import atexit
from dataclasses import dataclass

import tensorflow as tf
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hvtrain.step_timing import StepTimes

GIB = 1 << 30


@dataclass(frozen=True)
class Bar:
    """A progress bar: its name, how much is done of the total, and the text behind it."""

    name: str
    done: float
    total: float
    words: str


class LiveDisplay:
    """Redraws only when told to, without a thread of its own. stop clears it."""

    def __init__(self) -> None:
        self._live = Live(auto_refresh=False, transient=True)

    def start(self) -> None:
        self._live.start()
        # A run that is killed must not leave the terminal without a cursor.
        self._live.console.show_cursor(True)
        atexit.register(self.stop)

    def show(self, bars: list[Bar], lines: list[str]) -> None:
        """Shows the bars, and below them the lines, which are cut at the terminal's width."""
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        grid.expand = True
        for bar in bars:
            grid.add_row(bar.name, ProgressBar(total=max(bar.total, 1e-9), completed=bar.done), bar.words)
        texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line]
        self._live.update(Group(grid, *texts), refresh=True)

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self._live.stop()


def shares(times: StepTimes, num_ranks: int) -> str:
    """Where the time of these steps went on this rank, in percent; empty if there was none.

    >>> shares(StepTimes(steps=10, data=0.1, compute=0.7, communication=0.2), num_ranks=2)
    'data 10%, compute 70%, communication 20%'
    """
    if times.whole <= 0:
        return ""
    parts = {"data": times.data, "compute": times.compute}
    if num_ranks > 1:
        parts["communication"] = times.communication
    return ", ".join(f"{name} {seconds / times.whole:.0%}" for name, seconds in parts.items())


def gpu_memory() -> str:
    """Used and peak memory of this process's GPU, in words; empty without a GPU."""
    if not tf.config.list_logical_devices("GPU"):
        return ""
    used = tf.config.experimental.get_memory_info("GPU:0")
    return f"GPU memory {used['current'] / GIB:.1f} GiB, peak {used['peak'] / GIB:.1f} GiB"
