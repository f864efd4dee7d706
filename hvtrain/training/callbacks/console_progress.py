"""Shows progress on rank 0's console: a line per epoch, and bars or lines within long epochs."""

import logging
import time
from typing import Any

import tensorflow as tf

from hvtrain.keras.devices import uuid_in_use
from hvtrain.step.step_timing import StepTimes
from hvtrain.system import drawing, resources
from hvtrain.system.console import is_launched
from hvtrain.system.drawing import Bar, Drawing, LiveDisplay, Sender
from hvtrain.system.text import duration
from hvtrain.training.callbacks.run_context import Logs, RunCallback, RunContext

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_DRAWINGS = 0.5
GIB = 1 << 30

# A reading of time.monotonic(), and the steps of the run that were done by then.
Moment = tuple[float, int]


class Progress(RunCallback):
    """Shows a run's progress, speed and remaining time (chief only).

    The time per step is the mean since the epoch began; the remaining time uses the mean since this start
    of the run. Steps of the first call of the graph, which is slow because it traces, do not count.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._display = display()
        self._first_call: Moment | None = None  # When the first call of this start ended.
        self._last_step_at = 0.0
        self._times_before: StepTimes | None = None

    def on_train_end(self, logs: Any) -> None:
        if self._display:
            self._display.show(Drawing())  # Ends the display.

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self._last_shown_at = time.monotonic()
        # The first epoch of this start begins with the call that traces, so
        # its steps count from the end of that call.
        self._first_in_epoch: Moment | None = None
        if self._first_call:
            self._first_in_epoch = (self._last_shown_at, self.step)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        now = time.monotonic()
        self._last_step_at = now
        self._first_call = self._first_call or (now, self.step)
        self._first_in_epoch = self._first_in_epoch or (now, self.step)
        pause = SECONDS_BETWEEN_DRAWINGS if self._display else SECONDS_BETWEEN_LINES
        if not self.position.in_epoch or now - self._last_shown_at < pause:
            return

        self._last_shown_at = now
        if self._display:
            self._display.show(self._drawing(logs))
        else:
            log.info(self._line(logs))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        log.info(self._line(logs))

    @property
    def _steps_of_epoch(self) -> tuple[int, int]:
        """The number of steps done in this epoch, and the number of steps in the epoch."""
        plan = self.plan
        begin = plan.shift + self.position.epoch * plan.steps_per_epoch
        return self.step - begin, min(plan.steps_per_epoch, plan.num_steps - begin)

    @property
    def _share_of_run(self) -> str:
        return f"{self.step / self.plan.run_steps:.0%}"

    def _line(self, logs: Logs) -> str:
        """Formats an epoch's steps, speed and metrics, the share of the run that is done, and the time left."""
        done, total = self._steps_of_epoch
        parts = [f"{done:,}/{total:,} steps", *self._step_time(), *self._numbers(logs)]
        text = f"{self._epoch()}: {', '.join(parts)}; {self._share_of_run} of the run"
        return ", ".join([text, *self._time_left()])

    def _drawing(self, logs: Logs) -> Drawing:
        done, total = self._steps_of_epoch
        run_text = ", ".join([self._share_of_run, *self._time_left()])
        epoch_text = ", ".join([f"{done:,}/{total:,} steps", *self._step_time()])
        numbers = [
            *self._numbers(logs),
            f"learning rate {float(self.model.optimizer.learning_rate):.3g}",
        ]
        time_and_gpu = filter(None, [self._shares(), gpu()])
        return Drawing(
            bars=(
                Bar("Run", self.step, self.plan.run_steps, run_text),
                Bar(self._epoch(), done, total, epoch_text),
            ),
            lines=(", ".join(numbers), "; ".join(time_and_gpu)),
        )

    def _shares(self) -> str:
        """Describes how the time since the last drawing was spent, and names the slowest rank of the last epoch."""
        marks = self.strategy.marks
        size = self.run.topology.size
        times = marks.times()
        parts = []
        if self._times_before and marks.timed:
            parts.append(shares(times - self._times_before, size))
        self._times_before = times

        split = self.report.split
        if split and size > 1:
            parts.append(f"slowest: rank {split.slowest_rank} on {split.slowest_host}")
        return "; ".join(filter(None, parts))

    def _epoch(self) -> str:
        return f"Epoch {self.position.epoch + 1}/{self.plan.run_epochs}"

    def _step_time(self) -> list[str]:
        # Up to the last step, so that the time of an epoch excludes its validation.
        seconds = _seconds_per_step(self._first_in_epoch, (self._last_step_at, self.step))
        if seconds >= 1:
            return [f"{seconds:.3g} s/step"]
        return [f"{1000 * seconds:.3g} ms/step"] if seconds else []

    def _numbers(self, logs: Logs) -> list[str]:
        """Formats loss, metrics and speed."""
        parts = [
            f"{name} {float(value):.4g}" for name, value in logs.items() if name != "examples/s"
        ]
        speed = logs.get("examples/s")
        if speed:
            parts.append(f"{speed:,.0f} examples/s")
            unit = self.run.task.unit(self.run.source)
            if unit:
                name, per_example = unit
                parts.append(f"{speed * per_example:,.0f} {name}/s")
        return parts

    def _time_left(self) -> list[str]:
        """Formats the remaining time of the run; empty if it is not known yet."""
        # Up to now, so that validations and checkpoints count: the rest of the run has them too.
        steps = self.plan.run_steps - self.step
        seconds = steps * _seconds_per_step(self._first_call, (time.monotonic(), self.step))
        return [f"{duration(round(seconds))} left"] if seconds else []


def display() -> LiveDisplay | Sender | None:
    """Returns an object that draws on the launcher's terminal or this process's own; None if there is no terminal."""
    if drawing.is_requested():
        return Sender()
    # mpirun gives each rank its own terminal, so can_draw() does not suffice.
    if drawing.can_draw() and not is_launched():
        return LiveDisplay()
    return None


def shares(times: StepTimes, num_ranks: int) -> str:
    """Describes how this rank spent the time of these steps, in percent; empty if they took no time.

    >>> shares(StepTimes(steps=10, data=0.1, compute=0.7, communication=0.2), num_ranks=2)
    'data 10%, compute 70%, communication 20%'
    """
    if times.whole <= 0:
        return ""
    parts = {"data": times.data, "compute": times.compute}
    if num_ranks > 1:
        parts["communication"] = times.communication
    return ", ".join(f"{name} {seconds / times.whole:.0%}" for name, seconds in parts.items())


def gpu() -> str:
    """Describes this process's GPU: used and peak memory, and how busy it is; empty without a GPU."""
    if not tf.config.list_logical_devices("GPU"):
        return ""
    # Less than nvidia-smi shows: TensorFlow reserves more memory than its tensors take.
    used = tf.config.experimental.get_memory_info("GPU:0")
    text = f"GPU memory {used['current'] / GIB:.1f} GiB, peak {used['peak'] / GIB:.1f} GiB"
    busy = resources.busy_percent(uuid_in_use())
    if busy is not None:  # Not every driver reports it.
        text += f"; GPU busy {busy}%"
    return text


def _seconds_per_step(start: Moment | None, end: Moment) -> float:
    """Returns the mean seconds per step between two moments; 0 if there was no step."""
    if start is None or end[1] <= start[1]:
        return 0.0
    return (end[0] - start[0]) / (end[1] - start[1])
