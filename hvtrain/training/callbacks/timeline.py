"""profile.timeline=true: traces some steps, Horovod's operations and TensorFlow's, and says where their time went."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvtrain.config.schema import ProfileConfig
from hvtrain.strategies.base import Strategy
from hvtrain.training.callbacks.position import Position

log = logging.getLogger(__name__)

FOLDER, REDUCTIONS = "profile", "horovod.json"
NUM_OPERATIONS = 6
# Horovod's names of activities, by their ends and beginnings (its docs/timeline.rst).
_KINDS = {
    "NEGOTIATE_": "waiting until all ranks have their gradients",
    "MEMCPY_IN_": "copies into the fusion buffer",
    "MEMCPY_OUT_": "copies out of it",
}
_TRANSFER = "transfer and sum"


class TimelineTrace(keras.callbacks.Callback):
    """Traces profile.steps steps or more, from profile.first_step of this start on (every rank; the chief writes).

    In the run folder, profile/horovod.json is for chrome://tracing or ui.perfetto.dev, and what is beside it for
    TensorBoard's profiler.
    """

    def __init__(self, strategy: Strategy, position: Position, folder: Path, config: ProfileConfig) -> None:
        super().__init__()
        self.strategy = strategy
        self.position = position
        self.folder = folder / FOLDER
        self.first = position.start_step + config.first_step
        self.last = self.first + config.steps
        self._began: int | None = None
        self._ended = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._began is None and self.position.step >= self.first:
            self._began = self.position.step
            self.strategy.comm.on_chief(lambda: self.folder.mkdir(exist_ok=True))
            self.strategy.timeline.start(self.folder / REDUCTIONS)
            if self.strategy.topology.is_chief:
                # 3: single operations too.
                options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0)
                tf.profiler.experimental.start(str(self.folder), options)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._began is not None and not self._ended and self.position.step >= self.last:
            self._end(self._began)

    def on_train_end(self, logs: Any = None) -> None:
        if self._began is None:
            log.warning("profile.timeline traced nothing: the run ended before step %s", f"{self.first + 1:,}")
        elif not self._ended:
            self._end(self._began)

    def _end(self, began: int) -> None:
        self._ended = True
        self.strategy.timeline.stop()
        if self.strategy.topology.is_chief:
            tf.profiler.experimental.stop()
            steps = self.position.step - began
            for line in time_by_operation(self.folder, steps):
                log.info("%s", line)


def time_by_operation(folder: Path, steps: int) -> list[str]:
    """Lines that say where the time of the traced steps went."""
    lines = [f"{steps} steps are traced in {folder}; of a step (chief's times, which overlap):"]
    parts = reductions(folder / REDUCTIONS) if (folder / REDUCTIONS).exists() else {}
    for name, seconds in parts.items():
        lines.append(f"  {1000 * seconds / steps:9.3f} ms  {name}")
    for name, seconds in sorted(operations(folder).items(), key=lambda item: -item[1])[:NUM_OPERATIONS]:
        lines.append(f"  {1000 * seconds / steps:9.3f} ms  {name}")
    return lines


def reductions(path: Path) -> dict[str, float]:
    """Seconds in which Horovod did each kind of thing for at least one gradient."""
    text = path.read_text(encoding="utf-8").strip()
    events = json.loads(text if text.endswith("]") else text.rstrip(",") + "]")
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    under_way: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "B":
            under_way[event["pid"]].append((event["name"], event["ts"]))
        elif event["ph"] == "E" and under_way[event["pid"]]:
            name, begin = under_way[event["pid"]].pop()
            if kind := _kind(name):
                spans[kind].append((begin, event["ts"]))
    return {kind: covered(spans[kind]) / 1e6 for kind in (*_KINDS.values(), _TRANSFER) if spans[kind]}


def _kind(name: str) -> str | None:
    for beginning, kind in _KINDS.items():
        if name.startswith(beginning):
            return kind
    # MPI_ALLREDUCE, GLOO_ALLREDUCE, NCCL_ALLREDUCE; ALLREDUCE itself is all of it.
    return _TRANSFER if "_ALL" in name else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def operations(folder: Path) -> dict[str, float]:
    """Seconds in TensorFlow's operations by type, of all threads and devices together."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    seconds: dict[str, float] = defaultdict(float)
    for path in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(path.read_bytes())
        for plane in space.planes:
            for line in plane.lines:
                for event in line.events:
                    # NAME:TYPE is an operation; all else is what TensorFlow does around them.
                    name = plane.event_metadata[event.metadata_id].name
                    _, colon, kind = name.rpartition(":")
                    if colon and kind.isidentifier() and "::" not in name:
                        # On some processors oneDNN's operations stand in for TensorFlow's, with a mark before the name.
                        seconds[kind.removeprefix("_Mkl").removeprefix("Native")] += event.duration_ps / 1e12
    return seconds
