"""Checks during training that ranks stay equal."""

from typing import Any

import keras

from hvtrain.keras.equality import WeightCheck


class WeightCheckCallback(keras.callbacks.Callback):
    """Compares trainable weights and optimizer state of all ranks every `every_batches` batches (every rank).

    Also after the first batch and at the end. Raises RankError on all ranks if they differ. Not in Horovod.
    """

    def __init__(self, every_batches: int = 500) -> None:
        super().__init__()
        self.every_batches = every_batches
        self.check: WeightCheck | None = None
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.check is None:
            self.check = WeightCheck(self.model)
        if self._batches % self.every_batches == 0:
            self.check(f"at batch {self._batches}")
        self._batches += 1

    def on_train_end(self, logs: Any = None) -> None:
        if self.check is not None:
            self.check("at the end of the training")
