"""The best model of a training, written by rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's ModelCheckpoint with save_best_only, on rank 0 alone; other ranks write nothing.

    Put it after MetricAverageCallback, so that the best is that of all ranks. Upstream has no filepath: its
    Spark estimator sets one later. Here it can be given, or set as an attribute before fit; Keras 3 needs one.
    Raises ValueError at the beginning of the training without one.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | Path | None = None,
    ) -> None:
        # Keras looks at the ending of a path, and None has none.
        stand_in = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(filepath or stand_in, monitor, verbose, True, save_weights_only, mode, save_freq)
        self.filepath = None if filepath is None else str(filepath)

    def on_train_begin(self, logs: Any = None) -> None:
        ending = ".weights.h5" if self.save_weights_only else ".keras"
        if self.filepath is None or not str(self.filepath).endswith(ending):
            raise ValueError(f"BestModelCheckpoint has filepath={self.filepath}; give a path that ends in {ending}")
        super().on_train_begin(logs)

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if hvd.rank() == 0:
            super()._save_model(epoch, batch, logs)
