"""Resumes a run from a checkpoint: sends it, checks that it fits, restores the model and each rank's own state."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from hvtrain.checkpoint import store
from hvtrain.checkpoint.notes import NoteKeeper
from hvtrain.checkpoint.store import Checkpoint
from hvtrain.config.schema import GROUPS, SEVERAL, RunConfig, to_dict
from hvtrain.config.validate import flatten
from hvtrain.core.run_files import (
    EpochRecord,
    read_history,
    read_rank_seconds,
    read_starts,
    read_tracked,
    write_history,
    write_rank_seconds,
    write_starts,
    write_tracked,
)
from hvtrain.core.step_plan import StepPlan
from hvtrain.data.manifest import check_unchanged
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.strategies.base import Comm
from hvtrain.system.run_lock import RunLock
from hvtrain.trackers.notice import Notice

Arrays = dict[str, np.ndarray]
# A message is in memory several times while it is packed; and MPI counts its bytes in 31 bits.
MESSAGE_BYTES = 64 << 20


@dataclass
class RunState:
    """State that survives a restart of the ranks.

    began is time.monotonic() at the beginning of the run, lock that of its folder, and signals are those received.
    checkpoint is the last commit to memory, in an elastic job; run_id is the same in all checkpoints of the run, over
    all of its starts; note_keeper notes on this host where the newest checkpoint is; notice is sent at the end.
    """

    began: float
    folder: Path | None = None
    lock: RunLock = field(default_factory=RunLock)
    signals: list[int] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    run_id: str | None = None
    note_keeper: NoteKeeper = field(default_factory=NoteKeeper)
    notice: Notice = field(default_factory=Notice)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from: its meta on every rank, its arrays on the chief, or everywhere if elastic.

    host is the one whose disk it is on; empty if it was in memory.
    """

    name: str
    step: int
    meta: dict[str, Any]
    checkpoint: Checkpoint | None = None
    host: str = ""


@dataclass(frozen=True)
class Start:
    """Where a run begins: at step 0, or at a checkpoint that num_ranks ranks wrote, with a plan for plan_ranks.

    rank_state is this rank's own.
    """

    name: str | None = None
    step: int = 0
    ended: bool = False
    num_ranks: int = 0
    plan_ranks: int = 0
    rank_state: Arrays = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    unlogged: dict[str, float] = field(default_factory=dict)
    """Results of a validation that no epoch's logs had yet."""


def resume(
    saved: ResumePoint | None,
    model: keras.Model,
    plan: StepPlan,
    meta: dict[str, Any],
    refuse_other_data: bool,
    comm: Comm,
) -> Start:
    """Restores the chief's model, and returns the run's start (every rank). meta is that of the run's checkpoints."""

    def restore() -> tuple[Start, list[Arrays]]:
        if saved is None or saved.checkpoint is None:
            return Start(), [{}] * plan.size
        checkpoint = saved.checkpoint
        before, other_way = checkpoint.meta.get("data"), ", or choose another run.dir"
        check_unchanged(saved.name, before, meta["data"], refuse_other_data, other_way)
        # A plan for another number of ranks is meant to differ.
        names = ("batch_sizes", "steps_per_epoch") if checkpoint.meta["num_ranks"] == meta["num_ranks"] else ()
        pairs = {name: (checkpoint.meta.get(name), meta[name]) for name in (*names, "uneven")}
        different = [f"{name} {before}, now {now}" for name, (before, now) in pairs.items() if before != now]
        if different:
            raise CheckpointError(
                f"checkpoint {checkpoint.path.name} was made with {'; '.join(different)}; "
                "start with the same numbers, or choose another run.dir"
            )
        store.restore(checkpoint, model)
        ended, plan_ranks = checkpoint.meta.get("ended", False), checkpoint.meta["num_ranks"]
        num_ranks = checkpoint.meta.get("world_size", plan_ranks)
        start = Start(
            saved.name,
            checkpoint.step,
            ended,
            num_ranks,
            plan_ranks,
            callbacks=checkpoint.callbacks(),
            unlogged=checkpoint.unlogged(),
        )
        return start, states_on(plan.size, [checkpoint.rank_state(rank) for rank in range(num_ranks)])

    start, states = comm.on_chief(restore)
    start = replace(start, rank_state=states[comm.topology.rank])
    store.restore_rank(start.rank_state, model)
    return start


def states_on(size: int, states: list[Arrays]) -> list[Arrays]:
    """Distributes the ranks' states over another number of ranks: each rank keeps its own.

    The metrics of an unfinished epoch are sums: the chief adds those of the ranks that left. A new rank starts with
    no counts, its own seeds, and the chief's learning rate.
    """
    kept = states[:size]
    for gone in states[size:]:
        sums = {name: value + gone[name] for name, value in kept[0].items() if name.startswith("metric/")}
        kept[0] = {**kept[0], **sums}
    new = {name: value for name, value in kept[0].items() if name == "rate/factor"}
    return kept + [new] * (size - len(kept))


def send_arrays(
    arrays: Arrays | None, root: int, comm: Comm, wanted: bool, message_bytes: int = MESSAGE_BYTES
) -> Arrays | None:
    """The root's arrays, on the ranks that want them; None on the others (every rank)."""
    is_root = comm.topology.rank == root
    own = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in (arrays or {}).items()}
    layout = comm.broadcast({name: (array.shape, array.dtype) for name, array in own.items()}, root)
    if not is_root:
        own = {name: np.empty(shape, dtype) for name, (shape, dtype) in layout.items()} if wanted else {}
    num_bytes = sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in layout.values())
    chunks = _chunks(own, message_bytes)
    for _ in range(-(-num_bytes // message_bytes)):
        parts = next(chunks, [])
        message = comm.broadcast(np.concatenate(parts) if is_root else None, root)
        if not is_root:
            end = 0
            for part in parts:
                begin, end = end, end + part.size
                part[:] = message[begin:end]
    return own if wanted else None


def _chunks(arrays: Arrays, chunk_bytes: int) -> Iterator[list[np.ndarray]]:
    """Views of the arrays' bytes, in lists of chunk_bytes together; the last list is shorter."""
    chunk: list[np.ndarray] = []
    room = chunk_bytes
    for array in arrays.values():
        rest = array.reshape(-1).view(np.uint8)
        while rest.size:
            part, rest = rest[:room], rest[room:]
            chunk.append(part)
            room -= part.size
            if not room:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk


# A seed sets the order of the rest of the epoch. Another optimizer would take the slots for its own, and other metrics
# the state of those before.
FIXED = ("seed", "optimizer._target_", "task._target_")
# They do not change what is learned.
_IRRELEVANT = (
    *(
        "run.",
        "resume",
        "verbose",
        "tracebacks",
        "checkpoint.",
        "guard.",
        "watchdog.",
        "profile.",
        "comm.",
        "strategy.",
    ),
    *("train.max_time", "train.evaluation_batch_size", "train.evaluation_steps", "train.steps_per_execution"),
    *("train.remat", "model.weights", "tracker.", "notify"),
)


def changed_since(meta: dict[str, Any], config: RunConfig) -> dict[str, list[Any]]:
    """{name: [before, now]} of the settings that differ from those in a checkpoint's meta, if any.

    Raises ConfigError where a setting cannot change.
    """
    before = meta.get("config")
    changed = changed_settings(before, to_dict(config)) if isinstance(before, dict) else {}
    for name, (then, now) in changed.items():
        if name in FIXED or name.startswith("task.metrics."):
            raise ConfigError(
                f"{name}={now}, but the run in this folder began with {then}, which cannot change; "
                "start with the same, or choose another run.dir"
            )
    return changed


def with_change(meta: dict[str, Any], step: int, changed: dict[str, list[Any]]) -> list[Any]:
    """The changes so far, in meta, and that of the start at this step, if any: {"step": ..., "changed": ...}."""
    earlier = meta.get("changes")
    return [*(earlier if isinstance(earlier, list) else []), *([{"step": step, "changed": changed}] if changed else [])]


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """{name: [before, now]} of the settings that differ, without those that do not change what is learned.

    >>> changed_settings({"seed": 1, "train": {"epochs": 1}}, {"seed": 1, "train": {"epochs": 2, "new": 3}})
    {'train.epochs': [1, 2]}
    """
    old, new = flatten(before), flatten(now)
    # An earlier version may have had fewer typed settings, or groups.
    groups = tuple(f"{group}." for group in (*GROUPS, *SEVERAL) if group in before)
    names = [name for name in {**old, **new} if name in old or name.startswith(groups)]
    changed = {
        name: [old.get(name), new.get(name)]
        for name in names
        if old.get(name) != new.get(name) and not name.startswith(_IRRELEVANT)
    }
    layers = [list(run.get("augment") or {}) for run in (before, now)]  # They act in this order.
    return (
        {**changed, "augment": layers} if layers[0] != layers[1] and sorted(layers[0]) == sorted(layers[1]) else changed
    )


class RunRecords(NamedTuple):
    """The contents of history.csv, ranks.csv, starts.json and trackers.json; empty if a file is missing."""

    history: list[EpochRecord]
    rank_seconds: dict[int, list[float]]
    starts: list[dict[str, Any]]
    tracked: dict[str, dict[str, Any]]


def read_records(folder: Path) -> RunRecords:
    """Raises StorageError if the history is damaged."""
    return RunRecords(read_history(folder), read_rank_seconds(folder), read_starts(folder), read_tracked(folder))


def write_records(folder: Path, records: RunRecords) -> None:
    """Writes the records that are not empty to the run folder."""
    for content, write in zip(records, (write_history, write_rank_seconds, write_starts, write_tracked)):
        if content:
            write(folder, content)  # type: ignore[operator]
