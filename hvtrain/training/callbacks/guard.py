"""The ranks' weights are compared while they train, and a loss that is not finite ends the training."""

from __future__ import annotations

import math
from typing import Any

import keras

from hvtrain.errors import TrainingError
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.parts import WeightCheck
from hvtrain.training.callbacks.position import Position


class Guard(keras.callbacks.Callback):
    """Compares trained weights and slots after every N steps, and looks at the epoch's loss (every rank).

    Checkpointing compares everything once more before it writes. Put it after the callback that makes the
    epoch's metrics those of all ranks: all ranks then see the same loss.
    """

    def __init__(self, weights: WeightCheck, every: int, strategy: Strategy, position: Position) -> None:
        super().__init__()
        self.weights = weights
        self.every = every
        self.strategy = strategy
        self.position = position

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.every and self.position.step % self.every == 0:
            self.weights(f"after step {self.position.step:,}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Under a dynamic loss scale steps that overflow are skipped, and their loss is no fault.
        if math.isfinite((logs or {}).get("loss", 0.0)) or hasattr(self.model.optimizer, "dynamic_scale"):
            return
        own = float(self.model.get_metrics_result()["loss"])
        ranks = [rank for rank, fine in enumerate(self.strategy.comm.gather(math.isfinite(own))) if not fine]
        raise TrainingError(
            f"the loss of epoch {epoch + 1} is not finite (step {self.position.step:,}) on {named(ranks)}; {ADVICE}"
        )


ADVICE = (
    "the last checkpoint is from before; lower optimizer.learning_rate, clip gradients "
    "(+optimizer.global_clipnorm=1), or look at that data"
)


def named(ranks: list[int]) -> str:
    """Ranks in words.

    >>> named([1]), named([0, 3])
    ('rank 1', 'ranks 0, 3')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
