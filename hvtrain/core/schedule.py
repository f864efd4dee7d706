"""The learning rate as a pure function of the step.

LearningRate (training/setup.py) puts it into the graph; tests call it directly.

Every schedule first warms up linearly, step by step, from the base rate (that of one rank) or from
warmup_from to the peak rate (base times the plan's factor), as in Goyal et al. 2017, "Accurate, Large
Minibatch SGD", section 2.2. With one rank, base and peak are equal and the warm-up is flat. The rate
depends only on the step, so it is correct after a resume without any saved state.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hvtrain.errors import ConfigError

# The functions that schedules use, for Python numbers. For tensors keras.ops has the same names.
SCALARS = SimpleNamespace(
    minimum=min,
    maximum=max,
    cos=math.cos,
    where=lambda condition, yes, no: yes if condition else no,
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warms up over warmup_epochs, then applies a subclass's decay over the rest of num_steps.

    base and peak are learning rates; steps are the plan's optimizer steps, counted from 0.
    warmup_from: the rate at step 0 in place of base, capped at the peak rate.

    Raises:
        ConfigError: if warmup_epochs or the first rate is negative or not finite.
    """

    base: float
    peak: float
    steps_per_epoch: int
    num_steps: int
    warmup_epochs: float = 0.0
    warmup_from: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_epochs < math.inf:
            raise ConfigError(
                f"schedule.warmup_epochs={self.warmup_epochs} is out of range; it must be at least 0"
            )
        if not 0 <= self.first_rate < math.inf:
            raise ConfigError(
                f"schedule.warmup_from={self.warmup_from} is not a learning rate; it must be at least 0"
            )

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup_epochs * self.steps_per_epoch)

    @property
    def first_rate(self) -> float:
        """Learning rate at which the warm-up begins."""
        if self.warmup_from is None:
            return self.base
        # A recipe's first rate may exceed the peak rate if the batch is
        # smaller than any in the recipe.
        return min(self.warmup_from, self.peak)

    def __call__(self, step: Any, ops: Any = SCALARS) -> Any:
        """Returns the learning rate at a step: a float with the default ops, a tensor with keras.ops."""
        warmup = max(1, self.warmup_steps)
        rising = self.first_rate + (self.peak - self.first_rate) * ops.minimum(step / warmup, 1.0)
        decay_steps = max(1, self.num_steps - self.warmup_steps)
        progress = ops.minimum(ops.maximum((step - self.warmup_steps) / decay_steps, 0.0), 1.0)
        return ops.where(
            step < self.warmup_steps, rising, self.peak * self.decay(step, progress, ops)
        )

    def decay(self, step: Any, progress: Any, ops: Any) -> Any:
        """Returns the factor that multiplies the peak rate after the warm-up: 1 here.

        Args:
            step: the step of the plan.
            progress: 0 at the end of the warm-up, 1 at the end of the run.
            ops: as in __call__.
        """
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The peak rate until the end."""


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """The peak rate, multiplied by `factor` at each of the given epochs."""

    at_epochs: Sequence[float] = field(default=())
    factor: float = 0.1

    def decay(self, step: Any, progress: Any, ops: Any) -> Any:
        result: Any = 1.0
        for epoch in self.at_epochs:
            result = result * ops.where(
                step >= round(epoch * self.steps_per_epoch), self.factor, 1.0
            )
        return result


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from the peak rate to final_fraction of it.

    Loshchilov and Hutter 2017, eq. 5, without restarts.
    """

    final_fraction: float = 0.0

    def decay(self, step: Any, progress: Any, ops: Any) -> Any:
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (
            1 + ops.cos(math.pi * progress)
        )


@dataclass(frozen=True, kw_only=True)
class Polynomial(Schedule):
    """(1 - progress) to the given power, from the peak rate to final_fraction of it.

    Power 1 is a straight line.
    """

    power: float = 1.0
    final_fraction: float = 0.0

    def decay(self, step: Any, progress: Any, ops: Any) -> Any:
        return self.final_fraction + (1 - self.final_fraction) * (1 - progress) ** self.power


@dataclass(frozen=True, kw_only=True)
class RangeTest(Schedule):
    """Exponential growth from `lowest` to `highest`, whatever the peak rate (Smith 2015, arXiv:1506.01186).

    Both are the optimizer's actual rates, for the global batch.
    """

    lowest: float = 1e-6
    highest: float = 10.0

    def decay(self, step: Any, progress: Any, ops: Any) -> Any:
        return self.lowest * (self.highest / self.lowest) ** progress / self.peak


def rate_factor(model: Any) -> Any:
    """Returns the variable by which callbacks scale the scheduled rate; None if there is none."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return getattr(optimizer._learning_rate, "factor", None)
