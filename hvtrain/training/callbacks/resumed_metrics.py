"""The training metrics of an epoch that was begun before a resume."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


class ResumedMetrics(keras.callbacks.Callback):
    """Gives the metrics of the first epoch the state they had at the checkpoint (every rank, each its own).

    state is what checkpoint.rank_state saved; the model's metrics must be built before the first epoch.
    """

    def __init__(self, state: dict[str, np.ndarray]) -> None:
        super().__init__()
        self._values = [state[name] for name in sorted(state) if name.startswith("metric/")]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Keras has just reset them.
        for variable, value in zip(self.model.metrics_variables, self._values):
            variable.assign(value)
        self._values = []
