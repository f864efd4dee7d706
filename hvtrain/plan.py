"""Arithmetic of a run: batches, steps, peak learning rate. Pure. runner builds one StepPlan; everyone else reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
class StepPlan:
    """All numbers that the ranks must agree on. Steps are optimizer steps, the same on every rank."""

    size: int
    batch_size: int
    steps_per_epoch: int
    num_steps: int
    base_learning_rate: float
    learning_rate_factor: float

    @property
    def global_batch(self) -> int:
        """Examples that one step consumes over all ranks."""
        return self.size * self.batch_size

    @property
    def num_epochs(self) -> int:
        """Epochs begun; the last one may be cut short by train.steps."""
        return math.ceil(self.num_steps / self.steps_per_epoch)

    @property
    def peak_learning_rate(self) -> float:
        return self.base_learning_rate * self.learning_rate_factor

    def position(self, step: int) -> tuple[int, int]:
        """Epoch (from 0) and step within it of the run's step.

        >>> StepPlan(2, 32, 10, 35, 0.1, 2.0).position(23)
        (2, 3)
        """
        return divmod(step, self.steps_per_epoch)

    def stretches(self, start_step: int = 0) -> list[Stretch]:
        """The calls of fit that lead from start_step to num_steps: rest of an epoch, whole epochs, a short end.

        >>> [(s.first_step, s.initial_epoch, s.epochs, s.steps_per_epoch)
        ...  for s in StepPlan(2, 32, 10, 35, 0.1, 2.0).stretches(13)]
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


def make_plan(train: TrainConfig, base_learning_rate: float, shard_sizes: list[int], dataset_name: str) -> StepPlan:
    """The plan of a run whose ranks hold shard_sizes[rank] training examples.

    Steps per epoch follow the smallest shard, so that they are equal on all ranks by construction.
    Raises ConfigError when a rank would have no example, or less than one batch.
    """
    size = len(shard_sizes)
    if min(shard_sizes) == 0:
        raise ConfigError(
            f"{size} ranks are more than the {sum(shard_sizes)} training examples of {dataset_name} can feed; "
            f"use at most {max(1, sum(map(bool, shard_sizes)))} ranks"
        )
    if train.batch_size > min(shard_sizes):
        raise ConfigError(
            f"train.batch_size={train.batch_size} exceeds the {min(shard_sizes)} examples of a rank "
            f"({sum(shard_sizes)} of {dataset_name} over {size} ranks); "
            f"lower train.batch_size to at most {min(shard_sizes)} or use fewer ranks"
        )
    steps_per_epoch = min(shard_sizes) // train.batch_size
    if train.steps is None:
        num_steps = train.epochs * steps_per_epoch
    else:
        num_steps = max(1, train.steps // size) if train.divide_steps_by_size else train.steps
    factor = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}[train.learning_rate_scale]
    return StepPlan(size, train.batch_size, steps_per_epoch, num_steps, base_learning_rate, factor)
