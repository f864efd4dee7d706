"""Horovod's callbacks on Keras 3, two that check the training, and one that stops all ranks."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import Callback

from hvtrain.errors import RankError
from hvtrain.keras.collectives import broadcast_variables, built_optimizer, sum_arrays
from hvtrain.keras.equality import WeightCheck
from hvtrain.keras.gradients import variable_id
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.in_graph import END_OF_EPOCH, SharedFlag
from hvtrain.keras.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback  # noqa: F401
from hvtrain.keras.optimizer import num_reductions
from hvtrain.keras.tape import num_tape_reductions


class BroadcastGlobalVariablesCallback(Callback):
    """Sets weights and optimizer state of all ranks to those of root_rank (every rank).

    It broadcasts once for each model: before the first step if the model is built (one with an
    Input is), otherwise after the first step, which creates the variables. In that case it warns,
    because each rank takes that step from its own weights. It includes optimizers that are
    attributes of the model. It also warns if neither a DistributedOptimizer nor a
    DistributedGradientTape reduced gradients in the first batch.

    Args:
        root_rank: the rank whose values are sent to all ranks.
        device: the device that packs the values, such as "/CPU:0".
        local_variables: a variable, or several, that are not broadcast.

    Raises:
        RankError: if Keras knows that the ranks hold different numbers of batches, or if the model is
            built on some ranks only, for example because rank 0 alone has loaded it.
        ValueError: if local_variables holds anything but variables.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: set[int] = set()
        if not isinstance(local_variables, list | tuple | set):
            local_variables = [local_variables]
        for variable in local_variables:
            if variable is None:
                continue
            if not isinstance(variable, keras.Variable | tf.Variable):
                raise ValueError(
                    f"local_variables holds an object of type {type(variable).__name__}; pass Keras or TensorFlow "
                    "variables"
                )
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leaves this variable out of the broadcast."""
        self._local.add(variable_id(var))

    def set_model(self, model: keras.Model) -> None:
        # The same callback may be used to train a second model.
        if model is not self.model:
            self.broadcast_done = False
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        # Keras's default build() sets `built` without creating any weights.
        # A custom training loop may set no params.
        num_steps = (self.params or {}).get("steps")
        is_built = bool(self.model.built and self.model.weights)
        by_rank = hvd.allgather_object((num_steps, is_built), name="hvtrain.steps")
        steps_by_rank, are_built = zip(*by_rank)
        self._compare_steps(steps_by_rank)
        self._tape_reductions_before = num_tape_reductions()
        self._is_first_step = True
        if self.broadcast_done:
            return
        # If the model is built on some ranks only, the broadcast fails on all ranks.
        if any(are_built):
            self._broadcast()
        elif hvd.size() > 1 and hvd.rank() == 0:
            warnings.warn(
                f"{self.model.name} is not built yet, so the ranks take their first step from different weights, "
                "which are broadcast only after it; begin the model with a keras.Input, or call "
                "model.build(input_shape) before fit",
                stacklevel=2,
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The first step has built the model.
        if not self.broadcast_done:
            self._broadcast()
        # Not "batch == 0": with steps_per_execution, Keras passes the last batch of each execution.
        if self._is_first_step and self._trains_alone():
            warnings.warn(
                f"rank {hvd.rank()} of {hvd.size()} trains alone: the first batch reduced no gradient; wrap the "
                "optimizer in hvtrain.keras.DistributedOptimizer, or the tape in DistributedGradientTape",
                stacklevel=2,
            )
        self._is_first_step = False

    def _compare_steps(self, steps: Sequence[int | None]) -> None:
        """Raises RankError if Keras knows that the ranks hold different numbers of batches.

        Args:
            steps: each rank's number of steps in an epoch; None if Keras does not know it.
        """
        different = [rank for rank, num_steps in enumerate(steps) if num_steps != steps[0]]
        if different and None not in steps:
            rank = different[0]
            raise RankError(
                f"an epoch has {steps[0]} batch(es) on rank 0 and {steps[rank]} on rank {rank}, so some ranks "
                "would wait for others that have ended; pass fit dataset.take(n), or x[: n * batch_size], with "
                "n = hvtrain.keras.steps_per_epoch(number of batches), the smallest on any rank"
            )

    def _trains_alone(self) -> bool:
        if hvd.size() == 1 or any(hook_of(optimizer) for optimizer in self._optimizers()):
            return False
        return num_tape_reductions() == self._tape_reductions_before

    def _optimizers(self) -> list[Any]:
        """Returns the optimizers that are attributes of the model, or inside its lists and dicts.

        A GAN, for example, has two, and may pass neither to compile.
        """
        values = list(vars(self.model).values())
        for value in list(values):
            if isinstance(value, dict):
                values += value.values()
            elif isinstance(value, list | tuple):
                values += value
        return [value for value in values if isinstance(value, keras.optimizers.Optimizer)]

    def _broadcast(self) -> None:
        built_optimizer(self.model)  # Slots have to exist before they are broadcast.
        variables = list(self.model.weights)
        for optimizer in self._optimizers():
            variables += optimizer.variables
        # Keyed by identity, since an optimizer may be an attribute under two names.
        by_id = {variable_id(variable): variable for variable in variables}
        shared = [variable for key, variable in by_id.items() if key not in self._local]
        with tf.device(self.device or None):
            broadcast_variables(shared, self.root_rank)
        for optimizer in self._optimizers():
            hook = hook_of(optimizer)
            if hook:
                hook.on_weights_set()
        self.broadcast_done = True


class MetricAverageCallback(Callback):
    """Replaces the metrics in an epoch's logs with their means over all ranks (every rank).

    As in Horovod, all ranks have the same weight, even if their shards differ in size. Put this callback
    before those that use the logs.

    Args:
        device: the device that sums the metrics, such as "/CPU:0".

    Raises:
        RankError: if ranks have different metrics.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        names = sorted(logs)
        self._compare(names, epoch)
        with tf.device(self.device or None):
            sums = sum_arrays([logs[name] for name in names])
        # A metric such as F1Score may have a value for each class.
        logs.update({name: (total / hvd.size()).tolist() for name, total in zip(names, sums)})

    def _compare(self, names: list[str], epoch: int) -> None:
        # Values are summed by position, so all ranks must have the same names.
        for rank, other_names in enumerate(hvd.allgather_object(names, name="hvtrain.metrics")):
            if other_names != names:
                raise RankError(
                    f"ranks have different metrics after epoch {epoch + 1}: rank {hvd.rank()} has {names}, and rank "
                    f"{rank} has {other_names}; pass the same metrics on all ranks, and validation data on all or none"
                )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's ModelCheckpoint with save_best_only=True, written by rank 0 only.

    Put it after MetricAverageCallback, so that it monitors the mean over all ranks. Horovod's class
    has no argument filepath, since its Spark estimator sets the attribute later. Here both ways
    work.

    Raises:
        ValueError: at the start of training if filepath is missing or has the wrong suffix.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | Path | None = None,
    ) -> None:
        self._suffix = ".weights.h5" if save_weights_only else ".keras"
        # Keras checks the suffix of a path, so it gets a placeholder for one that is set later.
        placeholder = f"best{self._suffix}"
        super().__init__(
            filepath or placeholder, monitor, verbose, True, save_weights_only, mode, save_freq
        )
        if not filepath:
            self.filepath = filepath

    def on_train_begin(self, logs: Any = None) -> None:
        if not str(self.filepath).endswith(self._suffix):
            raise ValueError(
                f"BestModelCheckpoint has filepath={self.filepath}; give a path that ends in {self._suffix}"
            )
        # Keras formats the path, and a Path has no format().
        self.filepath = str(self.filepath)  # type: ignore[assignment]
        super().on_train_begin(logs)

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        # Several ranks would write the same file at once.
        if hvd.rank() == 0:
            super()._save_model(epoch, batch, logs)


class ReductionCheckCallback(Callback):
    """Checks that the first step that changes weights reduced gradients (every rank).

    Raises:
        RankError: if there are several ranks and the optimizer is not a DistributedOptimizer, or if
            that step did not increment the counter of reductions in the graph.
    """

    def set_model(self, model: keras.Model) -> None:
        # A second model has its own optimizer, and so its own counter.
        if model is not self.model:
            self._reductions_before: int | None = None
            self._checked = False
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        if self._reductions_before is None:
            self._reductions_before = num_reductions(self.model.optimizer)
            self._first_iteration = int(self.model.optimizer.iterations.numpy())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._checked or hvd.size() == 1:
            return
        optimizer = self.model.optimizer
        hook = hook_of(optimizer)
        if hook and hook.reducer.is_alone:
            return  # This rank is outside the optimizer's process set.
        # Too early: so far gradients were only accumulated, the step overflowed, or it was a local
        # step.
        if hook and int(optimizer.iterations.numpy()) < self._first_iteration + hook.every:
            return
        self._checked = True
        if num_reductions(optimizer) == self._reductions_before:
            raise RankError(
                f"the first step reduced no gradient over the {hvd.size()} ranks, so each would train alone; "
                "pass compile an optimizer that is wrapped in hvtrain.keras.DistributedOptimizer"
            )


class StopTogetherCallback(Callback):
    """Stops all ranks after the same step when one sets model.stop_training (every rank).

    Put this callback after those that may stop training. Within an epoch the request is reduced
    together with the next gradients. At the end of an epoch the ranks exchange a message; without a
    DistributedOptimizer they can stop only there. Horovod has no such callback: if one rank stops,
    the others wait forever.

    Args:
        exchange: a function that sums a list of arrays over the ranks.
    """

    def __init__(
        self, exchange: Callable[[list[np.ndarray]], list[np.ndarray]] = sum_arrays
    ) -> None:
        super().__init__()
        self._sum_arrays = exchange
        self._flag: SharedFlag | None = None

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        hook = hook_of(model.optimizer)
        # One flag for each optimizer, since it is reduced with that optimizer's gradients.
        if hook and (self._flag is None or hook.reducer.flag is not self._flag):
            self._flag = hook.reducer.flag = SharedFlag()
            model.train_function = None  # Traces again: an earlier graph does not reduce the flag.

    def on_train_begin(self, logs: Any = None) -> None:
        self._requested = False
        if self._flag:
            self._flag.clear()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        stop = self.model.stop_training
        if stop and stop is not END_OF_EPOCH:
            self._requested = True
            if self._flag:
                self._flag.set()
        if stop is END_OF_EPOCH or getattr(self.model, "_hvtrain_epoch_is_done", False):
            # The epoch ends here on all ranks, and on_epoch_end exchanges the request.
            self.model.stop_training = END_OF_EPOCH
            return
        # Withdraws this rank's own request until all ranks know of it.
        self.model.stop_training = self._flag is not None and self._flag.is_set()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # EarlyStopping sets stop_training here, after the epoch's last gradients were reduced.
        stop = self.model.stop_training
        requested = self._requested or (bool(stop) and stop is not END_OF_EPOCH)
        (num_requests,) = self._sum_arrays([np.array(float(requested))])
        self.model.stop_training = bool(num_requests > 0)


class WeightCheckCallback(Callback):
    """Compares trainable weights and optimizer state of all ranks at intervals (every rank).

    The first comparison is after the first batch, the last one at the end of training. With
    LocalSGD and DiLoCo a comparison waits until the ranks' weights are synchronized. Horovod has no
    such callback.

    Args:
        every_batches: number of batches from one comparison to the next.

    Raises:
        RankError: on all ranks, if the compared values differ.
        ValueError: if every_batches is below 1; or, at the start of training, if the optimizer's
            process set leaves out ranks.
    """

    def __init__(self, every_batches: int = 500) -> None:
        if every_batches < 1:
            raise ValueError(f"every_batches={every_batches} must be at least 1")
        super().__init__()
        self.every_batches = every_batches
        self._is_due = False

    def set_model(self, model: keras.Model) -> None:
        if model is not self.model:
            self.check: WeightCheck | None = None
            self._batches = 0
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        hook = hook_of(self.model.optimizer)
        if hook and hook.reducer.process_set.process_set_id:
            raise ValueError(
                "WeightCheckCallback compares all ranks, but the optimizer's process set leaves out some, whose "
                "weights may differ; leave out the callback"
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first_batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Created only now, because the first batch may build the model and its optimizer.
        if self.check is None:
            self.check = WeightCheck(self.model)
        # More than one with steps_per_execution.
        num_batches = batch - self._first_batch + 1
        # True if the number of one of these batches, counted from 0 over all epochs, is a multiple
        # of every_batches.
        self._is_due |= -self._batches % self.every_batches < num_batches
        self._compare(f"at batch {self._batches}")
        self._batches += num_batches

    def on_train_end(self, logs: Any = None) -> None:
        self._is_due = True
        self._compare("at the end of the training")

    def _compare(self, when: str) -> None:
        if self.check is None or not self._is_due:
            return
        optimizer = self.model.optimizer
        hook = hook_of(optimizer)
        if hook and hook.have_diverged(int(optimizer.iterations)):
            return
        self.check(when)
        self._is_due = False
