"""Averages an epoch's metrics over all ranks."""

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvtrain.keras.collectives import sum_arrays


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces the metrics in an epoch's logs by their means over all ranks (every rank).

    Each rank counts the same, as upstream. Put it before callbacks that act on the logs.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        names = sorted(logs or {})
        with tf.device(self.device or None):
            sums = sum_arrays([(logs or {})[name] for name in names])
        for name, total in zip(names, sums):
            (logs or {})[name] = float(total) / hvd.size()
