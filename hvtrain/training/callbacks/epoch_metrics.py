"""Training metrics of an epoch: over all its steps, over all ranks, and the same in all logs."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvtrain.strategies.comm import Comm
from hvtrain.strategies.evaluation import metrics_over_ranks


class EpochMetrics(keras.callbacks.Callback):
    """Puts the training metrics of the whole epoch, over all ranks, into its logs (every rank).

    After a resume within an epoch, resumed is this rank's state from store.rank_state, and the model's metrics must be
    built.
    """

    def __init__(self, comm: Comm, resumed: Mapping[str, np.ndarray] | None = None) -> None:
        super().__init__()
        self.comm = comm
        self._resumed = [value for name, value in sorted((resumed or {}).items()) if name.startswith("metric/")]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Keras has just reset the metrics.
        for variable, value in zip(self.model.metrics_variables, self._resumed):
            variable.assign(value)
        self._resumed = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(metrics_over_ranks(self.model, self.comm))


class SameLogs(keras.callbacks.Callback):
    """Replaces an epoch's logs by the chief's, so that callbacks after it decide alike on all ranks (every rank)."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.comm = comm

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        numbers = self.comm.broadcast({name: float(value) for name, value in (logs or {}).items()})
        if logs is not None:
            logs.update(numbers)
