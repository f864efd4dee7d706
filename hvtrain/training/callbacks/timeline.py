"""profile.timeline=true: traces the operations of some steps, and logs where their time went."""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvtrain.errors import StorageError
from hvtrain.system.files import refuse_link, remove
from hvtrain.system.text import counted
from hvtrain.training.callbacks.run_context import RunCallback, RunContext

log = logging.getLogger(__name__)

FOLDER = "profile"
REDUCTIONS = "horovod.json"
NUM_OPERATIONS = 6
# Horovod's activities (its docs/timeline.rst), by the beginnings of their names.
_ACTIVITIES = {
    "NEGOTIATE_": "waiting until all ranks have their gradients",
    "MEMCPY_IN_": "copies into the fusion buffer",
    "MEMCPY_OUT_": "copies out of the fusion buffer",
}
_TRANSFER = "transfer and sum"


class TimelineTrace(RunCallback):
    """Traces some steps of this start (every rank; the chief writes).

    It traces profile.steps steps, after the first profile.first_step steps: a few more if a call of the
    graph runs several steps, fewer if the run ends first. In the run folder, profile/horovod.json is for
    chrome://tracing or ui.perfetto.dev, and the rest of profile/ for TensorBoard's profiler.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.folder = self.run.folder / FOLDER
        self.first_step = self.position.start_step + self.run.config.profile.first_step
        self._begin_step: int | None = None
        self._ended = False

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        if self._begin_step is not None or self.step < self.first_step:
            return

        self._begin_step = self.step
        self.comm.on_chief(self._make_folder)
        self.strategy.timeline.start(self.folder / REDUCTIONS)
        if self.is_chief:
            # Level 3 includes individual operations.
            options = tf.profiler.experimental.ProfilerOptions(
                host_tracer_level=3, python_tracer_level=0
            )
            tf.profiler.experimental.start(str(self.folder), options)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        # Counted from the step at which the trace began, which is later than first_step
        # if a call of the graph crossed first_step.
        num_steps = self.run.config.profile.steps
        if self._begin_step is not None and self.step >= self._begin_step + num_steps:
            self._end()

    def on_train_end(self, logs: Any) -> None:
        if self._begin_step is None:
            log.warning(
                f"profile.timeline traced nothing: the run ended before step {self.first_step + 1:,}; "
                "lower profile.first_step"
            )
        self._end()

    def _make_folder(self) -> None:
        refuse_link(self.folder, StorageError, "remove it")
        self.folder.mkdir(exist_ok=True)
        # Otherwise this start's times would include the traces of an earlier one.
        for old in [self.folder / REDUCTIONS, *self.folder.rglob("*.xplane.pb")]:
            remove(old)

    def _end(self) -> None:
        if self._begin_step is None or self._ended:
            return

        self._ended = True
        self.strategy.timeline.stop()
        if self.is_chief:
            tf.profiler.experimental.stop()
            for line in time_by_operation(self.folder, self.step - self._begin_step):
                log.info(line)
            viewers = {
                REDUCTIONS: "ui.perfetto.dev or chrome://tracing",
                "*.xplane.pb": f"tensorboard --logdir {self.folder} (with tensorboard-plugin-profile)",
            }
            for pattern, viewer in viewers.items():
                path = next(self.folder.rglob(pattern), None)
                if path:
                    log.info("%s, for %s", path, viewer)


def time_by_operation(folder: Path, steps: int) -> list[str]:
    """Returns lines of text with the milliseconds per traced step of each kind of operation.

    Args:
        folder: The folder of the traces.
        steps: The number of traced steps.
    """
    reduction_seconds = reductions(folder / REDUCTIONS)
    operation_seconds = sorted(operations(folder).items(), key=lambda item: -item[1])
    return [
        f"traced {counted(steps, 'step')} in {folder}; time per step on rank 0 (times overlap):",
        *(
            f"  {1000 * seconds / steps:9.3f} ms  {name}"
            for name, seconds in (*reduction_seconds.items(), *operation_seconds[:NUM_OPERATIONS])
        ),
    ]


def reductions(path: Path) -> dict[str, float]:
    """Returns, by kind of activity, the seconds during which Horovod did it for at least one gradient."""
    if not path.exists():  # One rank alone has no reductions.
        return {}
    # Unless Horovod has closed the JSON list, its last event ends with a comma.
    text = path.read_text("utf-8").strip()
    if not text.endswith("]"):
        text = text.rstrip(",") + "]"
    events = json.loads(text)

    # Each gradient is a "process" (pid), whose activities are nested: E ends the innermost B.
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    open_events: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "B":
            open_events[event["pid"]].append((event["name"], event["ts"]))
        elif event["ph"] == "E" and open_events[event["pid"]]:
            name, begin = open_events[event["pid"]].pop()
            activity = _activity(name)
            if activity:
                spans[activity].append((begin, event["ts"]))

    # Time stamps are in microseconds.
    return {
        name: union_length(spans[name]) / 1e6
        for name in (*_ACTIVITIES.values(), _TRANSFER)
        if spans[name]
    }


def _activity(name: str) -> str | None:
    for prefix, activity in _ACTIVITIES.items():
        if name.startswith(prefix):
            return activity
    # MPI_ALLREDUCE, GLOO_ALLREDUCE and NCCL_ALLREDUCE are transfers;
    # ALLREDUCE encloses all activities.
    return _TRANSFER if "_ALL" in name else None


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of spans (begin, end).

    >>> union_length([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total = 0.0
    reached = float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def operations(folder: Path) -> dict[str, float]:
    """Returns the seconds spent in TensorFlow's operations by type, summed over all threads and devices."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    seconds: dict[str, float] = defaultdict(float)
    for path in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        for plane in space.planes:
            for event in chain.from_iterable(line.events for line in plane.lines):
                # Operations are named NAME:TYPE; other names are TensorFlow's own overhead.
                name = plane.event_metadata[event.metadata_id].name
                _, colon, kind = name.rpartition(":")
                if colon and kind.isidentifier() and "::" not in name:
                    # On some processors oneDNN's operations, whose types have
                    # a prefix, replace TensorFlow's.
                    seconds[kind.removeprefix("_Mkl").removeprefix("Native")] += (
                        event.duration_ps / 1e12
                    )
    return seconds
