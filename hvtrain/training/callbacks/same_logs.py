"""The chief's numbers are everyone's, before callbacks decide on them."""

from __future__ import annotations

from typing import Any

import keras

from hvtrain.strategies.base import Strategy


class SameLogs(keras.callbacks.Callback):
    """Replaces the logs of an epoch by those of the chief (every rank).

    Put it before the user's callbacks: EarlyStopping, ReduceLROnPlateau and their like then decide alike.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.strategy = strategy

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        own = {name: float(value) for name, value in (logs or {}).items()}
        if logs is not None:
            logs.update(self.strategy.comm.broadcast(own))
