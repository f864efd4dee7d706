"""No rank leaves the training loop alone."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvtrain.keras.ballot import Ballot
from hvtrain.keras.collectives import sum_arrays
from hvtrain.keras.optimizer import add_ballot, is_distributed


class StopTogetherCallback(keras.callbacks.Callback):
    """When a callback of one rank sets model.stop_training, all ranks stop, after the same step (every rank).

    Put it after the callbacks that may stop. Within an epoch the wish travels with the next step's gradients. At
    the end of an epoch, and where no DistributedOptimizer carries votes, the ranks ask each other.
    Not in Horovod, where the ranks that go on wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ballot: Ballot | None = None
        self._wished = False

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if self._ballot is None and is_distributed(model.optimizer):
            self._ballot = add_ballot(model.optimizer, 1)
            model.train_function = None  # One that was traced before carries no votes.

    def on_train_begin(self, logs: Any = None) -> None:
        self._wished = False
        if self._ballot:
            self._ballot.clear()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.stop_training and not self._wished:
            self._wished = True
            if self._ballot:
                self._ballot.wish(0)
        self.model.stop_training = self._ballot is not None and self._ballot.agreed()[0]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        wish = self._wished or self.model.stop_training
        self.model.stop_training = bool(sum_arrays([np.array(float(wish))])[0] > 0)
