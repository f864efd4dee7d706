"""Training metrics over all ranks at the end of each epoch."""

from __future__ import annotations

from typing import Any

import keras

from hvtrain.strategies.base import Strategy
from hvtrain.strategies.evaluation import metrics_over_ranks


class EpochMetrics(keras.callbacks.Callback):
    """Puts the training metrics over all ranks into the epoch's logs (every rank)."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.strategy = strategy

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(metrics_over_ranks(self.model, self.strategy))
