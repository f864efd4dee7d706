"""Saves the best model of a training, on rank 0."""

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's ModelCheckpoint with save_best_only, on rank 0 alone; other ranks write nothing.

    Put it after MetricAverageCallback, so that the best is that of all ranks. Upstream takes no filepath: its Spark
    estimator sets one later. Here it is an argument, or an attribute set before fit. Raises ValueError at the start of
    training without one.
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
        # Keras checks the suffix of the path, which may be set only later.
        placeholder = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(filepath or placeholder, monitor, verbose, True, save_weights_only, mode, save_freq)
        self.filepath = None if filepath is None else str(filepath)

    def on_train_begin(self, logs: Any = None) -> None:
        suffix = ".weights.h5" if self.save_weights_only else ".keras"
        if self.filepath is None or not str(self.filepath).endswith(suffix):
            raise ValueError(f"BestModelCheckpoint has filepath={self.filepath}; give a path that ends in {suffix}")
        super().on_train_begin(logs)

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if hvd.rank() == 0:
            super()._save_model(epoch, batch, logs)
