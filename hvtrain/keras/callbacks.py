"""Horovod's Keras callbacks on Keras 3, and three more: two checks, and one that stops all ranks together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.keras.broadcast_callback import BroadcastGlobalVariablesCallback  # noqa: F401
from hvtrain.keras.collectives import sum_arrays
from hvtrain.keras.equality import WeightCheck
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.in_graph import SharedFlag
from hvtrain.keras.optimizer import is_distributed, num_reductions
from hvtrain.keras.warmup import LearningRateScheduleCallback, LearningRateWarmupCallback  # noqa: F401


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces the metrics in an epoch's logs with their means over all ranks (every rank).

    Every rank weighs the same, as in Horovod, even if shards differ. Put it before callbacks that act on the logs.
    Raises RankError if ranks have unlike metrics.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        names = sorted(logs)
        for rank, others in enumerate(hvd.allgather_object(names, name="hvtrain.metrics") if hvd.size() > 1 else []):
            if others != names:
                own, other = (sorted(set(mine) - set(theirs)) for mine, theirs in ((names, others), (others, names)))
                raise RankError(
                    f"ranks have unlike metrics after epoch {epoch + 1}: rank {hvd.rank()} alone has {own}, and rank "
                    f"{rank} {other}; pass the same metrics and validation data, or none, on all ranks"
                )
        with tf.device(self.device or None):
            sums = sum_arrays([logs[name] for name in names])
        logs.update({name: float(total) / hvd.size() for name, total in zip(names, sums)})


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's ModelCheckpoint with save_best_only. Only rank 0 writes.

    Put it after MetricAverageCallback, so that it monitors the mean over all ranks. Horovod's takes no filepath: its
    Spark estimator sets one later. Here it is an argument, or an attribute set before fit. Raises ValueError at the
    start of training if it is missing or has the wrong suffix.
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
        # Keras checks the suffix of the path, which may be set only later.
        placeholder = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(filepath or placeholder, monitor, verbose, True, save_weights_only, mode, save_freq)
        self.filepath = None if filepath is None else str(filepath)

    def on_train_begin(self, logs: Any = None) -> None:
        suffix = ".weights.h5" if self.save_weights_only else ".keras"
        if self.filepath is None or not str(self.filepath).endswith(suffix):
            raise ValueError(f"BestModelCheckpoint has filepath={self.filepath}; give a path that ends in {suffix}")
        super().on_train_begin(logs)

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if hvd.rank() == 0:
            super()._save_model(epoch, batch, logs)


class ReductionCheckCallback(keras.callbacks.Callback):
    """Checks that the first step that changes weights reduces gradients (every rank).

    Raises RankError if there are several ranks and the optimizer is not a DistributedOptimizer, or if that step did not
    increment the counter of reductions in the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: int | None = None
        self._first = 0
        self._checked = False

    def set_model(self, model: keras.Model) -> None:
        if model is not self.model:
            self._before, self._checked = None, False
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        if self._before is None:
            self._before = num_reductions(self.model.optimizer)
            self._first = int(self.model.optimizer.iterations.numpy())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._checked or hvd.size() == 1:
            return
        # Not yet: this batch only accumulated gradients, or was skipped because of an overflow.
        if is_distributed(self.model.optimizer) and int(self.model.optimizer.iterations.numpy()) == self._first:
            return
        self._checked = True
        if num_reductions(self.model.optimizer) == self._before:
            raise RankError(
                f"the first step reduced no gradient over the {hvd.size()} ranks, so each would train alone; "
                "wrap the optimizer that compile gets in hvtrain.keras.DistributedOptimizer"
            )


class StopTogetherCallback(keras.callbacks.Callback):
    """Stops all ranks after the same step when a callback of one rank sets model.stop_training (every rank).

    Put it after the callbacks that may stop. Within an epoch the request travels with the next step's gradients. At
    the end of an epoch the ranks exchange a message; without a DistributedOptimizer they can stop only there.
    Not in Horovod, where the ranks that continue would wait forever. exchange sums arrays over the ranks.
    """

    def __init__(self, exchange: Callable[[list[np.ndarray]], list[np.ndarray]] = sum_arrays) -> None:
        super().__init__()
        self._sum_arrays = exchange
        self._flag: SharedFlag | None = None
        self._requested = False

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        hook = hook_of(model.optimizer)
        if hook and (self._flag is None or hook.reducer.flag is not self._flag):
            self._flag = hook.reducer.flag = SharedFlag()
            model.train_function = None  # A function traced earlier does not reduce the flag.

    def on_train_begin(self, logs: Any = None) -> None:
        self._requested = False
        if self._flag:
            self._flag.clear()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.stop_training and not self._requested:
            self._requested = True
            if self._flag:
                self._flag.set()
        # Also withdraws this rank's own request until all ranks know of it.
        self.model.stop_training = self._flag is not None and self._flag.is_set()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        requested = self._requested or self.model.stop_training
        self.model.stop_training = bool(self._sum_arrays([np.array(float(requested))])[0] > 0)


class WeightCheckCallback(keras.callbacks.Callback):
    """Compares trainable weights and optimizer state of all ranks every `every_batches` batches (every rank).

    Starts with the first batch and repeats at the end. Raises RankError on all ranks if they differ. Not in Horovod.
    """

    def __init__(self, every_batches: int = 500) -> None:
        super().__init__()
        self.every_batches = every_batches
        self.check: WeightCheck | None = None
        self._batches = 0

    def set_model(self, model: keras.Model) -> None:
        if model is not self.model:
            self.check, self._batches = None, 0
        super().set_model(model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.check is None:
            self.check = WeightCheck(self.model)
        if self._batches % self.every_batches == 0:
            self.check(f"at batch {self._batches}")
        self._batches += 1

    def on_train_end(self, logs: Any = None) -> None:
        if self.check is not None:
            self.check("at the end of the training")
