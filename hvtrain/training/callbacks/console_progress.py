"""Progress on rank 0's console: a line per epoch; within long epochs bars on a terminal, or a line every 30 s."""

import logging
import sys
import time
from typing import Any

from hvtrain.step.step_timing import StepTimes
from hvtrain.system import drawing
from hvtrain.system.console import is_launched
from hvtrain.system.drawing import Bar, Drawing, Sender
from hvtrain.system.live_display import LiveDisplay
from hvtrain.training.callbacks.position import RunCallback
from hvtrain.training.callbacks.resources import gpu, shares
from hvtrain.training.callbacks.speed import Throughput

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_DRAWINGS = 0.5


class Progress(RunCallback):
    """Says where the run is, how fast it goes and how much is left (chief only).

    Speeds and the time that is left count the steps of this start, without its first call of the graph, which traces.
    """

    def __init__(self, *place: Any, throughput: Throughput) -> None:
        super().__init__(*place)
        self._throughput = throughput
        self._display = display()
        self._started: tuple[float, int] | None = None  # when the first call had ended, and after which step
        self._first_in_epoch: tuple[float, int] | None = None
        self._last_step_at = self._last_line = 0.0
        self._times_before: StepTimes | None = None

    def on_train_end(self, logs: Any = None) -> None:
        if self._display:
            self._display.stop()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._last_line = time.monotonic()
        self._first_in_epoch = (self._last_line, self.position.step) if self._started else None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        now = self._last_step_at = time.monotonic()
        self._started = self._started or (now, self.position.step)
        self._first_in_epoch = self._first_in_epoch or (now, self.position.step)
        pause = SECONDS_BETWEEN_DRAWINGS if self._display else SECONDS_BETWEEN_LINES
        if self.position.in_epoch and now - self._last_line >= pause:
            self._last_line = now
            if self._display:
                self._display.show(self._drawing(logs))
            else:
                log.info("%s", self._line(logs))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        log.info("%s", self._line(logs))

    @property
    def _steps_of_epoch(self) -> tuple[int, int]:
        """Steps done in the epoch, and the number of its steps."""
        plan = self.position.plan
        begin = plan.shift + self.position.epoch * plan.steps_per_epoch
        return self.position.step - begin, min(plan.steps_per_epoch, plan.num_steps - begin)

    def _line(self, logs: dict[str, Any]) -> str:
        """What Keras's bar shows, for what was done of the epoch, and how far the run is."""
        plan, step = self.position.plan, self.position.step
        done, total = self._steps_of_epoch
        parts = [f"{done:,}/{total:,} steps", *self._step_time(), *self._numbers(logs)]
        line = f"{self._epoch()}: {', '.join(parts)}; {step / plan.num_steps:.0%} of the run"
        return ", ".join([line, *self._left()])

    def _drawing(self, logs: dict[str, Any]) -> Drawing:
        plan, step = self.position.plan, self.position.step
        done, total = self._steps_of_epoch
        whole = ", ".join([f"{step / plan.num_steps:.0%}", *self._left()])
        epoch = ", ".join([f"{done:,}/{total:,} steps", *self._step_time()])
        numbers = [*self._numbers(logs), f"learning rate {float(self.model.optimizer.learning_rate):.3g}"]
        bars = Bar("Run", step, plan.num_steps, whole), Bar(self._epoch(), done, total, epoch)
        return Drawing(bars, (", ".join(numbers), "; ".join(filter(None, [self._shares(), gpu()]))))

    def _shares(self) -> str:
        """Shares of the time since the last drawing, and the slowest rank of the last epoch."""
        marks, size = self.run.strategy.marks, self.run.topology.size
        times = marks.times()
        text = shares(times - self._times_before, size) if self._times_before and marks.timed else ""
        self._times_before = times
        split = self._throughput.split
        return f"{text}; slowest: rank {split.slowest_rank} on {split.slowest_host}" if split and size > 1 else text

    def _epoch(self) -> str:
        return f"Epoch {self.position.epoch + 1}/{self.position.plan.num_epochs}"

    def _step_time(self) -> list[str]:
        if seconds := _seconds_per_step(self._first_in_epoch, (self._last_step_at, self.position.step)):
            return [f"{1000 * seconds:.3g} ms/step" if seconds < 1 else f"{seconds:.3g} s/step"]
        return []

    def _numbers(self, logs: dict[str, Any]) -> list[str]:
        """Loss, metrics and speed."""
        parts = [f"{name} {float(value):.4g}" for name, value in logs.items() if name != "examples/s"]
        if speed := logs.get("examples/s"):
            parts.append(f"{speed:,.0f} examples/s")
            if unit := self.run.task.unit(self.run.source):
                parts.append(f"{speed * unit[1]:,.0f} {unit[0]}/s")
        return parts

    def _left(self) -> list[str]:
        """The time left of the whole run."""
        left = self.position.plan.num_steps - self.position.step
        seconds = left * _seconds_per_step(self._started, (time.monotonic(), self.position.step))
        return [f"{_clock(seconds)} left"] if seconds else []


def display() -> LiveDisplay | Sender | None:
    """Bars on the launcher's terminal, or on this process's own; None where no person watches one."""
    if drawing.is_requested():
        return Sender()
    # mpirun gives its ranks terminals of their own.
    return LiveDisplay() if drawing.can_draw(sys.stdout) and not is_launched() else None


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
