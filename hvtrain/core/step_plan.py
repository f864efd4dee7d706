"""Arithmetic of a run: batches, steps, peak learning rate. Pure.

make_plan makes a StepPlan, also for a resumed run; everyone else reads it.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from hvtrain.config.schema import TrainConfig
from hvtrain.core.topology import reduced
from hvtrain.errors import CheckpointError, ConfigError

MOST_LEFT_OUT = 0.01
"""Above this share of the examples that an epoch leaves out, a run says so."""


@dataclass(frozen=True)
class Share:
    """One rank's examples of an epoch, cut into steps: full batches first, then the remainder.

    num_examples defaults to full batches in all steps. No step is empty, since a rank without an example would have no
    gradient: the last batches are cut so that each step has at least one example.
    """

    batch_size: int
    steps: int
    num_examples: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_examples", self.num_examples or self.steps * self.batch_size)
        if not self.steps <= self.num_examples <= self.steps * self.batch_size:
            raise ValueError(f"{self.num_examples} examples do not fill {self.steps} steps of up to {self.batch_size}")

    @property
    def is_full(self) -> bool:
        """True if every step has a full batch."""
        return self.num_examples == self.steps * self.batch_size

    def begin(self, step: Any) -> Any:
        """Number of examples before a step of the epoch, 0 ... steps; also for a tensor of steps.

        >>> [Share(32, 3, 66).begin(step) for step in range(4)]
        [0, 32, 64, 66]
        >>> [Share(32, 3, 64).begin(step) for step in range(4)]
        [0, 32, 63, 64]
        """
        full = step * self.batch_size
        most = self.num_examples - (self.steps - step)
        # The smaller of the two: min is not for tensors, and tf.minimum not for this module.
        return (full + most - abs(full - most)) // 2


@dataclass(frozen=True)
class StepPlan:
    """All numbers that the ranks must agree on. Steps are the same on every rank.

    shares: distribution of the data, one share for each rank that the run began with.
    num_steps: steps of the run, at which this plan ends.
    size: number of ranks now; if it is not that of the shares, ranks cut each step's joint batch evenly.
    shift: steps that the run has counted beyond (or short of) this plan's, because it began with another plan.
    scheduled_steps: all steps of this plan, if not num_steps.
    accumulate: steps whose gradients make up one change of weights; the steps of an epoch are a multiple of it.
    """

    shares: tuple[Share, ...]
    num_steps: int
    base_learning_rate: float
    learning_rate_factor: float
    num_examples: int = 0
    size: int = 0
    shift: int = 0
    scheduled_steps: int = 0
    accumulate: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.size or len(self.shares))
        object.__setattr__(self, "scheduled_steps", self.scheduled_steps or self.num_steps)

    @property
    def is_resized(self) -> bool:
        """True if the number of ranks is not the one that the run began with."""
        return self.size != len(self.shares)

    @property
    def ends_early(self) -> bool:
        """True if it ends before the run does, and another plan continues."""
        return self.num_steps < self.scheduled_steps + self.shift

    @property
    def weights(self) -> tuple[int, ...]:
        """Proportions of the shares, in the smallest whole numbers."""
        return reduced([share.batch_size for share in self.shares])

    @property
    def steps_per_epoch(self) -> int:
        return self.shares[0].steps

    @property
    def batch_sizes(self) -> list[int]:
        """Examples of a full step, by rank."""
        if self.is_resized:
            return [end - begin for begin, end in pairwise(self._even_cuts(self.global_batch))]
        return [share.batch_size for share in self.shares]

    @property
    def global_batch(self) -> int:
        """Examples of a full step over all ranks."""
        return sum(share.batch_size for share in self.shares)

    @property
    def examples_per_epoch(self) -> int:
        """Examples of an epoch over all ranks; num_examples of the data set unless some are left out."""
        return sum(share.num_examples for share in self.shares)

    @property
    def is_full(self) -> bool:
        """True if every step has a full batch."""
        return all(share.is_full for share in self.shares)

    @property
    def is_even(self) -> bool:
        """True if all ranks have batches of one size in all steps, so that means over ranks are plain means."""
        return len(set(self.batch_sizes)) == 1 and self.is_full

    def parts(self, step: Any) -> list[tuple[Any, Any]]:
        """Each rank's slice (begin, end) of the joint batch of a step of the epoch: all shares' batches together."""
        offsets = self.share_offsets(step)
        return list(pairwise(self._even_cuts(offsets[-1]) if self.is_resized else offsets))

    def shares_of(self, rank: int) -> range:
        """The shares that overlap a rank's slices in any step; with full batches all steps are the same."""
        steps = range(1 if self.is_full else self.steps_per_epoch)
        touched: set[int] = set()
        for offsets, (begin, end) in ((self.share_offsets(step), self.parts(step)[rank]) for step in steps):
            touched.update((bisect_right(offsets, begin) - 1, bisect_left(offsets, end) - 1))
        return range(min(touched), max(touched) + 1)

    def on(self, size: int) -> "StepPlan":
        """This plan on another number of ranks. Raises ConfigError if a rank would have no example in a step."""
        last = self.steps_per_epoch - 1  # Shares have full batches first, so this step is the smallest.
        smallest = self.share_offsets(last)[-1]
        if size > smallest:
            raise ConfigError(
                f"{size} ranks are more than the {smallest} examples of step {last + 1} of an epoch, planned for the "
                f"{len(self.shares)} ranks that the run began with; use at most {smallest} ranks, or train.resize=scale"
            )
        return replace(self, size=size)

    def until_epoch_end(self, step: int) -> "StepPlan":
        """This plan, cut short at the end of the epoch that a step of the run is in."""
        left = -self.position(step)[1] % self.steps_per_epoch
        return replace(self, num_steps=min(step + left, self.num_steps))

    def from_position(self, step: int, epoch: int, step_in_epoch: int) -> "StepPlan":
        """This plan for a run that reached this position after `step` steps, maybe with another plan."""
        shift = step - epoch * self.steps_per_epoch - step_in_epoch
        return replace(self, num_steps=max(step, self.scheduled_steps + shift), shift=shift)

    def weight(self, rank: int, step: Any) -> Any:
        """Weight of a rank's mean gradient: its number of examples in a step of the epoch over the ranks' mean number.

        With it the mean over the ranks is the mean over all examples of the step.
        """
        parts = self.parts(step)
        begin, end = parts[rank]
        return self.size * (end - begin) / parts[-1][1]

    def share_offsets(self, step: Any) -> list[Any]:
        """Offsets of the shares' batches in the joint batch of a step of the epoch, and its end."""
        sizes = [share.begin(step + 1) - share.begin(step) for share in self.shares]
        return list(accumulate(sizes, initial=0))

    def _even_cuts(self, total: Any) -> list[Any]:
        return [-(-total * rank // self.size) for rank in range(self.size + 1)]

    @property
    def num_epochs(self) -> int:
        """Number of epochs; train.steps may cut the last one short."""
        return math.ceil((self.num_steps - self.shift) / self.steps_per_epoch)

    @property
    def peak_learning_rate(self) -> float:
        return self.base_learning_rate * self.learning_rate_factor

    def position(self, step: int) -> tuple[int, int]:
        """Epoch (from 0) and step within it at a step of the run."""
        return divmod(step - self.shift, self.steps_per_epoch)


def make_plan(
    train: TrainConfig,
    base_learning_rate: float,
    shard_sizes: list[int],
    dataset_name: str,
    batch_sizes: list[int] | None = None,
    uneven: str = "trim",
) -> StepPlan:
    """Plans a run. Steps per epoch are equal on all ranks by construction.

    Args:
        train: Settings of the training.
        base_learning_rate: The rate before it is scaled by the number of ranks.
        shard_sizes: Training examples, by rank.
        dataset_name: Name of the data set, for messages.
        batch_sizes: Examples a step, by rank; None: train.batch_size on all.
        uneven: Examples that do not fill a batch on all ranks are left out of the epoch ("trim";
            others each time), trained on in short batches ("pad"), or refused ("error").

    Raises:
        ConfigError: A rank would have no example, or less than one batch.
    """
    size = len(shard_sizes)
    total = sum(shard_sizes)
    accumulate = train.accumulate
    batch_sizes = batch_sizes or batch_sizes_by_rank(train.batch_size, ["host"] * size)
    if min(shard_sizes) == 0:
        raise ConfigError(
            f"{size} ranks are more than the {total} training examples of {dataset_name} can feed; "
            f"use at most {max(1, sum(map(bool, shard_sizes)))} ranks"
        )

    # The rank with the fewest batches.
    examples, batch = min(zip(shard_sizes, batch_sizes), key=lambda rank: rank[0] / rank[1])
    if batch > examples:
        raise ConfigError(
            f"train.batch_size={batch} exceeds the {examples} examples of a rank "
            f"({total} of {dataset_name} over {size} ranks); "
            f"lower train.batch_size to at most {examples} or use fewer ranks"
        )

    # Full batches of the rank that has the fewest: a rank with more steps would wait for the others
    # forever.
    steps_per_epoch = min(examples // batch for examples, batch in zip(shard_sizes, batch_sizes))
    if steps_per_epoch < accumulate:
        raise ConfigError(
            f"train.accumulate={accumulate} exceeds the {steps_per_epoch} batches of a rank in an epoch ({total} "
            f"examples of {dataset_name} over {size} ranks); lower it to at most {steps_per_epoch}, or train.batch_size"
        )

    # An epoch ends with a change of weights.
    steps_per_epoch -= steps_per_epoch % accumulate
    shares = tuple(Share(batch, steps_per_epoch) for batch in batch_sizes)
    left_out = total - steps_per_epoch * sum(batch_sizes)
    if uneven == "error" and left_out:
        raise ConfigError(
            f"data.uneven=error and {left_out} of {total} training examples of {dataset_name} fill no batch on all "
            f"{size} ranks; choose another train.batch_size, data.uneven=pad (short batches) or trim (left out)"
        )

    if uneven == "pad":
        steps_per_epoch = max(math.ceil(examples / batch) for examples, batch in zip(shard_sizes, batch_sizes))
        # Each step of a rank needs an example, see Share.
        if steps_per_epoch > min(shard_sizes):
            raise ConfigError(
                f"a rank holds {min(shard_sizes)} of {total} training examples of {dataset_name} but another needs "
                f"{steps_per_epoch} steps for an epoch; spread the files more evenly, or choose data.uneven=trim"
            )
        shares = tuple(Share(batch, steps_per_epoch, examples) for examples, batch in zip(shard_sizes, batch_sizes))

    if train.steps is None:
        num_steps = train.epochs * steps_per_epoch
    elif train.divide_steps_by_size:
        num_steps = max(1, train.steps // size // accumulate) * accumulate
    else:
        num_steps = train.steps

    factor = learning_rate_factor(train, size * train.accumulate)
    return StepPlan(shares, num_steps, base_learning_rate, factor, total, accumulate=accumulate)


def learning_rate_factor(train: TrainConfig, num_batches: int) -> float:
    """Returns the factor of the learning rate for a step that takes so many batches.

    Goyal et al., https://arxiv.org/abs/1706.02677: a batch that is n times as large takes n times the
    rate. The square root keeps the variance of a step instead, https://arxiv.org/abs/1404.5997.
    """
    factors = {"linear": float(num_batches), "sqrt": math.sqrt(num_batches), "none": 1.0}
    return factors[train.learning_rate_scale]


def batch_sizes_by_rank(batch_size: int | list[int], hosts: list[str]) -> list[int]:
    """Returns batch sizes by rank.

    Args:
        batch_size: One number, one for each rank, or one for each host in rank order.
        hosts: The host of each rank.

    Raises:
        ConfigError: There are neither as many numbers as ranks nor as many as hosts.

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
            f"train.batch_size={batch_size} has {len(batch_size)} numbers for {len(hosts)} ranks on {len(order)} "
            "hosts; give one number, one for each rank, or one for each host"
        )
    return [batch_size[order.index(host)] for host in hosts]


def planned_batch_sizes(
    meta: dict[str, Any] | None,
    train: TrainConfig,
    hosts: list[str],
) -> list[int]:
    """Batch sizes of the ranks for which the plan is made.

    They are the ranks that the run began with, or the current ones. The current ranks get a plan of
    their own with train.resize=scale, from the end of an epoch on.

    Args:
        meta: Meta of the checkpoint to continue from, if any.
        train: The current settings.
        hosts: The host of each current rank.

    Raises:
        CheckpointError: Both train.batch_size and the number of ranks have changed.
    """
    if meta is None:
        return batch_sizes_by_rank(train.batch_size, hosts)
    is_resized = meta["num_ranks"] != len(hosts)
    if train.resize == "scale" and is_resized and not meta["step_in_epoch"]:
        return batch_sizes_by_rank(train.batch_size, hosts)
    before = meta["batch_size"]
    if train.batch_size == before:
        return meta["batch_sizes"]
    if is_resized:
        raise CheckpointError(
            f"the run began with train.batch_size={before} on {meta['num_ranks']} ranks, and now it is "
            f"{train.batch_size} on {len(hosts)}; change one of the two at a time: set train.batch_size={before}"
        )
    return batch_sizes_by_rank(train.batch_size, hosts)


def resumed_plan(
    plan: StepPlan,
    meta: dict[str, Any] | None,
    train: TrainConfig,
    size: int,
) -> StepPlan:
    """The plan, made from planned_batch_sizes, on `size` ranks and from the checkpoint's position.

    Another number of ranks follows it to the end, or with train.resize=scale to the end of the
    current epoch.
    """
    if meta is None:
        return plan
    plan = plan.from_position(meta["step"], meta["epoch"], meta["step_in_epoch"])
    if len(plan.shares) == size:
        return plan
    plan = plan.on(size)
    return plan.until_epoch_end(meta["step"]) if train.resize == "scale" else plan


def share_of_progress(noise_scale: float, batch_size: float, joint_batch: float) -> float:
    """Progress of an example in the joint batch, relative to one in a rank's own batch.

    To reach a given loss, the examples grow with the batch as 1 + batch / noise_scale (McCandlish et al. 2018,
    arXiv:1812.06162, section 2.3).

    >>> share_of_progress(1000.0, 0, 1000), share_of_progress(1e12, 64, 1024) > 0.999
    (0.5, True)
    """
    return (noise_scale + batch_size) / (noise_scale + joint_batch)
