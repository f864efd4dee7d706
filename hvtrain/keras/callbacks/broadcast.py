"""Makes variables equal on all ranks before training."""

from typing import Any

import keras
import tensorflow as tf

from hvtrain.keras.collectives import broadcast_variables
from hvtrain.keras.reduction import variable_id


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Sets weights and optimizer state of all ranks to those of root_rank, once (every rank).

    Before the first step if the model is built, as one with an Input is; otherwise right after it, when its variables
    exist. local_variables stay as they are on each rank.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        listed = local_variables if isinstance(local_variables, list | tuple | set) else [local_variables]
        for variable in listed:
            if variable is not None and not isinstance(variable, keras.Variable | tf.Variable):
                raise ValueError(f"local_variables holds a {type(variable).__name__}; variables are needed")
        self._local = {variable_id(variable) for variable in listed if variable is not None}

    def register_local_var(self, var: Any) -> None:
        """Excludes this variable from the broadcast."""
        self._local.add(variable_id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.built and not self.broadcast_done:
            optimizer = self.model.optimizer
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        variables = [*self.model.weights, *self.model.optimizer.variables]
        with tf.device(self.device or None):
            broadcast_variables([v for v in variables if variable_id(v) not in self._local], self.root_rank)
        self.broadcast_done = True
