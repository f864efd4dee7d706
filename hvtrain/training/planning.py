"""Makes a StepPlan from the settings and the sizes of the shards, also for a resumed run. Pure."""

import math
from typing import Any

from hvtrain.config.schema import TrainConfig
from hvtrain.core.step_plan import Share, StepPlan
from hvtrain.errors import CheckpointError, ConfigError


def make_plan(
    train: TrainConfig,
    base_learning_rate: float,
    shard_sizes: list[int],
    dataset_name: str,
    batch_sizes: list[int] | None = None,
    uneven: str = "trim",
) -> StepPlan:
    """Plans a run whose ranks hold shard_sizes[rank] training examples and take batch_sizes[rank] per step.

    Steps per epoch are equal on all ranks by construction. Examples that do not fill a batch on all ranks are left out
    of the epoch (uneven="trim"; others each time), trained on in short batches ("pad"), or refused ("error").
    Raises ConfigError if a rank would have no example, or less than one batch.
    """
    size, total = len(shard_sizes), sum(shard_sizes)
    batch_sizes = batch_sizes or batch_sizes_by_rank(train.batch_size, ["host"] * size)
    if min(shard_sizes) == 0:
        raise ConfigError(
            f"{size} ranks are more than the {total} training examples of {dataset_name} can feed; "
            f"use at most {max(1, sum(map(bool, shard_sizes)))} ranks"
        )
    examples, batch = min(zip(shard_sizes, batch_sizes), key=lambda rank: rank[0] / rank[1])
    if batch > examples:
        raise ConfigError(
            f"train.batch_size={batch} exceeds the {examples} examples of a rank "
            f"({total} of {dataset_name} over {size} ranks); "
            f"lower train.batch_size to at most {examples} or use fewer ranks"
        )
    full = min(examples // batch for examples, batch in zip(shard_sizes, batch_sizes))
    times = train.accumulate
    if full < times:
        raise ConfigError(
            f"train.accumulate={times} exceeds the {full} batches of a rank in an epoch ({total} examples of "
            f"{dataset_name} over {size} ranks); lower it to at most {full}, or train.batch_size"
        )
    full -= full % times
    shares = tuple(Share(batch, full) for batch in batch_sizes)
    left_out = total - full * sum(batch_sizes)
    if uneven == "error" and left_out:
        raise ConfigError(
            f"data.uneven=error and {left_out} of {total} training examples of {dataset_name} fill no batch on all "
            f"{size} ranks; choose another train.batch_size, data.uneven=pad (short batches) or trim (left out)"
        )
    if uneven == "pad":
        steps = max(math.ceil(examples / batch) for examples, batch in zip(shard_sizes, batch_sizes))
        if steps > min(shard_sizes):
            raise ConfigError(
                f"a rank holds {min(shard_sizes)} of {total} training examples of {dataset_name} but another needs "
                f"{steps} steps for an epoch; spread the files more evenly, or choose data.uneven=trim"
            )
        shares = tuple(Share(batch, steps, examples) for examples, batch in zip(shard_sizes, batch_sizes))
    steps_per_epoch = shares[0].steps
    if train.steps is None:
        num_steps = train.epochs * steps_per_epoch
    else:
        num_steps = max(1, train.steps // size // times) * times if train.divide_steps_by_size else train.steps
    joint = size * train.accumulate
    factor = {"linear": float(joint), "sqrt": math.sqrt(joint), "none": 1.0}[train.learning_rate_scale]
    return StepPlan(shares, num_steps, base_learning_rate, factor, total, accumulate=times)


def batch_sizes_by_rank(batch_size: int | list[int], hosts: list[str]) -> list[int]:
    """Batch sizes by rank, from one number, one for each rank, or one for each host in rank order; else ConfigError."""
    if isinstance(batch_size, int):
        return [batch_size] * len(hosts)
    if len(batch_size) == len(hosts):
        return batch_size
    order = list(dict.fromkeys(hosts))
    if len(batch_size) != len(order):
        raise ConfigError(
            f"train.batch_size={batch_size} has {len(batch_size)} numbers for {len(hosts)} ranks on {len(order)} "
            "hosts; give one number, one for each rank, or one for each host"
        )
    return [batch_size[order.index(host)] for host in hosts]


def planned_batch_sizes(meta: dict[str, Any] | None, train: TrainConfig, hosts: list[str]) -> list[int]:
    """Batch sizes of the ranks for which the plan is made: those that the run began with, or the current ones.

    The current ranks, on these hosts, get a plan of their own with train.resize=scale, from the end of an epoch on.
    meta is that of the checkpoint to continue from, if any. Raises CheckpointError if both train.batch_size and the
    number of ranks have changed.
    """
    if meta is None or (train.resize == "scale" and meta["num_ranks"] != len(hosts) and not meta["step_in_epoch"]):
        return batch_sizes_by_rank(train.batch_size, hosts)
    before = meta["batch_size"]
    if train.batch_size == before:
        return meta["batch_sizes"]
    if meta["num_ranks"] != len(hosts):
        raise CheckpointError(
            f"the run began with train.batch_size={before} on {meta['num_ranks']} ranks, and now it is "
            f"{train.batch_size} on {len(hosts)}; change one of the two at a time: set train.batch_size={before}"
        )
    return batch_sizes_by_rank(train.batch_size, hosts)


def resumed_plan(plan: StepPlan, meta: dict[str, Any] | None, train: TrainConfig, size: int) -> StepPlan:
    """The plan, made from planned_batch_sizes, on `size` ranks and from the checkpoint's position.

    Another number of ranks follows it to the end, or with train.resize=scale to the end of the current epoch.
    """
    if meta is None:
        return plan
    plan = plan.from_position(meta["step"], meta["epoch"], meta["step_in_epoch"])
    if len(plan.shares) == size:
        return plan
    plan = plan.on(size)
    return plan.until_epoch_end(meta["step"]) if train.resize == "scale" else plan
