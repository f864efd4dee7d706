"""Makes a run's plan (batches, steps, peak learning rate) from its settings and the sizes of its shards. Pure."""

import math
from dataclasses import replace
from typing import Any

from hvtrain.config.schema import TrainConfig
from hvtrain.core.step_plan import MOST_LEFT_OUT, Share, StepPlan
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.system.text import counted


def choose_uneven(
    train: TrainConfig,
    shard_sizes: list[int],
    batch_sizes: list[int],
    can_pad: bool = True,
    saved: dict[str, Any] | None = None,
) -> str:
    """Resolves data.uneven=auto: "pad" if "trim" would leave out more than MOST_LEFT_OUT of the examples, else "trim".

    Args:
        train: The training settings.
        shard_sizes: Training examples, by rank.
        batch_sizes: Examples per step, by rank.
        can_pad: False if the strategy needs all batches to have the same size.
        saved: Metadata of the checkpoint to resume from. Its choice is kept, whatever the number of ranks and
            the strategy.
    """
    if saved and train.accumulate == 1:
        return saved["uneven"]
    if not can_pad or train.accumulate > 1:
        return "trim"
    batches = [examples / batch for examples, batch in zip(shard_sizes, batch_sizes)]
    # A padded epoch takes as many steps as the largest shard needs, and every
    # rank needs an example in each.
    if math.ceil(max(batches)) > min(shard_sizes):
        return "trim"
    left_out = sum(shard_sizes) - int(min(batches)) * sum(batch_sizes)
    return "pad" if left_out > MOST_LEFT_OUT * sum(shard_sizes) else "trim"


def make_plan(
    train: TrainConfig,
    base_learning_rate: float,
    shard_sizes: list[int],
    dataset_name: str,
    batch_sizes: list[int] | None = None,
    uneven: str = "trim",
) -> StepPlan:
    """Makes the plan of a run, in which all ranks have the same number of steps per epoch.

    Args:
        train: The training settings.
        base_learning_rate: The rate for one batch of one rank, before it is scaled.
        shard_sizes: Training examples, by rank.
        dataset_name: Name of the data set, for messages.
        batch_sizes: Examples per step, by rank; None: train.batch_size on all.
        uneven: What to do with examples that do not fill a batch on all ranks: leave them out of the
            epoch ("trim"; different ones each epoch), train on them in short batches ("pad"), or
            refuse them ("error").

    Raises:
        ConfigError: The shards do not fit the batch sizes, train.accumulate or `uneven`.
    """
    size = len(shard_sizes)
    batch_sizes = batch_sizes or batch_sizes_by_rank(train.batch_size, ["host"] * size)
    steps_per_epoch = _full_steps(train, shard_sizes, batch_sizes, dataset_name)
    shares = tuple(Share(batch, steps_per_epoch) for batch in batch_sizes)

    total = sum(shard_sizes)
    left_out = total - steps_per_epoch * sum(batch_sizes)
    if uneven == "error" and left_out:
        raise ConfigError(
            f"data.uneven=error and {left_out} of {total} training examples of {dataset_name} fill no batch on "
            f"{counted(size, 'rank')}; choose another train.batch_size, data.uneven=pad (short batches) or trim "
            "(left out)"
        )

    if uneven == "pad":
        steps_per_epoch = _padded_steps(shard_sizes, batch_sizes, dataset_name)
        shares = tuple(
            Share(batch, steps_per_epoch, examples)
            for examples, batch in zip(shard_sizes, batch_sizes)
        )

    accumulate = train.accumulate
    if train.steps is None:
        num_steps = train.epochs * steps_per_epoch
    elif train.divide_steps_by_size:
        num_steps = max(1, train.steps // size // accumulate) * accumulate
    else:
        num_steps = train.steps

    factor = learning_rate_factor(train, size * accumulate)
    return StepPlan(shares, num_steps, base_learning_rate, factor, total, accumulate=accumulate)


def _full_steps(
    train: TrainConfig, shard_sizes: list[int], batch_sizes: list[int], dataset_name: str
) -> int:
    """Returns how many steps of an epoch have a full batch on every rank. Raises ConfigError if there are none."""
    size = len(shard_sizes)
    total = sum(shard_sizes)
    if total == 0:
        raise ConfigError(f"{dataset_name} has no training examples; check the settings of dataset")
    if min(shard_sizes) == 0:
        num_usable = sum(examples > 0 for examples in shard_sizes)
        raise ConfigError(
            f"{size} ranks are more than the {counted(total, 'training example')} of {dataset_name} can feed; "
            f"use at most {counted(num_usable, 'rank')}"
        )

    # The rank with the fewest batches limits all of them: a rank with more steps would wait for the
    # others forever.
    examples, batch = min(zip(shard_sizes, batch_sizes), key=lambda rank: rank[0] / rank[1])
    if batch > examples:
        raise ConfigError(
            f"train.batch_size={batch} exceeds the {counted(examples, 'example')} of a rank "
            f"({total} of {dataset_name} over {counted(size, 'rank')}); "
            f"lower train.batch_size to at most {examples} or use fewer ranks"
        )

    steps = examples // batch
    if steps < train.accumulate:
        raise ConfigError(
            f"train.accumulate={train.accumulate} exceeds a rank's number of batches in an epoch, {steps} ({total} "
            f"examples of {dataset_name} over {counted(size, 'rank')}); "
            f"lower train.accumulate to at most {steps}, or lower train.batch_size"
        )
    # An epoch must end with a weight update, so it holds whole accumulations.
    return steps - steps % train.accumulate


def _padded_steps(shard_sizes: list[int], batch_sizes: list[int], dataset_name: str) -> int:
    """Returns the steps of an epoch with short batches. Raises ConfigError if a rank has too few examples for them."""
    steps = max(math.ceil(examples / batch) for examples, batch in zip(shard_sizes, batch_sizes))
    # Every rank needs at least one example in each step; see Share.
    if steps > min(shard_sizes):
        raise ConfigError(
            f"a rank holds {min(shard_sizes)} of {sum(shard_sizes)} training examples of {dataset_name} but another "
            f"needs {steps} steps for an epoch; spread the files more evenly, or choose data.uneven=trim"
        )
    return steps


def learning_rate_factor(train: TrainConfig, num_batches: int) -> float:
    """Returns the factor by which to scale the learning rate for an update over `num_batches` batches.

    Linear scaling follows Goyal et al., https://arxiv.org/abs/1706.02677: n times the batch takes n
    times the rate. The square root preserves the variance of an update instead (Krizhevsky,
    https://arxiv.org/abs/1404.5997).
    """
    factors = {"linear": float(num_batches), "sqrt": math.sqrt(num_batches), "none": 1.0}
    return factors[train.learning_rate_scale]


def batch_sizes_by_rank(batch_size: int | list[int], hosts: list[str]) -> list[int]:
    """Expands train.batch_size into a batch size for each rank.

    Args:
        batch_size: One number, one for each rank, or one for each host in rank order.
        hosts: The host of each rank.

    Raises:
        ConfigError: The list has neither one number per rank nor one per host.

    >>> batch_sizes_by_rank([8, 4], ["s1", "s1", "s2"])
    [8, 8, 4]
    """
    if isinstance(batch_size, int):
        return [batch_size] * len(hosts)
    if len(batch_size) == len(hosts):
        return batch_size
    order = list(dict.fromkeys(hosts))
    if len(batch_size) != len(order):
        raise ConfigError(
            f"train.batch_size={batch_size} has {counted(len(batch_size), 'number')} for "
            f"{counted(len(hosts), 'rank')} on {counted(len(order), 'host')}; give one number, one for each rank, or "
            "one for each host (with asynchronous parameter servers, one number)"
        )
    return [batch_size[order.index(host)] for host in hosts]


def planned_batch_sizes(
    meta: dict[str, Any] | None, train: TrainConfig, hosts: list[str]
) -> list[int]:
    """Returns the batch sizes, by rank, for which make_plan() plans.

    The plan of a resumed run is made for the ranks with which the run began. It is made for the
    current ranks if train.resize=scale and the checkpoint is at the end of an epoch.

    Args:
        meta: Metadata of the checkpoint to resume from, if any.
        train: The current settings.
        hosts: The host of each current rank.

    Raises:
        CheckpointError: Both train.batch_size and the number of ranks have changed.
    """
    if meta is not None:
        before = meta["batch_size"]
        is_resized = meta["num_ranks"] != len(hosts)
        is_replanned = train.resize == "scale" and is_resized and not meta["step_in_epoch"]
        if train.batch_size == before and not is_replanned:
            return meta["batch_sizes"]
        if is_resized and not is_replanned:
            raise CheckpointError(
                f"the run began with train.batch_size={before} on {counted(meta['num_ranks'], 'rank')}, and now it is "
                f"{train.batch_size} on {len(hosts)}; change one of the two at a time: set train.batch_size={before}"
            )
    return batch_sizes_by_rank(train.batch_size, hosts)


def resumed_plan(
    plan: StepPlan, meta: dict[str, Any] | None, train: TrainConfig, size: int
) -> StepPlan:
    """Adapts the plan to `size` ranks, and starts it at the checkpoint's position.

    If the number of ranks has changed, they follow this plan to the end of the run, or with
    train.resize=scale to the end of the current epoch.

    Args:
        plan: The plan from make_plan(), for the batch sizes from planned_batch_sizes().
        meta: Metadata of the checkpoint to resume from; None: return `plan` unchanged.
        train: The current settings.
        size: The current number of ranks.
    """
    if meta is None:
        return plan
    plan = plan.from_position(meta["step"], meta["epoch"], meta["step_in_epoch"])
    if train.steps is not None and not train.divide_steps_by_size:
        # train.steps counts all steps of the run, including those done under an earlier plan.
        last = max(meta["step"], train.steps)
        plan = replace(plan, num_steps=last, scheduled_steps=max(1, last - plan.shift))
    if len(plan.shares) == size:
        return plan
    plan = plan.on(size)
    return plan.until_epoch_end(meta["step"]) if train.resize == "scale" else plan
