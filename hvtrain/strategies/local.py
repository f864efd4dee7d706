"""Ranks that step on their own and bring their weights together every few steps, for slow networks."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.errors import ConfigError, RankError
from hvtrain.keras.local_steps import OUTER_MOMENTUM, OUTER_RATE, local_hook
from hvtrain.strategies.base import Strategy, exclude
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.strategies.loop import CallSteps
from hvtrain.watchdog.progress import EXCHANGE


class LocalSGDStrategy(HorovodStrategy):
    """Local SGD (Stich 2019): see hvtrain.keras.LocalSGD.

    The ranks also synchronize at the end of each epoch and where training is interrupted, so that
    validation, checkpoints and results have the same weights on all ranks.

    Args:
        every: steps from one synchronization to the next.
        warmup_steps: first steps in which gradients are reduced, as with strategy=horovod.
        horovod: bucket_mib, share_gpus and pin_cores of HorovodStrategy.
    """

    name = "local_sgd"

    def __init__(self, every: int = 16, warmup_steps: int = 0, **horovod: Any) -> None:
        super().__init__(**horovod)
        if every < 1:
            raise ConfigError(f"strategy.every={every} is out of range; it must be at least 1")
        if warmup_steps < 0:
            raise ConfigError(f"strategy.warmup_steps={warmup_steps} is out of range; it must be at least 0")
        self.sync_every = every
        self.warmup_steps = warmup_steps
        self.differences = [f"weights of the ranks differ between synchronizations, which come every {every} steps"]
        self.num_synchronizations = 0
        # Where the last settle() has counted to: a step, and the reductions that had run.
        self._settled_step = 0
        self._num_counted = 0

    def distribute(
        self, optimizer: keras.optimizers.Optimizer, check_finite: bool = False
    ) -> keras.optimizers.Optimizer:
        excluded = {
            "train.precision=mixed_float16": keras.config.dtype_policy().name == "mixed_float16",
            "train.accumulate": optimizer.gradient_accumulation_steps,
            "optimizer.use_ema": optimizer.use_ema,
        }
        for setting, is_set in excluded.items():
            if is_set:
                exclude(self.name, setting)
        distributed = self.make_local(optimizer, bucket_bytes=self.bucket_bytes, check_finite=check_finite)
        self._hook = local_hook(distributed)
        self._hook.reducer.marks = self.marks
        return distributed

    def make_local(self, optimizer: keras.optimizers.Optimizer, **options: Any) -> keras.optimizers.Optimizer:
        """Wraps the optimizer. Not collective."""
        return hvd.LocalSGD(optimizer, self.sync_every, self.warmup_steps, **options)

    def distribute_loss(self, loss: keras.losses.Loss) -> keras.losses.Loss:
        # Each rank's own mean: a mean over the joint batch would need a message in each step.
        return Strategy.distribute_loss(self, loss)

    def prepare(self, model: keras.Model) -> None:
        """Does nothing: losses that were divided by the number of ranks would make local steps small."""

    def guards(self) -> list[keras.callbacks.Callback]:
        return []  # settle() compares what ran with what was due.

    def make_steps(
        self,
        model: keras.Model,
        batches: tf.data.Dataset,
        start_step: int,
        call_steps: CallSteps,
    ) -> Callable[[int], dict[str, Any]]:
        self._optimizer = model.optimizer
        self._settled_step = int(model.optimizer.iterations.numpy())
        self._num_counted = hvd.num_reductions(model.optimizer)
        return super().make_steps(model, batches, start_step, call_steps)

    def settle(self) -> None:
        """Synchronizes, and checks that as many synchronizations ran as were due (every rank)."""
        if hvd.size() == 1:
            return
        optimizer = self._optimizer
        step = int(optimizer.iterations.numpy())
        num_due = self._hook.num_due(self._settled_step, step)
        with self.watchdog.phase(EXCHANGE):
            num_due += hvd.synchronize(optimizer)
        num_reductions = hvd.num_reductions(optimizer)
        num_ran = num_reductions - self._num_counted
        if num_ran != num_due:
            raise RankError(
                f"{num_ran} synchronizations ran in steps {self._settled_step + 1:,} to {step:,}, and {num_due} were "
                "due; step with the optimizer that compile got, once for each batch"
            )
        self.num_synchronizations += num_due
        self._settled_step = step
        self._num_counted = num_reductions

    def expect_restart(self) -> None:
        exclude(self.name, "comm.tune=true")

    def description(self) -> str:
        warmup = f", after {self.warmup_steps} synchronous steps" if self.warmup_steps else ""
        return f"{super().description()}, {self.name} every {self.sync_every} steps{warmup}"


class DiLoCoStrategy(LocalSGDStrategy):
    """DiLoCo (Douillard et al. 2023): see hvtrain.keras.DiLoCo.

    Args:
        every: steps from one synchronization to the next.
        outer_rate: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum.
        local: the arguments of LocalSGDStrategy, and compression of HorovodStrategy.
    """

    name = "diloco"

    def __init__(
        self,
        every: int = 500,
        outer_rate: float = OUTER_RATE,
        outer_momentum: float = OUTER_MOMENTUM,
        **local: Any,
    ) -> None:
        super().__init__(every, **local)
        if not (outer_rate > 0 and 0 <= outer_momentum < 1):
            raise ConfigError(
                f"strategy.outer_rate={outer_rate} and strategy.outer_momentum={outer_momentum} are out of range; the "
                "rate must be above 0, the momentum at least 0 and less than 1"
            )
        self.outer_rate = outer_rate
        self.outer_momentum = outer_momentum

    def make_local(self, optimizer: keras.optimizers.Optimizer, **options: Any) -> keras.optimizers.Optimizer:
        return hvd.DiLoCo(
            optimizer,
            self.sync_every,
            self.outer_rate,
            self.outer_momentum,
            self.warmup_steps,
            compression=self.compression,
            **options,
        )
