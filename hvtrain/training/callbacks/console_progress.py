"""Progress on rank 0's console: a line an epoch, and within long epochs one that moves, or one every 30 seconds."""

import logging
import shutil
import sys
import time
from typing import Any

from hvtrain.system.console import is_launched
from hvtrain.training.callbacks.position import RunCallback

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_MOVES = 0.2


class Progress(RunCallback):
    """Says where the run is, how fast it goes and how much is left (chief only).

    Speeds and the time that is left count the steps of this start, without its first call of the graph, which traces.
    """

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        # A launcher prefixes each line, which breaks a moving one; mpirun gives its ranks terminals nevertheless.
        self._moves = sys.stdout.isatty() and not is_launched()
        self._started: tuple[float, int] | None = None  # when the first call had ended, and after which step
        self._first_in_epoch: tuple[float, int] | None = None
        self._last_step_at = self._last_line = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._last_line = time.monotonic()
        self._first_in_epoch = (self._last_line, self.position.step) if self._started else None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        now = self._last_step_at = time.monotonic()
        self._started = self._started or (now, self.position.step)
        self._first_in_epoch = self._first_in_epoch or (now, self.position.step)
        pause = SECONDS_BETWEEN_MOVES if self._moves else SECONDS_BETWEEN_LINES
        if self.position.in_epoch and now - self._last_line >= pause:
            self._last_line = now
            line = self._line(logs)
            if self._moves:
                sys.stdout.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
                sys.stdout.flush()
            else:
                log.info("%s", line)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self._moves:
            sys.stdout.write("\r\x1b[K")
        log.info("%s", self._line(logs))

    def _line(self, logs: dict[str, Any]) -> str:
        """What Keras's bar shows, for what was done of the epoch, and how far the run is."""
        plan, step = self.position.plan, self.position.step
        begin = plan.shift + self.position.epoch * plan.steps_per_epoch
        parts = [f"{step - begin:,}/{min(plan.steps_per_epoch, plan.num_steps - begin):,} steps"]
        if seconds := _seconds_per_step(self._first_in_epoch, (self._last_step_at, step)):
            parts.append(f"{1000 * seconds:.3g} ms/step" if seconds < 1 else f"{seconds:.3g} s/step")
        parts += [f"{name} {float(value):.4g}" for name, value in logs.items() if name != "examples/s"]
        if speed := logs.get("examples/s"):
            parts.append(f"{speed:,.0f} examples/s")
            if unit := self.run.task.unit(self.run.source):
                parts.append(f"{speed * unit[1]:,.0f} {unit[0]}/s")
        epoch, done = f"Epoch {self.position.epoch + 1}/{plan.num_epochs}", f"{step / plan.num_steps:.0%} of the run"
        line = f"{epoch}: {', '.join(parts)}; {done}"
        left = (plan.num_steps - step) * _seconds_per_step(self._started, (time.monotonic(), step))
        return f"{line}, {_clock(left)} left" if left else line


def _seconds_per_step(start: tuple[float, int] | None, end: tuple[float, int]) -> float:
    """Mean time of a step between two pairs of time and step; 0 if there was none."""
    return (end[0] - start[0]) / (end[1] - start[1]) if start and end[1] > start[1] else 0.0


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(59.6), _clock(3725)
    ('1:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
