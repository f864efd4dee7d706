"""Stops all ranks together."""

from typing import Any

import keras
import numpy as np

from hvtrain.keras.collectives import sum_arrays
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.shared_flag import SharedFlag


class StopTogetherCallback(keras.callbacks.Callback):
    """Stops all ranks after the same step when a callback of one rank sets model.stop_training (every rank).

    Put it after the callbacks that may stop. Within an epoch the request travels with the next step's gradients. At
    the end of an epoch, and without a DistributedOptimizer, the ranks exchange a message.
    Not in Horovod, where the ranks that continue wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._flag: SharedFlag | None = None
        self._requested = False

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        hook = hook_of(model.optimizer)
        if self._flag is None and hook:
            self._flag = hook.reducer.flag = SharedFlag()
            model.train_function = None  # One that was traced before does not carry the flag.

    def on_train_begin(self, logs: Any = None) -> None:
        self._requested = False
        if self._flag:
            self._flag.clear()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.stop_training and not self._requested:
            self._requested = True
            if self._flag:
                self._flag.set()
        self.model.stop_training = self._flag is not None and self._flag.is_set()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        requested = self._requested or self.model.stop_training
        self.model.stop_training = bool(sum_arrays([np.array(float(requested))])[0] > 0)
