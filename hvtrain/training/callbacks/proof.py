"""Evidence that the ranks trained together, counted during the run."""

from typing import Any

import keras
import numpy as np

from hvtrain.strategies.parts import WeightCheck
from hvtrain.training.callbacks.position import Position, RunCallback
from hvtrain.training.run import Run


class Proof(RunCallback):
    """Counts the examples that went through the steps of each epoch, over all ranks (every rank)."""

    def __init__(self, run: Run, position: Position, weights: WeightCheck) -> None:
        super().__init__(run, position)
        self.weights = weights
        self.examples: list[int] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # Keras's mean of the loss counts the examples that it was computed on.
        own = next(metric for metric in self.model.metrics if metric.name == "loss").count
        count = int(self.comm.sum_arrays([np.asarray(own)])[0])
        if self.position.plan.position(self.position.step)[1] == 0:
            self.examples.append(count)

    def numbers(self, optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
        """The proof in result.json; reductions are those of this process."""
        accumulate = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps or 1
        return {
            "reductions": self.run.strategy.guards.num_reductions(optimizer),
            "steps": (self.position.step - self.position.start_step) // accumulate,
            "ranks": self.position.plan.size,
            "weight_checks": self.weights.num_checks,
            "examples_each_epoch": self.examples,
            "examples": self.position.plan.num_examples,
        }


def in_words(numbers: dict[str, Any]) -> str:
    """The proof in one line.

    >>> in_words({"reductions": 264, "steps": 264, "ranks": 2, "weight_checks": 14,
    ...           "examples_each_epoch": [1408, 1408], "examples": 1437})
    'reductions 264 of 264 steps; weights equal on 2/2 ranks (14 checks); 1,408 of 1,437 samples seen once per epoch'
    """
    ranks, checks = numbers["ranks"], numbers["weight_checks"]
    parts = []
    if ranks > 1:
        equal = f"weights equal on {ranks}/{ranks} ranks ({checks:,} check{'s' * (checks != 1)})"
        parts.append(f"reductions {numbers['reductions']:,} of {numbers['steps']:,} steps")
        parts.append(equal if checks else "weights not compared")
    seen = sorted(set(numbers["examples_each_epoch"]))
    if seen:
        counts = f"{seen[0]:,}" if len(seen) == 1 else f"{seen[0]:,} to {seen[-1]:,}"
        parts.append(f"{counts} of {numbers['examples']:,} samples seen once per epoch")
    return "; ".join(parts) or "one rank, less than an epoch: nothing to prove"
