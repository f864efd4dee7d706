"""Learning-rate callbacks with Horovod's interface: schedules by epoch, and gradual warm-up."""

import math
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvtrain.keras.process import is_elastic


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to initial_lr x multiplier(epoch), at each epoch or each batch.

    Args:
        initial_lr: the learning rate at a multiplier of 1; None: the optimizer's rate when training
            begins.
        multiplier: a function of the epoch (fractional if staircase is false), or a number m, which
            stands for m ** (epoch - start_epoch).
        start_epoch, end_epoch: the range of epochs in which the callback sets the rate; end_epoch
            is excluded, and None means until the end of training.
        staircase: set the rate only at the beginning of each epoch, not at each batch.
        momentum_correction: when the rate changes, scale the momentum of SGD and RMSprop by
            new rate / old rate (Goyal et al. 2017, section 2.1, remark 2). Horovod scales the
            momentum coefficient for one step. Scaling the slots gives the same product, and also
            works in a compiled step, where the coefficient is a constant.
        steps_per_epoch: needed if staircase is false and Keras does not know it.

    Raises:
        ValueError: at the start of training, if the optimizer's learning rate is a schedule, if the
            number of steps in an epoch is needed but unknown, or if initial_lr is None in an
            elastic job.
    """

    def __init__(
        self,
        initial_lr: float | None,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        # This and steps_per_epoch are set by on_train_begin if they are None.
        self.initial_lr: Any = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self._steps_of_fit: int | None = None
        self.steps_per_epoch: Any = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Any = multiplier
        if not callable(multiplier):
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        schedule = getattr(self._optimizer, "_learning_rate", None)
        # Keras refuses this too, but only at the first batch.
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            raise ValueError(
                f"{type(self).__name__} sets the rate, but the optimizer has a schedule ({type(schedule).__name__}); "
                "give the optimizer a number, or leave the callback out and put the warm-up into the schedule"
            )
        if self.initial_lr is None:
            if is_elastic():
                raise ValueError(
                    "initial_lr=None in an elastic job: a rank that joins would take over a rate that has already "
                    "changed; pass the optimizer's initial rate"
                )
            self.initial_lr = float(self.model.optimizer.learning_rate)
        # Keras's number may differ from that of an earlier fit, for example after an elastic reset.
        if not self.staircase and self.steps_per_epoch in (None, 0, self._steps_of_fit):
            self.steps_per_epoch = self._steps_of_fit = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Keras does not know the number of steps in an epoch; pass steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        has_ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or has_ended:
            return
        if not self.staircase:
            # More than `batch` in an epoch that resumes after an elastic reset.
            batches_done = getattr(self.model, "_hvtrain_batches_done", 0) + batch
            self._set_rate(self.current_epoch + batches_done / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # As in Horovod, so that the history shows the rate.
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    @property
    def _optimizer(self) -> Any:
        """The optimizer that has the momentum: the one inside a LossScaleOptimizer, if any."""
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self._optimizer
        old_rate = float(optimizer.learning_rate)
        new_rate = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new_rate

        # The slots of these two contain the rate. Those of Adam and Muon do not, despite the same
        # names.
        slots_contain_rate = isinstance(optimizer, keras.optimizers.SGD | keras.optimizers.RMSprop)
        # A rate of 0 has no ratio to another one.
        if self.momentum_correction and slots_contain_rate and old_rate not in (0, new_rate):
            # Keras calls the slots `momentums` in SGD and `_momentums` in RMSprop. Before the
            # optimizer is built there are none.
            slots = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", [])
            for slot in slots:
                # None stands for a variable that Keras overwrites with its gradient, as for float8.
                if slot is not None:
                    slot.assign(slot * (new_rate / old_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the rate batch by batch, linearly from initial_lr / size to initial_lr.

    This is the gradual warm-up of Goyal et al. 2017, section 2.2.

    Args:
        initial_lr: the rate after the warm-up, already scaled by the number of ranks; None: the
            optimizer's rate when training begins.
        warmup_epochs: length of the warm-up in epochs, which may be fractional.
        momentum_correction, steps_per_epoch: as in LearningRateScheduleCallback.
        verbose: if above 0, rank 0 prints a line at the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float | None,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch):
            # One batch ahead, as in Horovod: the last batch of the warm-up has the full rate.
            epochs_done = min(epoch + 1.0 / self.steps_per_epoch, warmup_epochs)
            return (epochs_done * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(
            initial_lr,
            multiplier,
            # A float works too: epochs are only compared with it, or with its ceiling.
            end_epoch=warmup_epochs,  # type: ignore[arg-type]
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose
        self._last_epoch = math.ceil(warmup_epochs) - 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if epoch == self._last_epoch and self.model.steps_per_execution > 1:
            # The last call of the graph began before the last batch of the warm-up.
            self._set_rate(self.end_epoch)  # type: ignore[arg-type]
        super().on_epoch_end(epoch, logs)
        if epoch == self._last_epoch and self.verbose and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished the learning rate warm-up to {rate:g}.")
