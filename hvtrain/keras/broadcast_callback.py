"""Horovod's BroadcastGlobalVariablesCallback on Keras 3."""

import warnings
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.keras.collectives import broadcast_variables
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.tape import num_tape_reductions
from hvtrain.keras.variables import variable_id


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Sets weights and optimizer state of all ranks to those of root_rank, once for each model (every rank).

    Before the first step if the model is built, as one with an Input is; otherwise right after the first step, which
    creates its variables, and with a warning: that step's gradients are those of each rank's own weights. Also sets the
    state of other optimizers that are attributes of the model. Each rank keeps its own local_variables.

    Raises RankError if Keras knows that the ranks hold unlike numbers of batches. Warns if the first batch reduced
    nothing, neither by a DistributedOptimizer nor by a DistributedGradientTape.
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

    def set_model(self, model: keras.Model) -> None:
        if model is not self.model:
            self.broadcast_done = False
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        self._compare_steps()
        self._reduced_by_tapes = num_tape_reductions()
        if self.model.built and not self.broadcast_done:
            self._broadcast()
        elif not self.broadcast_done and hvd.size() > 1 and hvd.rank() == 0:
            warnings.warn(
                f"{self.model.name} is not built yet, so the ranks take their first step from unlike weights, and are "
                "equal only after it; begin the model with a keras.Input, or call model.build(input_shape) before fit",
                stacklevel=2,
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast()
        if batch == 0 and self._trains_alone():
            warnings.warn(
                f"rank {hvd.rank()} of {hvd.size()} trains alone: the first batch reduced no gradient; wrap the "
                "optimizer in hvtrain.keras.DistributedOptimizer, or the tape in DistributedGradientTape",
                stacklevel=2,
            )

    def _compare_steps(self) -> None:
        steps = hvd.allgather_object(self.params.get("steps"), name="hvtrain.steps") if hvd.size() > 1 else []
        unlike = [rank for rank, number in enumerate(steps) if number != steps[0]]
        if unlike and None not in steps:
            raise RankError(
                f"an epoch has {steps[0]} batches on rank 0 and {steps[unlike[0]]} on rank {unlike[0]}, so some ranks "
                "would wait for others that have ended; pass fit the same steps_per_epoch on all ranks "
                "(hvtrain.keras.steps_per_epoch(number of batches) is the smallest)"
            )

    def _trains_alone(self) -> bool:
        is_plain = not any(hook_of(optimizer) for optimizer in self._optimizers())
        return hvd.size() > 1 and is_plain and num_tape_reductions() == self._reduced_by_tapes

    def _optimizers(self) -> list[Any]:
        held = vars(self.model).values()
        listed = [item for value in held if isinstance(value, list | tuple) for item in value]
        return [item for item in (*held, *listed) if isinstance(item, keras.optimizers.Optimizer)]

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [*self.model.weights, *(v for optimizer in self._optimizers() for v in optimizer.variables)]
        shared = {variable_id(variable): variable for variable in variables}
        if exchanged := [shared[key] for key in shared if key not in self._local]:
            with tf.device(self.device or None):
                broadcast_variables(exchanged, self.root_rank)
        self.broadcast_done = True
