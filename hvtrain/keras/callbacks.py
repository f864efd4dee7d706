"""Horovod's Keras callbacks, on Keras 3, and the check that gradients really were reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvtrain.errors import RankError
from hvtrain.keras.collectives import broadcast_variables, sum_arrays
from hvtrain.keras.optimizer import num_reductions


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Sets weights and optimizer state of all ranks to those of root_rank, once (every rank).

    Before the first step where the model is built, as one with an Input is; else right after it, when its
    variables exist. local_variables are left as they are on each rank.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        if device:
            raise ValueError(f"device={device!r} is not supported; variables travel from where they are")
        self.root_rank = root_rank
        self.broadcast_done = False
        listed = local_variables if isinstance(local_variables, Iterable) else [local_variables]
        self._local = {id(getattr(variable, "value", variable)) for variable in listed if variable is not None}

    def register_local_var(self, var: Any) -> None:
        """Leaves this variable as it is on each rank."""
        self._local.add(id(getattr(var, "value", var)))

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
        broadcast_variables([v for v in variables if id(v.value) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces the numbers in an epoch's logs by their means over all ranks (every rank).

    Each rank counts the same, as upstream has it. Put it before callbacks that act on the logs.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        names = sorted(logs or {})
        sums = sum_arrays([(logs or {})[name] for name in names])
        for name, total in zip(names, sums):
            (logs or {})[name] = float(total) / hvd.size()


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to initial_lr x multiplier(epoch), at each epoch or (staircase=False) each batch.

    Args:
        initial_lr: learning rate at multiplier 1.
        multiplier: a function of the epoch (a fraction of one too when staircase is false), or a number m,
            which stands for m ** (epoch - start_epoch).
        start_epoch, end_epoch: epochs in which it acts; the end is not included.
        momentum_correction: where the rate changes, scale the momentum of SGD and RMSprop by new / old rate
            (Goyal et al. 2017, section 2.1, remark 2). Upstream scales the coefficient for that one step;
            scaling the slots is the same product, and reaches a compiled step too.
        steps_per_epoch: needed where Keras does not know it.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr=None came where a number was needed; give the rate at multiplier 1")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        constant = multiplier
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: constant ** (epoch - start_epoch)  # type: ignore[operator]
        )

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError("Keras does not know the number of steps in an epoch; pass steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended:
            return
        if self.staircase and batch == 0:
            self._set(self.current_epoch)
        elif not self.staircase:
            self._set(self.current_epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        has_momentum = bool(getattr(optimizer, "momentum", None)) and optimizer.built
        if self.momentum_correction and has_momentum and old not in (0, new):
            for slot in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", []):
                slot.assign(slot * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """From initial_lr / size at the start to initial_lr after warmup_epochs, linearly, at each batch.

    initial_lr is the scaled rate. Source: Goyal et al. 2017, section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One batch on, as upstream has it, so that epochs end at round numbers.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return (epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,  # type: ignore[arg-type]
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished the learning rate warm-up to {rate:g}.")


class ReductionCheckCallback(keras.callbacks.Callback):
    """Stops training when the first steps changed weights without reducing a gradient (every rank).

    Raises RankError after the first step that changed weights if there are several ranks and the count in
    the graph still stands where it stood before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: int | None = None
        self._checked = False

    def on_train_begin(self, logs: Any = None) -> None:
        if self._before is None:
            self._before = num_reductions(self.model.optimizer)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._checked or hvd.size() == 1:
            return
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        # With accumulation only each k-th batch changes weights; iterations count batches.
        if int(optimizer.iterations.numpy()) % (optimizer.gradient_accumulation_steps or 1):
            return
        self._checked = True
        if num_reductions(self.model.optimizer) == self._before:
            raise RankError(
                f"the first step reduced no gradient over the {hvd.size()} ranks, so each would train alone; "
                "wrap the optimizer that is given to compile in hvtrain.keras.DistributedOptimizer"
            )
