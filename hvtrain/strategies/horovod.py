"""Strategies on Horovod's ring all-reduce: one process per GPU, or per share of the CPU cores."""

import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.optimizers import Optimizer

import hvtrain.keras as hvd
from hvtrain import watchdog
from hvtrain.config.validate import check_choice, check_least, check_whole
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError, LostRankError, UserError
from hvtrain.keras.collectives import sum_arrays
from hvtrain.keras.elastic import RestartingState
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.optimizer import divide_losses
from hvtrain.keras.process import CYCLE_TIME, is_lost_rank_error, keep_mpi_initialized
from hvtrain.keras.sharded_embedding import sharded_layers
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.base import Membership, Strategy, Timeline
from hvtrain.strategies.comm import Comm
from hvtrain.watchdog.processes import resume_advice
from hvtrain.watchdog.progress import EXCHANGE

MIB = 1 << 20
COMPRESSIONS = ("none", "fp16", "bf16", "int8", "powersgd")

# NCCL's messages, as Horovod passes them on: "ncclCommInitRank failed: ...", "NCCL async error: ...".
_NCCL_FAILED = re.compile(r"(nccl\w+ failed|NCCL async error):[^\n]*")


class HorovodComm(Comm):
    """Horovod's collectives. Waits in them are reported to the watchdog."""

    def broadcast(self, value: Any, root: int = 0) -> Any:
        if hvd.size() == 1:
            return value
        with self.watchdog.phase(EXCHANGE):
            return hvd.broadcast_object(value, root, name="hvtrain.broadcast")

    def gather(self, value: Any) -> list[Any]:
        if hvd.size() == 1:
            return [value]
        with self.watchdog.phase(EXCHANGE):
            return hvd.allgather_object(value, name="hvtrain.gather")

    def sum_arrays(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        with self.watchdog.phase(EXCHANGE):
            return sum_arrays(arrays)

    def broadcast_model(self, model: keras.Model) -> None:
        with self.watchdog.phase(EXCHANGE):
            hvd.broadcast_model(model)

    def gather_parts(self, variables: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
        with self.watchdog.phase(EXCHANGE):
            arrays = {
                key: variable.rank_part.gather(variable, folder)
                for key, variable in variables.items()
            }
        # Only the chief gets arrays.
        return {key: array for key, array in arrays.items() if array is not None}

    def whole_tables(self, model: keras.Model, folder: Path) -> AbstractContextManager[None]:
        return hvd.whole_tables(model, folder)


class HorovodTimeline(Timeline):
    """Horovod's timeline. A single rank has none, since it reduces nothing."""

    def start(self, path: Path) -> None:
        if hvd.size() > 1:
            hvd.start_timeline(str(path))

    def stop(self) -> None:
        if hvd.size() > 1:
            hvd.stop_timeline()


class HorovodStrategy(Strategy):
    """The default strategy, also for one rank without a launcher.

    Args:
        compression: how gradients are sent: "none", "fp16", "bf16", "int8" or "powersgd".
        rank: PowerSGD's rank: the number of columns of its matrices.
        whole_steps: number of initial steps in which PowerSGD sends gradients uncompressed.
        share_gpus: let several ranks of a host use one GPU (for experiments).
        bucket_mib: size in MiB of the buckets, which are reduced while other gradients are still being
            computed; 0: all gradients in a single message at the end.
        pin_cores: without GPUs, pin each rank of a host to its own share of the cores.
        shard_optimizer: keep optimizer slots on each rank only for its part of the weights.
    """

    name = "horovod"
    # What the ranks send, for the summary.
    sends = "gradients"

    def __init__(
        self,
        compression: str = "none",
        share_gpus: bool = False,
        bucket_mib: float = 25,
        pin_cores: bool = True,
        rank: int = 4,
        whole_steps: int = 100,
        shard_optimizer: bool = False,
    ) -> None:
        super().__init__()
        check_choice("strategy.compression", compression, COMPRESSIONS)
        check_least("strategy.bucket_mib", bucket_mib, 0)
        self.compression = getattr(hvd.Compression, compression)
        if compression == "powersgd":
            self.compression = hvd.Compression.powersgd(rank, whole_steps)
        self.compression_name = compression
        self.bucket_bytes = int(bucket_mib * MIB)
        self.shard_optimizer = shard_optimizer
        self.share_gpus = share_gpus
        self.pin_cores = pin_cores
        self.comm = HorovodComm()
        self.timeline = HorovodTimeline()

    def start(self) -> Topology:
        # 0: Horovod does not end stalled ranks itself. The watchdog does, and names the
        # rank that the others wait for.
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0")
        hvd.init()
        self.devices = hvd.pin_gpu(share=self.share_gpus, pin_cores=self.pin_cores)
        self.comm.topology = Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
        self.before_devices()
        # Last, because it creates variables, which initializes TensorFlow's devices.
        self.marks = StepMarks()
        return self.topology

    def before_devices(self) -> None:
        """Called by start once the ranks know each other, before TensorFlow initializes a device."""

    def start_watchdog(self, abort_seconds: float) -> None:
        # In an elastic job, the previous watchdog watches ranks that may have left.
        self.watchdog.stop()
        self.comm.watchdog = watchdog.Watchdog()
        topology = self.topology
        self.comm.watchdog = watchdog.start(
            topology.rank,
            topology.size,
            topology.host,
            abort_seconds,
            self.comm.gather,
            self.marks,
            calls_launcher=hvd.local_rank() == 0,
            survives_loss=self.membership.commit_steps > 0,
        )

    def distribute(self, optimizer: Optimizer, check_finite: bool) -> Optimizer:
        try:
            distributed = hvd.DistributedOptimizer(
                optimizer,
                compression=self.compression,
                check_finite=check_finite,
                bucket_bytes=self.bucket_bytes,
                shard=self.shard_optimizer,
            )
        except ValueError as error:
            raise ConfigError(f"strategy={self.name}: {error}") from error
        # The reducer marks when gradients are ready and reduced, for the record and the watchdog.
        hook_of(distributed).reducer.marks = self.marks  # type: ignore[union-attr]
        return distributed

    def distribute_loss(self, loss: keras.losses.Loss) -> keras.losses.Loss:
        return hvd.DistributedLoss(loss)

    def prepare(self, model: keras.Model) -> None:
        # Keras's own step passes its loss through the optimizer's scale_loss; a user's step may not.
        if type(model).train_step is keras.Model.train_step:
            divide_losses(model.optimizer)

    def calls_together(self, model: keras.Model) -> bool:
        return bool(sharded_layers(model))

    def guards(self) -> list[keras.callbacks.Callback]:
        return [hvd.ReductionCheckCallback()]

    def stop_callbacks(self) -> list[keras.callbacks.Callback]:
        # A rank that left the loop alone would leave the others waiting in the next reduction.
        return [hvd.StopTogetherCallback(self.comm.sum_arrays)]

    def stop(self) -> None:
        self.watchdog.stop()
        hvd.shutdown()

    def expect_restart(self) -> None:
        super().expect_restart()
        keep_mpi_initialized()

    def restart(self, cycle_ms: float, bucket_mib: float) -> None:
        self.bucket_bytes = int(bucket_mib * MIB)
        if hvd.size() > 1:
            self.comm.gather(None)  # A barrier: no rank shuts down before all are ready.
            hvd.shutdown()
            os.environ[CYCLE_TIME] = f"{cycle_ms:g}"
            hvd.init()

    def is_lost_rank(self, error: BaseException) -> bool:
        return is_lost_rank_error(error)

    def cause_of(self, error: BaseException) -> UserError | None:
        cause = super().cause_of(error)
        nccl_error = _NCCL_FAILED.search(str(error))
        if cause or nccl_error is None:
            return cause
        # No rank is lost, so the network between the ranks failed, and a restart may help.
        advice = resume_advice(self.watchdog.folder)
        return LostRankError(f"NCCL lost the connection between ranks ({nccl_error[0]}); {advice}")

    @property
    def _keeps_errors(self) -> bool:
        return getattr(self.compression, "keeps_errors", False)

    def description(self) -> str:
        if hvd.size() == 1:
            return "Horovod, one rank"
        text = f"Horovod on {'MPI' if hvd.mpi_enabled() else 'Gloo'}"
        if self.compression_name != "none":
            text += f", {self.sends} as {self.compression_name}"
        if self._keeps_errors:
            text += ", with error feedback"
        if self.shard_optimizer:
            text += ", sharded optimizer (each step also all-gathers the weights: half the traffic of an all-reduce)"
        return text


class ElasticMembership(RestartingState, Membership):
    """Restarts attempts through Horovod's elastic interface when ranks leave or join.

    A restart may hang, so the old watchdog keeps running until start_watchdog replaces it.
    """

    check = RestartingState.check_host_updates


class ElasticStrategy(HorovodStrategy):
    """Horovod with ranks that leave and join during a run.

    For `horovodrun --gloo --min-np ... --host-discovery-script ...`, or a single rank without a
    launcher. Every rank periodically commits the state to memory. After a loss the first remaining
    rank restores the last commit, or a newer checkpoint, and the run continues as if it were resumed on
    another number of ranks.

    Args:
        commit_steps: steps between commits, in addition to one after each epoch. A lost rank costs at
            most that many steps.
        horovod: arguments of HorovodStrategy.
    """

    name = "elastic"
    can_restart = False

    def __init__(self, commit_steps: int = 100, **horovod: Any) -> None:
        super().__init__(**horovod)
        # Ranks that leave would take compression errors and their part of the slots with them.
        self.exclude(
            {
                f"strategy.compression={self.compression_name}": self._keeps_errors,
                "strategy.shard_optimizer=true": self.shard_optimizer,
            }
        )
        check_whole("strategy.commit_steps", commit_steps, 1)
        self.membership = ElasticMembership()
        self.membership.commit_steps = commit_steps

    def start(self) -> Topology:
        topology = super().start()
        if topology.size > 1 and not hvd.is_elastic():
            raise ConfigError(
                "strategy=elastic needs an elastic job, but this is not one; start it with "
                "horovodrun --gloo -np N --min-np N --host-discovery-script FILE, or leave "
                "strategy=elastic out"
            )
        return topology

    def description(self) -> str:
        return f"{super().description()}, elastic"
