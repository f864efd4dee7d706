"""What callbacks remember (patience, best value) survives a resume, and the calls of fit that make up one run."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvtrain.checkpoint.callback_records import NUMBERS, Saved
from hvtrain.checkpoint.store import rate_factor
from hvtrain.strategies.base import Strategy


class CallbackState(keras.callbacks.Callback):
    """Keeps what the given callbacks know, and gives it back when training begins again (every rank).

    On all ranks the learning rate is then the chief's.

    Numbers go into the checkpoint's meta and best_weights among its arrays; nothing else is kept. The factor on
    the learning rate belongs to it, since callbacks set it. Put it after those callbacks.
    """

    def __init__(self, callbacks: dict[str, keras.callbacks.Callback], saved: Saved, strategy: Strategy) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._saved = saved
        self._strategy = strategy

    def on_train_begin(self, logs: Any = None) -> None:
        for name, values in self._saved.items():
            if name in self._callbacks:
                vars(self._callbacks[name]).update(values)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        factor = rate_factor(self.model)
        if self._callbacks and factor is not None:
            factor.assign(self._strategy.comm.broadcast(float(factor)))  # Ranks with other rates would drift apart.
        self._saved = {name: {**state, **self._weights(name)} for name, state in self.numbers().items()}

    def numbers(self) -> Saved:
        """Callback's name -> its numbers."""
        held = {name: vars(callback) for name, callback in self._callbacks.items()}
        return {
            name: {key: float(values[key]) for key in NUMBERS if values.get(key) is not None}
            for name, values in held.items()
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """The best weights that callbacks hold, by the keys that `saved_state` reads."""
        return {
            f"callback/{name}/{index:04d}": weight
            for name in self._callbacks
            for index, weight in enumerate(self._weights(name).get("best_weights", []))
        }

    def _weights(self, name: str) -> dict[str, list[np.ndarray]]:
        weights = getattr(self._callbacks[name], "best_weights", None)
        return {"best_weights": weights} if weights else {}
