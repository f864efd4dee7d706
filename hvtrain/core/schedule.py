"""The learning rate as a pure function of the step.

LearningRate (training/setup.py) puts it into the graph; plan and the tests call it with numbers.

Every schedule begins with a linear warm-up, step by step, as in Goyal et al. 2017, "Accurate, Large
Minibatch SGD", section 2.2. It rises from the base rate (that of one rank), or from warmup_from, to
the peak rate (base times the plan's factor). With one rank, base and peak are equal, so the warm-up
from base is flat. The rate depends only on the step, so a resumed run needs no saved state for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hvtrain.errors import ConfigError

# The functions of keras.ops that schedules use, for Python numbers.
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
    warmup_from, if given, replaces base as the rate at step 0; it is capped at the peak rate.

    Raises:
        ConfigError: if warmup_epochs or the first rate is negative or not finite.

    >>> schedule = Schedule(base=0.1, peak=0.5, steps_per_epoch=10, num_steps=30, warmup_epochs=2)
    >>> [round(schedule(step), 6) for step in (0, 10, 20, 30)]
    [0.1, 0.3, 0.5, 0.5]
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
                f"schedule.warmup_epochs={self.warmup_epochs} is out of range; it must be at least 0 and finite"
            )
        if not 0 <= self.first_rate < math.inf:
            raise ConfigError(
                f"schedule.warmup_from={self.warmup_from} is not a learning rate; it must be at least 0 and finite"
            )

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup_epochs * self.steps_per_epoch)

    @property
    def first_rate(self) -> float:
        """Learning rate at which the warm-up begins."""
        if self.warmup_from is None:
            return self.base
        # The first rate of a recipe for large batches may exceed the peak rate of a small one.
        return min(self.warmup_from, self.peak)

    def __call__(self, step: Any, ops: Any = SCALARS) -> Any:
        """Returns the learning rate at a step: a float by default, a tensor with ops=keras.ops."""
        # Both rates are computed at every step, so neither may divide by 0 or leave its range.
        warmup_fraction = ops.minimum(step / max(1, self.warmup_steps), 1.0)
        warmup_rate = self.first_rate + (self.peak - self.first_rate) * warmup_fraction

        decay_steps = max(1, self.num_steps - self.warmup_steps)
        progress = ops.minimum(ops.maximum((step - self.warmup_steps) / decay_steps, 0.0), 1.0)
        decayed_rate = self.peak * self.decay(step, progress, ops)

        return ops.where(step < self.warmup_steps, warmup_rate, decayed_rate)

    def decay(self, step: Any, progress: Any, ops: Any) -> Any:
        """Returns the factor by which the peak rate is multiplied after the warm-up: 1 here.

        Args:
            step: the step of the plan.
            progress: 0 at the end of the warm-up, 1 at the end of the run.
            ops: as in __call__.
        """
        return 1.0


class Constant(Schedule):
    """The peak rate from the end of the warm-up to the end of the run."""


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """The peak rate, multiplied by `factor` again at each of the given epochs of the run.

    >>> schedule = Step(base=1.0, peak=1.0, steps_per_epoch=10, num_steps=90, at_epochs=(3, 6))
    >>> [round(schedule(step), 6) for step in (29, 30, 60)]
    [1.0, 0.1, 0.01]
    """

    at_epochs: Sequence[float] = ()
    factor: float = 0.1

    def decay(self, step: Any, progress: Any, ops: Any) -> Any:
        result: Any = 1.0
        for epoch in self.at_epochs:
            first_step = round(epoch * self.steps_per_epoch)
            result = result * ops.where(step >= first_step, self.factor, 1.0)
        return result


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from the peak rate to final_fraction of it.

    Loshchilov and Hutter 2017, eq. 5, without restarts.

    >>> schedule = Cosine(base=0.4, peak=0.4, steps_per_epoch=10, num_steps=40)
    >>> [round(schedule(step), 6) for step in (0, 20, 40)]
    [0.4, 0.2, 0.0]
    """

    final_fraction: float = 0.0

    def decay(self, step: Any, progress: Any, ops: Any) -> Any:
        decaying = 1 - self.final_fraction
        return self.final_fraction + decaying * 0.5 * (1 + ops.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Polynomial(Schedule):
    """A decay from the peak rate to final_fraction of it, as (1 - progress) to the given power.

    Power 1 is a straight line.
    """

    power: float = 1.0
    final_fraction: float = 0.0

    def decay(self, step: Any, progress: Any, ops: Any) -> Any:
        return self.final_fraction + (1 - self.final_fraction) * (1 - progress) ** self.power


@dataclass(frozen=True, kw_only=True)
class RangeTest(Schedule):
    """Exponential growth from `lowest` to `highest`, to find the range of rates that train well.

    See Smith 2015, arXiv:1506.01186. Both are the optimizer's actual rates, for the global batch,
    and do not depend on the peak rate.
    """

    lowest: float
    highest: float

    def decay(self, step: Any, progress: Any, ops: Any) -> Any:
        # Divided by the peak rate because __call__ multiplies by it.
        return self.lowest * (self.highest / self.lowest) ** progress / self.peak


def rate_factor(model: Any) -> Any:
    """Returns the variable by which callbacks scale the scheduled rate; None if there is none."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    # The public `learning_rate` is only the current value; LearningRate itself holds the factor.
    return getattr(optimizer._learning_rate, "factor", None)
