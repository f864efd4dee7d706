"""Arithmetic of a run: batches, steps, peak learning rate. Pure. runner builds one StepPlan; everyone else reads it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvtrain.config import TrainConfig
from hvtrain.errors import ConfigError


@dataclass(frozen=True)
class Stretch:
    """One call of Keras's fit: epochs initial_epoch ... epochs - 1, each of steps_per_epoch steps."""

    first_step: int
    initial_epoch: int
    epochs: int
    steps_per_epoch: int


@dataclass(frozen=True)
class Share:
    """One rank's examples of an epoch, cut into steps: full batches as long as there are, then what is left.

    num_examples defaults to full batches in all steps. No step is empty, since a rank without an example would
    have nothing to say about the gradient: the last ones leave at least one example for each step to come.
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
        """True when every step has a full batch."""
        return self.num_examples == self.steps * self.batch_size

    def begin(self, step: Any, minimum: Callable[[Any, Any], Any] = min) -> Any:
        """Examples before a step of the epoch, 0 ... steps; with tf.minimum for tensors of steps.

        >>> [Share(32, 3, 66).begin(step) for step in range(4)]
        [0, 32, 64, 66]
        >>> [Share(32, 3, 65).begin(step) for step in range(4)]
        [0, 32, 64, 65]
        >>> [Share(32, 3, 64).begin(step) for step in range(4)]
        [0, 32, 63, 64]
        """
        return minimum(step * self.batch_size, self.num_examples - (self.steps - step))


@dataclass(frozen=True)
class StepPlan:
    """All numbers that the ranks must agree on. Steps are the same on every rank; shares are by rank."""

    shares: tuple[Share, ...]
    num_steps: int
    base_learning_rate: float
    learning_rate_factor: float
    num_examples: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.shares)

    @property
    def steps_per_epoch(self) -> int:
        return self.shares[0].steps

    @property
    def batch_sizes(self) -> list[int]:
        """Examples of a full step, by rank."""
        return [share.batch_size for share in self.shares]

    @property
    def global_batch(self) -> int:
        """Examples that one full step consumes over all ranks."""
        return sum(self.batch_sizes)

    @property
    def examples_per_epoch(self) -> int:
        """Examples that an epoch consumes over all ranks; num_examples of the data set where none is left out."""
        return sum(share.num_examples for share in self.shares)

    @property
    def is_even(self) -> bool:
        """True when all ranks have batches of one size in all steps, so that means over ranks are plain means."""
        return len(set(self.batch_sizes)) == 1 and all(share.is_full for share in self.shares)

    def weight(self, rank: int, step: Any, minimum: Callable[[Any, Any], Any] = min) -> Any:
        """Weight of a rank's mean gradient in the mean over ranks: its examples of the step over the ranks' mean.

        With it the mean over the ranks is the mean over all examples of the step. step is one of the epoch.

        >>> plan = StepPlan((Share(48, 10), Share(16, 10)), 10, 0.1, 2.0)
        >>> plan.weight(0, 3), plan.weight(1, 3)
        (1.5, 0.5)
        """
        sizes = [share.begin(step + 1, minimum) - share.begin(step, minimum) for share in self.shares]
        return self.size * sizes[rank] / sum(sizes)

    @property
    def num_epochs(self) -> int:
        """Epochs begun; the last one may be cut short by train.steps."""
        return math.ceil(self.num_steps / self.steps_per_epoch)

    @property
    def peak_learning_rate(self) -> float:
        return self.base_learning_rate * self.learning_rate_factor

    def position(self, step: int) -> tuple[int, int]:
        """Epoch (from 0) and step within it of the run's step.

        >>> StepPlan((Share(32, 10),) * 2, 35, 0.1, 2.0).position(23)
        (2, 3)
        """
        return divmod(step, self.steps_per_epoch)

    def stretches(self, start_step: int = 0) -> list[Stretch]:
        """The calls of fit that lead from start_step to num_steps: rest of an epoch, whole epochs, a short end.

        >>> [(s.first_step, s.initial_epoch, s.epochs, s.steps_per_epoch)
        ...  for s in StepPlan((Share(32, 10),) * 2, 35, 0.1, 2.0).stretches(13)]
        [(13, 1, 2, 7), (20, 2, 3, 10), (30, 3, 4, 5)]
        """
        found = []
        step = start_step
        while step < self.num_steps:
            epoch, done = self.position(step)
            whole_epochs = (self.num_steps - step) // self.steps_per_epoch
            if done or not whole_epochs:
                steps = min(self.steps_per_epoch - done, self.num_steps - step)
                found.append(Stretch(step, epoch, epoch + 1, steps))
                step += steps
            else:
                found.append(Stretch(step, epoch, epoch + whole_epochs, self.steps_per_epoch))
                step += whole_epochs * self.steps_per_epoch
        return found


def make_plan(
    train: TrainConfig,
    base_learning_rate: float,
    shard_sizes: list[int],
    dataset_name: str,
    batch_sizes: list[int] | None = None,
    uneven: str = "trim",
) -> StepPlan:
    """The plan of a run whose ranks hold shard_sizes[rank] training examples and take batch_sizes[rank] a step.

    Steps per epoch are equal on all ranks by construction. What does not fill a batch on all ranks is left out
    of the epoch (uneven="trim"; another part each time), trained on in short batches ("pad"), or refused ("error").
    Raises ConfigError when a rank would have no example, or less than one batch.
    """
    size, total = len(shard_sizes), sum(shard_sizes)
    batch_sizes = batch_sizes or size_of_each_rank(train.batch_size, ["host"] * size)
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
    shares = tuple(Share(batch, full) for batch in batch_sizes)
    left_out = total - full * sum(batch_sizes)
    if uneven == "error" and left_out:
        raise ConfigError(
            f"dataset.uneven=error and {left_out} of {total} training examples of {dataset_name} fill no batch on all "
            f"{size} ranks; choose another train.batch_size, dataset.uneven=pad (short batches) or trim (left out)"
        )
    if uneven == "pad":
        shares = _padded(shard_sizes, batch_sizes, dataset_name)
    steps_per_epoch = shares[0].steps
    if train.steps is None:
        num_steps = train.epochs * steps_per_epoch
    else:
        num_steps = max(1, train.steps // size) if train.divide_steps_by_size else train.steps
    factor = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}[train.learning_rate_scale]
    return StepPlan(shares, num_steps, base_learning_rate, factor, total)


def size_of_each_rank(batch_size: int | list[int], hosts: list[str]) -> list[int]:
    """Batch sizes by rank, from one number, one for each rank, or one for each host in the order of the ranks.

    Raises ConfigError for a list of any other length.

    >>> size_of_each_rank([48, 16], ["s1", "s1", "s2", "s2"])
    [48, 48, 16, 16]
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


def _padded(shard_sizes: list[int], batch_sizes: list[int], dataset_name: str) -> tuple[Share, ...]:
    steps = max(math.ceil(examples / batch) for examples, batch in zip(shard_sizes, batch_sizes))
    if steps > min(shard_sizes):
        raise ConfigError(
            f"a rank holds {min(shard_sizes)} of {sum(shard_sizes)} training examples of {dataset_name} and another so "
            f"many that an epoch takes {steps} steps; spread the files more evenly, or choose dataset.uneven=trim"
        )
    return tuple(Share(batch, steps, examples) for examples, batch in zip(shard_sizes, batch_sizes))
