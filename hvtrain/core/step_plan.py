"""Arithmetic of a run: batches, steps, peak learning rate. Pure. planning makes a StepPlan; everyone else reads it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from hvtrain.core.topology import reduced
from hvtrain.errors import ConfigError


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
    """All numbers that the ranks must agree on. Steps are the same on every rank.

    shares: how the data are dealt, one share for each rank that the run began with.
    num_ranks: the ranks that work on it, where they are others: they cut each step's joint batch evenly.
    shift: steps that the run has counted beyond (or short of) those that this plan would have led to so far.
    scheduled_steps: the plan's own steps in all, where num_steps, which the run counts, are others.
    accumulate: steps whose gradients make up one change of weights; an epoch has a multiple of them.
    """

    shares: tuple[Share, ...]
    num_steps: int
    base_learning_rate: float
    learning_rate_factor: float
    num_examples: int = 0
    num_ranks: int = 0
    shift: int = 0
    scheduled_steps: int = 0
    accumulate: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_ranks", self.num_ranks or len(self.shares))
        object.__setattr__(self, "scheduled_steps", self.scheduled_steps or self.num_steps)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.num_ranks

    @property
    def is_cut_anew(self) -> bool:
        """True when other ranks work on it than it was made for."""
        return self.num_ranks != len(self.shares)

    @property
    def hands_over(self) -> bool:
        """True when it ends before its time, for another plan to go on."""
        return self.num_steps < self.scheduled_steps + self.shift

    @property
    def weights(self) -> tuple[int, ...]:
        """How much of the data each share holds, in the smallest whole numbers."""
        return reduced([share.batch_size for share in self.shares])

    @property
    def steps_per_epoch(self) -> int:
        return self.shares[0].steps

    @property
    def batch_sizes(self) -> list[int]:
        """Examples of a full step, by rank."""
        if self.is_cut_anew:
            return [end - begin for begin, end in pairwise(self._even_cuts(self.global_batch))]
        return [share.batch_size for share in self.shares]

    @property
    def global_batch(self) -> int:
        """Examples that one full step consumes over all ranks."""
        return sum(share.batch_size for share in self.shares)

    @property
    def examples_per_epoch(self) -> int:
        """Examples that an epoch consumes over all ranks; num_examples of the data set where none is left out."""
        return sum(share.num_examples for share in self.shares)

    @property
    def is_full(self) -> bool:
        """True when every step has a full batch."""
        return all(share.is_full for share in self.shares)

    @property
    def is_even(self) -> bool:
        """True when all ranks have batches of one size in all steps, so that means over ranks are plain means."""
        return len(set(self.batch_sizes)) == 1 and self.is_full

    def parts(self, step: Any, minimum: Callable[[Any, Any], Any] = min) -> list[tuple[Any, Any]]:
        """Each rank's part, from and to, of the joint batch of a step of the epoch: the shares' batches in a row.

        >>> StepPlan((Share(32, 10), Share(32, 10)), 10, 0.1, 2.0).on(3).parts(0)
        [(0, 22), (22, 43), (43, 64)]
        """
        dealt = self.begins(step, minimum)
        return list(pairwise(self._even_cuts(dealt[-1]) if self.is_cut_anew else dealt))

    def shares_of(self, rank: int) -> range:
        """The shares of which a rank has a part in some step; with full batches it is one and the same part."""
        steps = range(1 if self.is_full else self.steps_per_epoch)
        touched: set[int] = set()
        for dealt, (begin, end) in ((self.begins(step), self.parts(step)[rank]) for step in steps):
            touched.update((bisect_right(dealt, begin) - 1, bisect_left(dealt, end) - 1))
        return range(min(touched), max(touched) + 1)

    def on(self, num_ranks: int) -> StepPlan:
        """This plan on another number of ranks. Raises ConfigError where a rank would have no example of a step."""
        last = self.steps_per_epoch - 1  # Shares have full batches first, so no step is smaller.
        smallest = self.begins(last)[-1]
        if num_ranks > smallest:
            raise ConfigError(
                f"{num_ranks} ranks are more than the {smallest} examples of step {last + 1} of an epoch, as the run's "
                f"{len(self.shares)} ranks began; use at most {smallest} ranks, or train.resize=scale"
            )
        return replace(self, num_ranks=num_ranks)

    def until_epoch_end(self, step: int) -> StepPlan:
        """This plan up to the end of the epoch that is begun at a step of the run."""
        left = -self.position(step)[1] % self.steps_per_epoch
        return replace(self, num_steps=min(step + left, self.num_steps))

    def from_position(self, step: int, epoch: int, step_in_epoch: int) -> StepPlan:
        """This plan for a run that stands there after so many steps, maybe of another plan."""
        shift = step - epoch * self.steps_per_epoch - step_in_epoch
        return replace(self, num_steps=max(step, self.scheduled_steps + shift), shift=shift)

    def weight(self, rank: int, step: Any, minimum: Callable[[Any, Any], Any] = min) -> Any:
        """Weight of a rank's mean gradient in the mean over ranks: its examples of the step over the ranks' mean.

        With it the mean over the ranks is the mean over all examples of the step. step is one of the epoch.

        >>> plan = StepPlan((Share(48, 10), Share(16, 10)), 10, 0.1, 2.0)
        >>> plan.weight(0, 3), plan.weight(1, 3)
        (1.5, 0.5)
        """
        parts = self.parts(step, minimum)
        begin, end = parts[rank]
        return self.size * (end - begin) / parts[-1][1]

    def begins(self, step: Any, minimum: Callable[[Any, Any], Any] = min) -> list[Any]:
        """Where the shares' batches of a step of the epoch begin in the joint batch, and its end."""
        sizes = [share.begin(step + 1, minimum) - share.begin(step, minimum) for share in self.shares]
        return list(accumulate(sizes, initial=0))

    def _even_cuts(self, total: Any) -> list[Any]:
        return [-(-total * rank // self.size) for rank in range(self.size + 1)]

    @property
    def num_epochs(self) -> int:
        """Epochs begun; the last one may be cut short by train.steps."""
        return math.ceil((self.num_steps - self.shift) / self.steps_per_epoch)

    @property
    def peak_learning_rate(self) -> float:
        return self.base_learning_rate * self.learning_rate_factor

    def position(self, step: int) -> tuple[int, int]:
        """Epoch (from 0) and step within it of the run's step.

        >>> StepPlan((Share(32, 10),) * 2, 35, 0.1, 2.0).position(23)
        (2, 3)
        """
        return divmod(step - self.shift, self.steps_per_epoch)
