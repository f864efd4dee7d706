"""Stops training when weights differ between ranks or the loss is not finite."""

import math
from typing import Any

from hvtrain.errors import TrainingError
from hvtrain.strategies.parts import WeightCheck
from hvtrain.training.callbacks.position import Position, RunCallback
from hvtrain.training.run import Run


class Guard(RunCallback):
    """Compares trained weights and slots after every guard.every steps, and checks the epoch's loss (every rank).

    Checkpointing compares everything once more before it writes. Put it after EpochMetrics, so that all ranks see
    the same loss.
    """

    def __init__(self, run: Run, position: Position, weights: WeightCheck) -> None:
        super().__init__(run, position)
        self.weights = weights

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.position.is_multiple_of(self.run.config.guard.every):
            self.weights(f"after step {self.position.step:,}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # A dynamic loss scale skips steps that overflow; their loss is not an error.
        if math.isfinite((logs or {}).get("loss", 0.0)) or hasattr(self.model.optimizer, "dynamic_scale"):
            return
        own = float(self.model.get_metrics_result()["loss"])
        ranks = [rank for rank, finite in enumerate(self.comm.gather(math.isfinite(own))) if not finite]
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
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
