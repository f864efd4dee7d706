"""Arithmetic of a run: batches, steps, peak learning rate. Pure.

hvtrain.config.make_plan makes a StepPlan, also for a resumed run; all other code only reads it.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from hvtrain.core.topology import reduced
from hvtrain.errors import ConfigError

# If trimming would leave out more than this share of the examples, data.uneven=auto pads instead; if an epoch leaves
# out more, the run reports it.
MOST_LEFT_OUT = 0.01


@dataclass(frozen=True)
class Share:
    """One rank's examples of an epoch, divided into steps: full batches first, then the remainder.

    num_examples defaults to full batches in all steps. No step is empty, since a rank without an example would have no
    gradient: the last batches shrink so that each step has at least one example.

    Raises ValueError if the examples do not fit the steps.
    """

    batch_size: int
    steps: int
    num_examples: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_examples", self.num_examples or self.steps * self.batch_size)
        if not self.steps <= self.num_examples <= self.steps * self.batch_size:
            raise ValueError(
                f"{self.num_examples} examples do not fit {self.steps} steps of 1 to {self.batch_size}"
            )

    @property
    def is_full(self) -> bool:
        """True if every step has a full batch."""
        return self.num_examples == self.steps * self.batch_size

    def begin(self, step: Any) -> Any:
        """Returns the number of examples before a step (0 ... steps) of the epoch; also for a tensor of steps.

        >>> [Share(32, 3, 66).begin(step) for step in range(4)]
        [0, 32, 64, 66]
        >>> [Share(32, 3, 64).begin(step) for step in range(4)]
        [0, 32, 63, 64]
        """
        full = step * self.batch_size
        most = self.num_examples - (self.steps - step)
        # min(full, most), written so that it also works on tensors: this
        # module does not import TensorFlow.
        return (full + most - abs(full - most)) // 2


@dataclass(frozen=True)
class StepPlan:
    """All numbers that the ranks must agree on. The number of steps is the same on every rank.

    shares: how the data are divided, one share for each rank that the run began with.
    num_steps: the run's step at which this plan ends.
    base_learning_rate, learning_rate_factor: their product is the peak learning rate.
    num_examples: training examples over all ranks, including those that an epoch leaves out.
    size: current number of ranks; if it differs from the number of shares, the ranks split each global batch evenly.
    shift: the run's step count minus this plan's, if the run began with a different plan.
    scheduled_steps: total steps of this plan, if different from num_steps.
    accumulate: steps per weight update; the steps of an epoch are a multiple of it.
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
        """True if the number of ranks differs from the one that the run began with."""
        return self.size != len(self.shares)

    @property
    def ends_early(self) -> bool:
        """True if this plan ends before the run does, and another plan continues it."""
        return self.num_steps < self.run_steps

    @property
    def run_steps(self) -> int:
        """Steps of the whole run as this plan would end it, even if another plan continues it."""
        return max(self.num_steps, self.scheduled_steps + self.shift)

    @property
    def weights(self) -> tuple[int, ...]:
        """Proportions of the shares, in the smallest whole numbers."""
        return reduced([share.batch_size for share in self.shares])

    @property
    def steps_per_epoch(self) -> int:
        return self.shares[0].steps

    @property
    def batch_sizes(self) -> list[int]:
        """Number of examples in a full step, by rank."""
        if self.is_resized:
            return [end - begin for begin, end in pairwise(self._even_cuts(self.global_batch))]
        return [share.batch_size for share in self.shares]

    @property
    def global_batch(self) -> int:
        """Number of examples in a full step over all ranks."""
        return sum(share.batch_size for share in self.shares)

    @property
    def examples_per_epoch(self) -> int:
        """Number of examples in an epoch over all ranks: num_examples, unless some are left out."""
        return sum(share.num_examples for share in self.shares)

    @property
    def is_full(self) -> bool:
        """True if every step has a full batch."""
        return all(share.is_full for share in self.shares)

    @property
    def is_even(self) -> bool:
        """True if in each step all ranks' batches have the same size, so that means over ranks need no weights."""
        return self.size == 1 or (len(set(self.batch_sizes)) == 1 and self.is_full)

    def parts(self, step: Any) -> list[tuple[Any, Any]]:
        """Returns each rank's slice (begin, end) of a step's global batch: the shares' batches, laid end to end."""
        offsets = self.share_offsets(step)
        return list(pairwise(self._even_cuts(offsets[-1]) if self.is_resized else offsets))

    def shares_of(self, rank: int) -> range:
        """Returns the indices of the shares that overlap a rank's slice in any step.

        With full batches all steps are the same.
        """
        steps = range(1 if self.is_full else self.steps_per_epoch)
        touched: set[int] = set()
        for step in steps:
            offsets = self.share_offsets(step)
            begin, end = self.parts(step)[rank]
            touched |= {bisect_right(offsets, begin) - 1, bisect_left(offsets, end) - 1}
        return range(min(touched), max(touched) + 1)

    def on(self, size: int) -> "StepPlan":
        """Returns this plan for `size` ranks. Raises ConfigError if a rank would have no example in a step."""
        # Shares have full batches first, so the last step is the smallest.
        last = self.steps_per_epoch - 1
        smallest = self.share_offsets(last)[-1]
        if size > smallest:
            raise ConfigError(
                f"{size} ranks are more than the {smallest} example(s) of step {last + 1} of an epoch, planned for the "
                f"{len(self.shares)} rank(s) that the run began with; use at most {smallest} rank(s), or "
                "train.resize=scale"
            )
        return replace(self, size=size)

    def until_epoch_end(self, step: int) -> "StepPlan":
        """Returns this plan, cut short at the end of the epoch to which a step of the run belongs."""
        left = -self.position(step)[1] % self.steps_per_epoch
        return replace(self, num_steps=min(step + left, self.num_steps))

    def from_position(self, step: int, epoch: int, step_in_epoch: int) -> "StepPlan":
        """Returns this plan for a run that reached this position after `step` steps, possibly with another plan."""
        shift = step - epoch * self.steps_per_epoch - step_in_epoch
        return replace(self, num_steps=max(step, self.scheduled_steps + shift), shift=shift)

    def weight(self, rank: int, step: Any) -> Any:
        """Returns the weight of a rank's mean gradient in a step of the epoch.

        It is the rank's number of examples, divided by the mean number per rank. With these weights the mean over the
        ranks is the mean over all examples of the step.
        """
        parts = self.parts(step)
        begin, end = parts[rank]
        return self.size * (end - begin) / parts[-1][1]

    def share_offsets(self, step: Any) -> list[Any]:
        """Returns the shares' offsets in the global batch of a step of the epoch, followed by that batch's size."""
        sizes = [share.begin(step + 1) - share.begin(step) for share in self.shares]
        return list(accumulate(sizes, initial=0))

    def _even_cuts(self, total: Any) -> list[Any]:
        return [-(-total * rank // self.size) for rank in range(self.size + 1)]

    @property
    def num_epochs(self) -> int:
        """Number of epochs until this plan ends; train.steps may cut the last one short."""
        return math.ceil((self.num_steps - self.shift) / self.steps_per_epoch)

    @property
    def run_epochs(self) -> int:
        """Number of epochs in run_steps."""
        return math.ceil((self.run_steps - self.shift) / self.steps_per_epoch)

    @property
    def peak_learning_rate(self) -> float:
        return self.base_learning_rate * self.learning_rate_factor

    def position(self, step: int) -> tuple[int, int]:
        """Returns the epoch (from 0) and the step within the epoch, for a step of the run."""
        return divmod(step - self.shift, self.steps_per_epoch)


def share_of_progress(noise_scale: float, batch_size: float, joint_batch: float) -> float:
    """Returns how much an example in the global batch advances training, relative to one in a rank's own batch.

    The number of examples needed to reach a given loss grows with the batch as 1 + batch / noise_scale (McCandlish et
    al. 2018, arXiv:1812.06162, section 2.3).

    Args:
        noise_scale: the gradient noise scale, in examples.
        batch_size: examples in a rank's own batch.
        joint_batch: examples in the global batch.

    >>> share_of_progress(1000.0, 0, 1000), share_of_progress(1e12, 64, 1024) > 0.999
    (0.5, True)
    """
    return (noise_scale + batch_size) / (noise_scale + joint_batch)
