"""Resumes a run: checks that a checkpoint fits, and restores the state of all ranks from it.

Settings that differ from the checkpoint's are recorded, or refused if they must not change.
"""

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from hvtrain.checkpoint import model_state, store
from hvtrain.checkpoint.store import Arrays
from hvtrain.config.schema import RunConfig
from hvtrain.core.step_plan import StepPlan
from hvtrain.data.manifest import check_unchanged
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.strategies.comm import Comm
from hvtrain.system.text import flatten
from hvtrain.training.run import ResumePoint, Start, format_setting, versions

log = logging.getLogger(__name__)

# Packing a message takes several times its size in memory, and MPI counts its bytes in 31 bits.
MESSAGE_BYTES = 64 << 20
# Settings that a resume must not change. The seed determines the order of the rest of the epoch;
# another optimizer would get slots that are not its own, and the metrics of another task would get
# the state of the old ones.
FIXED = ("seed", "optimizer._target_", "task._target_")
# Settings that do not change what is learned.
_IRRELEVANT = re.compile(
    r"(run|checkpoint|guard|watchdog|metrics|profile|comm|tracker)\."
    r"|strategy\.(bucket_mib|share_gpus|pin_cores|shard_optimizer|commit_steps)"
    r"|resume|verbose|tracebacks|notify|model\.(weights|shard_embeddings)"
    r"|train\.(max_time|evaluation_batch_size|evaluation_steps|steps_per_execution|remat)"
)


def resume(model: keras.Model, saved: ResumePoint | None, comm: Comm) -> Start:
    """Restores the model on all ranks and each rank's own state; returns the run's start (every rank).

    Args:
        model: The model, with the optimizer built. The chief restores it, and broadcasts the weights.
        saved: The checkpoint, already checked by check_fits; None: nothing is restored.
        comm: The collectives of the current ranks.

    Raises:
        CheckpointError: The checkpoint belongs to another model.
    """
    size = comm.topology.size
    own_rank = comm.topology.rank
    # By rank. Only the chief has them all, since they may be large.
    memories: list[Arrays] = [{}] * size

    def restore():
        if saved is None:
            return Start(), [{}] * size, False
        checkpoint = saved.checkpoint
        assert checkpoint
        model_state.restore(checkpoint, model)
        start = Start(
            saved.name,
            checkpoint.step,
            ended=checkpoint.meta.get("ended", False),
            num_ranks=checkpoint.meta["world_size"],
            plan_ranks=checkpoint.meta["num_ranks"],
            callbacks=checkpoint.callbacks(),
            unlogged=checkpoint.unlogged_results(),
        )
        states = [checkpoint.rank_state(rank) for rank in range(start.num_ranks)]
        memories[:] = redistribute_memories(
            size, [_filter_state(state, is_memory=True) for state in states]
        )
        return (
            start,
            redistribute_states(size, [_filter_state(state, is_memory=False) for state in states]),
            any(memories),
        )

    # Every rank receives the states of all ranks, which are small, and uses only its own.
    start, rank_states, has_memory = comm.on_chief(restore)
    start = replace(start, rank_state=rank_states[own_rank])
    model_state.restore_rank(start.rank_state, model)
    comm.broadcast_model(model)
    # After the broadcast, which would replace this rank's memory with the chief's.
    if has_memory and model_state.keeps_memory(model):
        received = [
            send_arrays(memory, 0, comm, rank == own_rank) for rank, memory in enumerate(memories)
        ]
        model_state.restore_memory(received[own_rank], model)
    elif has_memory:
        log.warning(
            "optimizer state that each rank of the checkpoint kept for itself, such as compression errors, is left "
            "out, since this run's optimizer keeps none; a single rank compresses nothing"
        )
    return start


def _filter_state(state: Arrays, is_memory: bool) -> Arrays:
    """Returns only the arrays of the optimizer's rank memory (see model_state.rank_memory), or all others."""
    return {
        name: array
        for name, array in state.items()
        if name.startswith(model_state.MEMORY) == is_memory
    }


def checkpoint_meta(
    config: RunConfig,
    plan: StepPlan,
    data: dict[str, Any],
    run_id: str | None,
    saved: ResumePoint | None,
    changed: dict[str, list[Any]],
) -> dict[str, Any]:
    """Returns the facts that each checkpoint of the run records: sharding, number of ranks, settings.

    Args:
        config: The run's settings.
        plan: The plan, whose shares are those that the run began with.
        data: The data set's manifest.
        run_id: The run's identifier, the same for all of its starts.
        saved: The checkpoint to resume from, if any. Its goodput and changes of settings are kept.
        changed: Settings that differ from that checkpoint's. They are added to the changes as
            {"step": STEP, "changed": {NAME: [BEFORE, NOW]}}.
    """
    before = saved.meta if saved else {}
    earlier = before.get("changes")
    changes = list(earlier) if isinstance(earlier, list) else []
    if saved and changed:
        changes.append({"step": saved.step, "changed": changed})
    return {
        "num_ranks": len(plan.shares),
        "batch_size": config.train.batch_size,
        "batch_sizes": [share.batch_size for share in plan.shares],
        "steps_per_epoch": plan.steps_per_epoch,
        "uneven": config.data.uneven,
        "world_size": plan.size,
        "data": data,
        "run_id": run_id,
        "versions": versions(),
        "config": config.record,
        "changes": changes,
        "goodput": before.get("goodput"),
    }


def check_fits(saved: ResumePoint, meta: dict[str, Any], refuse_data: bool) -> None:
    """Checks that the run can continue from the checkpoint, before a model is built (chief only).

    Args:
        saved: The checkpoint.
        meta: Facts about the continuing run, see checkpoint_meta.
        refuse_data: Refuse data that have changed; otherwise only warn.

    Raises:
        CheckpointError: The checkpoint was made with other batches.
        DataError: The checkpoint was made on another data set.
    """
    before = saved.meta
    check_unchanged(
        saved.name, before.get("data"), meta["data"], refuse_data, ", or choose another run.dir"
    )

    keys = ["uneven"]  # That is data.uneven, which auto has chosen by now.
    # With another number of ranks the plan is expected to differ.
    if before["num_ranks"] == meta["num_ranks"]:
        keys = ["batch_sizes", *keys]
        # After rebalancing, an epoch may have a step more or less.
        if not before.get("balanced"):
            keys.append("steps_per_epoch")
    different = [
        f"{key} {before.get(key)}, now {meta[key]}" for key in keys if before.get(key) != meta[key]
    ]

    if different:
        raise CheckpointError(
            f"checkpoint {store.folder_name(saved.step)} was made with {'; '.join(different)}; "
            "start with the same settings and strategy, or choose another run.dir"
        )


def redistribute_states(size: int, states: list[Arrays]) -> list[Arrays]:
    """Redistributes the ranks' states over `size` ranks: each rank that stays keeps its own.

    The metrics of an unfinished epoch are sums, so the chief adds those of ranks that left. A new
    rank starts with empty metrics, its own seeds, and the chief's learning rate factor.
    """
    remaining = states[:size]
    # Any rank could take over the sums, since metrics come from the sums over all ranks.
    for lost in states[size:]:
        sums = {
            name: value + lost[name]
            for name, value in remaining[0].items()
            if name.startswith("metric/")
        }
        remaining[0] = remaining[0] | sums
    # Seeds are not copied, since dropout would drop the same units on two ranks.
    new = {name: value for name, value in remaining[0].items() if name == "rate/factor"}
    return remaining + [new] * (size - len(remaining))


def redistribute_memories(size: int, memories: list[Arrays]) -> list[Arrays]:
    """Redistributes the optimizer's rank memories over `size` ranks, by the rule at the start of each array's name.

    - same: equal on all ranks, and saved by the chief only.
    - mean: slots of local steps. All ranks get their mean.
    - sum: compression errors that are yet to be averaged over the ranks. The chief takes over those of
      ranks that left. All are multiplied by new / old number of ranks, which keeps their mean.
    """
    shared = {
        name: array for name, array in memories[0].items() if name.startswith(model_state.SAME)
    }
    if size == len(memories):
        return [shared | memory for memory in memories]

    redistributed = [dict(shared) for _ in range(size)]
    for name in sorted(set.intersection(*map(set, memories)) - shared.keys()):
        arrays = [memory[name] for memory in memories]
        dtype = arrays[0].dtype
        if name.startswith(f"{model_state.MEMORY}mean/"):
            mean = np.mean(arrays, axis=0, dtype=np.float64).astype(dtype)
            for memory in redistributed:
                memory[name] = mean
            continue
        remaining = arrays[:size]
        remaining[0] = sum(arrays[size:], start=remaining[0])
        for memory, array in zip(redistributed, remaining):
            memory[name] = (array * (size / len(arrays))).astype(dtype)
    return redistributed


def send_arrays(
    arrays: Arrays,
    root: int,
    comm: Comm,
    is_receiver: bool,
    message_bytes: int = MESSAGE_BYTES,
) -> Arrays:
    """Sends the root's arrays to the ranks that receive them (every rank).

    Args:
        arrays: On the root, the arrays by name; ignored elsewhere.
        root: The rank that sends.
        comm: The collectives.
        is_receiver: True if this rank receives the arrays.
        message_bytes: Size of each message but the last.

    Returns:
        The arrays, on the root and on ranks that receive them; elsewhere an empty dict.
    """
    is_root = comm.topology.rank == root
    own = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    layout = comm.broadcast(
        {name: (array.shape, array.dtype, array.nbytes) for name, array in own.items()}, root
    )
    if not is_root:
        own = {}
        if is_receiver:
            own = {name: np.empty(shape, dtype) for name, (shape, dtype, _) in layout.items()}

    # All arrays form one stream of bytes, cut into messages of equal size;
    # each rank computes their number.
    num_bytes = sum(array_bytes for _, _, array_bytes in layout.values())
    chunks = _chunks(own, message_bytes)
    for _ in range(math.ceil(num_bytes / message_bytes)):
        parts = next(chunks, [])
        message = comm.broadcast(np.concatenate(parts) if is_root else None, root)
        if not is_root:
            for part in parts:
                part[:] = message[: part.size]
                message = message[part.size :]
    return own


def _chunks(arrays: Arrays, chunk_bytes: int) -> Iterator[list[np.ndarray]]:
    """Yields lists of views of the arrays' bytes, chunk_bytes in each list; the last one may have fewer."""
    chunk: list[np.ndarray] = []
    free_bytes = chunk_bytes
    for array in arrays.values():
        unsent = array.reshape(-1).view(np.uint8)
        # A large array is split over several messages, and small arrays share one.
        while unsent.size:
            part = unsent[:free_bytes]
            unsent = unsent[free_bytes:]
            chunk.append(part)
            free_bytes -= part.size
            if not free_bytes:
                yield chunk
                chunk = []
                free_bytes = chunk_bytes

    if chunk:
        yield chunk


def changed_since(meta: dict[str, Any], config: RunConfig) -> dict[str, list[Any]]:
    """Returns {name: [before, now]} of the settings that differ from a checkpoint's.

    Raises ConfigError if one of them must not change.
    """
    before = meta.get("config")
    if not isinstance(before, dict):
        return {}  # A checkpoint that no run wrote may lack settings.
    changed = changed_settings(before, config)
    if config.data.uneven == "auto":
        changed.pop("data.uneven", None)  # The checkpoint has the choice, which auto keeps.
    for name, (then, now) in changed.items():
        if name in FIXED or name.startswith("task.metrics."):
            raise ConfigError(
                f"{name}={format_setting(now)}, but the run in this folder began with {format_setting(then)}, "
                "which cannot change; start with the same value, or choose another run.dir"
            )
    return changed


def changed_settings(before: dict[str, Any], config: RunConfig) -> dict[str, list[Any]]:
    """Returns {name: [before, now]} of the settings that differ and affect what is learned."""
    old = flatten(before)
    new = config.flat
    changed = {
        name: [old.get(name), new.get(name)]
        for name in old | new
        if old.get(name) != new.get(name) and not _IRRELEVANT.match(name)
    }
    # The comparison above does not see the order of augmentation layers, which matters too.
    old_layers = list(before.get("augment") or {})
    new_layers = list(config.augment)
    if old_layers != new_layers and sorted(old_layers) == sorted(new_layers):
        changed["augment"] = [old_layers, new_layers]
    return changed
