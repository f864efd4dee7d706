"""State of the user's callbacks (patience, best value), kept across resumes and the fits of one run."""

from typing import Any

import keras
import numpy as np

from hvtrain.checkpoint.store import NUMBERS, rate_factor
from hvtrain.strategies.comm import Comm


class CallbackState(keras.callbacks.Callback):
    """Saves the state of the given callbacks, and restores it when training begins again (every rank).

    Numbers go into the checkpoint's meta and best_weights among its arrays; nothing else is kept. Callbacks set the
    factor of the learning rate, so all ranks get the chief's. Put it after those callbacks.
    """

    def __init__(
        self, callbacks: dict[str, keras.callbacks.Callback], saved: dict[str, dict[str, Any]], comm: Comm
    ) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._saved = saved
        self._comm = comm

    def on_train_begin(self, logs: Any = None) -> None:
        for name, values in self._saved.items():
            if name in self._callbacks:
                vars(self._callbacks[name]).update(values)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        factor = rate_factor(self.model)
        if self._callbacks and factor is not None:
            factor.assign(self._comm.broadcast(float(factor)))  # Ranks with different rates would drift apart.
        self._saved = {name: dict(numbers) for name, numbers in self.numbers().items()}
        for name, weights in self._best_weights().items():
            self._saved[name]["best_weights"] = weights

    def numbers(self) -> dict[str, dict[str, Any]]:
        """The numbers of each callback, by its name."""
        return {
            name: {key: float(value) for key in NUMBERS if (value := vars(callback).get(key)) is not None}
            for name, callback in self._callbacks.items()
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """The best weights in callbacks, by the keys that Checkpoint.callbacks reads."""
        return {
            f"callback/{name}/{index:04d}": weight
            for name, weights in self._best_weights().items()
            for index, weight in enumerate(weights)
        }

    def _best_weights(self) -> dict[str, list[np.ndarray]]:
        found = {name: getattr(callback, "best_weights", None) for name, callback in self._callbacks.items()}
        return {name: weights for name, weights in found.items() if weights}
