"""How a run goes on from a checkpoint that newest found: what must be as it was, and each rank's own state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvtrain.checkpoint import store
from hvtrain.checkpoint.callback_records import saved_state
from hvtrain.checkpoint.notes import Noting
from hvtrain.checkpoint.store import Checkpoint
from hvtrain.core.step_plan import StepPlan
from hvtrain.data.manifest import check_unchanged
from hvtrain.errors import CheckpointError
from hvtrain.strategies.comm import Comm
from hvtrain.system.run_lock import RunLock

RankState = dict[str, np.ndarray]


@dataclass
class RunState:
    """What a run keeps in memory from leg to leg. checkpoint: of the last commit, where ranks come and go."""

    began: float
    """time.monotonic() at the beginning of the run."""
    folder: Path | None = None
    lock: RunLock = field(default_factory=RunLock)
    signals: list[int] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    run_id: str | None = None
    """What all checkpoints of the run have in common, over all of its starts."""
    noting: Noting = field(default_factory=Noting)


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run goes on from: what it says, on every rank, and all of it on the chief alone, or on
    every rank where ranks come and go."""

    name: str
    step: int
    meta: dict[str, Any]
    whole: Checkpoint | None = None
    host: str = ""
    """On whose disk it lies; empty where it was in memory."""


@dataclass(frozen=True)
class Start:
    """Where a run begins: at nothing, or at a checkpoint that num_ranks ranks wrote, by a plan made for plan_ranks.

    rank_state is this rank's own.
    """

    name: str | None = None
    step: int = 0
    ended: bool = False
    num_ranks: int = 0
    plan_ranks: int = 0
    rank_state: RankState = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def resume(
    found: Found | None,
    model: keras.Model,
    plan: StepPlan,
    meta: dict[str, Any],
    refuse_other_data: bool,
    comm: Comm,
) -> Start:
    """Restores on the chief; returns, on every rank, where the run stands. meta is what it will say of itself."""

    def restore() -> tuple[Start, list[RankState]]:
        if found is None or found.whole is None:
            return Start(), [{}] * plan.size
        whole = found.whole
        check_unchanged(found.name, whole.meta.get("data"), meta["data"], refuse_other_data)
        _refuse_other_plan(whole, meta)
        store.restore(whole, model)
        ended, plan_ranks = whole.meta.get("ended", False), whole.meta["num_ranks"]
        num_ranks = whole.meta.get("world_size", plan_ranks)
        callbacks = saved_state(whole.meta, whole.arrays)
        start = Start(found.name, whole.step, ended, num_ranks, plan_ranks, callbacks=callbacks)
        return start, states_on(plan.size, [whole.rank_state(rank) for rank in range(num_ranks)])

    start, states = comm.on_chief(restore)
    start = replace(start, rank_state=states[comm.topology.rank])
    store.restore_rank(start.rank_state, model)
    return start


def states_on(size: int, states: list[RankState]) -> list[RankState]:
    """The ranks' states, for another number of ranks: each rank keeps its own.

    The metrics of the epoch begun are sums: the chief takes those of the ranks that are gone. A new rank has
    counted nothing, has seeds of its own, and the chief's learning rate.
    """
    kept = states[:size]
    for gone in states[size:]:
        added = {name: value + gone[name] for name, value in kept[0].items() if name.startswith("metric/")}
        kept[0] = {**kept[0], **added}
    new = {name: value for name, value in kept[0].items() if name == "rate/factor"}
    return kept + [new] * (size - len(kept))


def _refuse_other_plan(saved: Checkpoint, meta: dict[str, Any]) -> None:
    # With another number of ranks in its plan, the run is to have another plan.
    names = ("batch_sizes", "steps_per_epoch") if saved.meta["num_ranks"] == meta["num_ranks"] else ()
    different = [
        f"{name} {saved.meta.get(name)}, now {meta[name]}"
        for name in (*names, "uneven")
        if saved.meta.get(name) != meta[name]
    ]
    if different:
        raise CheckpointError(
            f"checkpoint {saved.path.name} was made with {'; '.join(different)}; "
            "start with the same numbers, or choose another run.dir"
        )
