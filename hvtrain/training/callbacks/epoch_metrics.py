"""Training metrics over all ranks at the end of each epoch."""

from __future__ import annotations

from typing import Any

import keras

from hvtrain.strategies.comm import Comm
from hvtrain.strategies.evaluation import metrics_over_ranks


class EpochMetrics(keras.callbacks.Callback):
    """Puts the training metrics over all ranks into the epoch's logs (every rank)."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.comm = comm

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(metrics_over_ranks(self.model, self.comm))
