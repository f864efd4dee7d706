"""Checks at the first step that gradients are reduced."""

from typing import Any

import horovod.tensorflow as hvd
import keras

from hvtrain.errors import RankError
from hvtrain.keras.optimizer import is_distributed, num_reductions


class ReductionCheckCallback(keras.callbacks.Callback):
    """Stops training if the first step that changes weights reduces no gradient (every rank).

    Raises RankError if there are several ranks and the optimizer is not a DistributedOptimizer, or if the count in the
    graph is the same after the first step that changed weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: int | None = None
        self._first = 0
        self._checked = False

    def on_train_begin(self, logs: Any = None) -> None:
        if self._before is None:
            self._before = num_reductions(self.model.optimizer)
            self._first = int(self.model.optimizer.iterations.numpy())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._checked or hvd.size() == 1:
            return
        # Batches that only accumulate, or that an overflow skips, do not count.
        if is_distributed(self.model.optimizer) and int(self.model.optimizer.iterations.numpy()) == self._first:
            return
        self._checked = True
        if num_reductions(self.model.optimizer) == self._before:
            raise RankError(
                f"the first step reduced no gradient over the {hvd.size()} ranks, so each would train alone; "
                "wrap the optimizer that compile gets in hvtrain.keras.DistributedOptimizer"
            )
