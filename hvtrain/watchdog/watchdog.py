"""A watchdog as a run uses it. This one watches nobody and costs nothing; `start` makes one that watches."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from hvtrain.watchdog.judge import Verdict
from hvtrain.watchdog.progress import Progress


class Watchdog:
    """One rank's watchdog. Nothing of it is collective.

    folder: the run folder, for stacks and for advice on how to go on; set it once it is known. tell: gets the reason
    for which the run ends, as soon as this rank knows it and from any thread.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.folder: Path | None = None
        self.tell: Callable[[str], None] = lambda text: None
        self.progress = progress or Progress()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """The phase of what happens inside, one of progress.py's."""
        return self.progress.phase(name)

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks why this one leaves them."""

    def cause(self, seconds: float = 3.0) -> Verdict | None:
        """Why the others are gone; None if nobody knows. The main thread asks, and then ends the process itself."""
        return None

    def wait(self) -> Verdict | None:
        """Waits for the end of the run. Returns why it failed, or None once rank 0 has stopped its watchdog."""
        return None

    def signal_rank_0(self, number: int) -> None:
        """Sends rank 0 a signal that came to this rank, unless one comes to rank 0 itself."""

    @property
    def spokesman(self) -> int:
        """The first of the ranks that are left."""
        return 0

    def stop(self) -> None:
        """Stops watching; all stop with rank 0. Another may be started."""
