"""Strategies whose ranks step on their own and synchronize their weights every few steps, for slow networks."""

import logging
import math
import os
from typing import Any

import keras
import numpy as np
from keras.optimizers import Optimizer

import hvtrain.keras as hvd
from hvtrain.config.validate import check_whole
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError, RankError
from hvtrain.keras.local_steps import OUTER_MOMENTUM, OUTER_RATE, local_hook
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.strategies.loop import Steps
from hvtrain.system.text import counted
from hvtrain.watchdog.progress import EXCHANGE

log = logging.getLogger(__name__)


class LocalSGDStrategy(HorovodStrategy):
    """Local SGD (Stich 2019): see hvtrain.keras.LocalSGD.

    The ranks also synchronize at the end of each epoch and when training is interrupted, so that
    validation, checkpoints and results use the same weights on all ranks.

    Args:
        every: steps from one synchronization to the next.
        warmup_steps: number of initial steps in which gradients are reduced, as with strategy=horovod.
        within_hosts: average gradients over the ranks of each host in every step, so that weights
            differ only between hosts.
        horovod: bucket_mib, share_gpus and pin_cores of HorovodStrategy.
    """

    name = "local_sgd"
    # Rounding weights would undo small updates. DiLoCo sends changes of weights, which can be rounded.
    compresses = False
    can_restart = False
    # The process set of this host's ranks; None before within_hosts needs it. Horovod takes each set
    # only once, so later attempts share it, and so does the second of the two runs that bisect repeats.
    host_set: Any = None

    def __init__(
        self, every: int = 16, warmup_steps: int = 0, within_hosts: bool = False, **horovod: Any
    ) -> None:
        super().__init__(**horovod)
        compression = "none" if self.compresses else self.compression_name
        self.exclude(
            {
                "strategy.shard_optimizer=true": self.shard_optimizer,
                f"strategy.compression={compression}": compression != "none",
            }
        )
        check_whole("strategy.every", every, 1)
        check_whole("strategy.warmup_steps", warmup_steps, 0)
        self.sync_every = every
        self.warmup_steps = warmup_steps
        self.within_hosts = within_hosts
        self.differences = [
            f"weights of the ranks differ between synchronizations, which come every {counted(every, 'step')}"
        ]

    def start(self) -> Topology:
        if self.within_hosts:
            # Must be set before Horovod starts; which ranks share a host is known only afterwards.
            os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        topology = super().start()
        if self.within_hosts and not self.host_set:
            self._make_host_sets(topology)
        return topology

    def _make_host_sets(self, topology: Topology) -> None:
        """Makes a process set of each host's ranks (every rank)."""
        hosts = self.comm.gather((topology.host, topology.local_size))
        for host, local_size in sorted(set(hosts)):
            ranks = [rank for rank, (name, _) in enumerate(hosts) if name == host]
            if len(ranks) != local_size:
                raise ConfigError(
                    f"strategy.within_hosts=true needs a unique name for each host, but {len(ranks)} ranks are on "
                    f"hosts named {host}, where the launcher started {local_size}; rename the hosts or containers"
                )
            # Horovod refuses to add a second set with all ranks.
            has_all_ranks = len(ranks) == topology.size
            process_set = hvd.global_process_set if has_all_ranks else hvd.add_process_set(ranks)
            if topology.rank in ranks:
                LocalSGDStrategy.host_set = process_set

    def stop(self) -> None:
        super().stop()
        LocalSGDStrategy.host_set = None

    def distribute(self, optimizer: Optimizer, check_finite: bool) -> Optimizer:
        precision = keras.config.dtype_policy().name
        self.exclude(
            {
                "train.precision=mixed_float16": precision == "mixed_float16",
                "train.accumulate": optimizer.gradient_accumulation_steps,
                "an average of the weights (train.ema or optimizer.use_ema)": optimizer.use_ema,
            }
        )
        distributed = self.make_local(
            optimizer,
            bucket_bytes=self.bucket_bytes,
            check_finite=check_finite,
            within=self.host_set if self.within_hosts else None,
        )
        self._hook = local_hook(distributed)
        self._hook.reducer.marks = self.marks
        return distributed

    def make_local(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        """Returns the optimizer, wrapped to take local steps. Not collective."""
        return hvd.LocalSGD(optimizer, self.sync_every, self.warmup_steps, **options)

    # Each rank's loss is its own mean: a mean over the joint batch would take a message in
    # each step.
    distribute_loss = Strategy.distribute_loss
    # Dividing losses by the number of ranks would make local steps too small.
    prepare = Strategy.prepare
    # Instead, settle() compares the reductions that ran with those that were due.
    guards = Strategy.guards

    def fit(self, model: keras.Model, batches_from: Any, plan: StepPlan, *arguments: Any) -> None:
        if plan.learning_rate_factor > 1 and self.topology.is_chief:
            log.warning(
                "strategy=%s: the learning rate is multiplied by %g for the joint batch of all ranks, but steps "
                "between synchronizations use smaller batches; train.learning_rate_scale=none leaves it unchanged",
                self.name,
                plan.learning_rate_factor,
            )
        super().fit(model, batches_from, plan, *arguments)

    def make_steps(self, model: keras.Model, *arguments: Any) -> Steps:
        self._optimizer = model.optimizer
        # The step at the last settle(), and the reductions that had run by then.
        self._settled_step = int(model.optimizer.iterations)
        self._num_counted = self._hook.num_done()
        self.num_synchronizations = 0  # Of this attempt, like the steps in its proof.
        return super().make_steps(model, *arguments)

    def settle(self) -> None:
        """Synchronizes, and checks that as many reductions ran as were due (every rank)."""
        if hvd.size() == 1:
            return
        optimizer = self._optimizer
        step = int(optimizer.iterations)
        rounds_due, within_due = self._hook.num_due(self._settled_step, step)
        with self.watchdog.phase(EXCHANGE):
            rounds_due += hvd.synchronize(optimizer)
        num_done = self._hook.num_done()
        rounds, within = np.subtract(num_done, self._num_counted).tolist()
        if (rounds, within) != (rounds_due, within_due):
            raise RankError(
                f"{counted(rounds, 'synchronization')} and {counted(within, 'reduction')} within the host ran in steps "
                f"{self._settled_step + 1:,} to {step:,}, but {rounds_due} and {within_due} were due; step once for "
                "each batch, with the optimizer that was passed to compile"
            )
        self.num_synchronizations += rounds_due
        self._settled_step = step
        self._num_counted = num_done

    def description(self) -> str:
        interval = f"every {counted(self.sync_every, 'step')}"
        warmup = ""
        if self.warmup_steps:
            warmup = f", after {counted(self.warmup_steps, 'synchronous step')}"
        within = ", gradients reduced within hosts" if self.within_hosts else ""
        return f"{super().description()}, {self.name} {interval}{warmup}{within}"


class DiLoCoStrategy(LocalSGDStrategy):
    """DiLoCo (Douillard et al. 2023): see hvtrain.keras.DiLoCo.

    Args:
        every: steps from one synchronization to the next.
        outer_rate: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum.
        local: the arguments of LocalSGDStrategy, and compression of HorovodStrategy.
    """

    name = "diloco"
    compresses = True
    sends = "changes of weights"

    def __init__(
        self,
        every: int = 500,
        outer_rate: float = OUTER_RATE,
        outer_momentum: float = OUTER_MOMENTUM,
        **local: Any,
    ) -> None:
        super().__init__(every, **local)
        if not (0 < outer_rate < math.inf and 0 <= outer_momentum < 1):
            raise ConfigError(
                f"strategy.outer_rate={outer_rate} must be above 0 and finite, and "
                f"strategy.outer_momentum={outer_momentum} must be at least 0 and less than 1"
            )
        self.outer_rate = outer_rate
        self.outer_momentum = outer_momentum

    def make_local(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        return hvd.DiLoCo(
            optimizer,
            self.sync_every,
            self.outer_rate,
            self.outer_momentum,
            self.warmup_steps,
            compression=self.compression,
            **options,
        )
