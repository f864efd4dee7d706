"""Ring all-reduce with Horovod: one process a GPU (or a CPU share), any number of hosts."""

from __future__ import annotations

import socket
from typing import Any

import keras
import numpy as np

import hvtrain.keras as hvd
from hvtrain.errors import ConfigError
from hvtrain.strategies.base import Strategy, WeightCheck
from hvtrain.topology import Topology


class HorovodStrategy(Strategy):
    """The default strategy, also with one rank and no launcher.

    Args:
        compression: "none" or "fp16", the type of gradients on the wire.
        share_gpus: let several ranks of a host use one GPU (for trying things out).
    """

    def __init__(self, compression: str = "none", share_gpus: bool = False) -> None:
        if compression not in ("none", "fp16"):
            raise ConfigError(f"strategy.compression={compression} is not one of none, fp16")
        self.compression = getattr(hvd.Compression, compression)
        self.share_gpus = share_gpus
        self._devices: list[str] = []

    def start(self) -> Topology:
        hvd.init()
        host = socket.gethostname()
        self._devices = hvd.pin_gpu(host, self.share_gpus)
        self.topology = Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), host)
        return self.topology

    def devices(self) -> list[str]:
        return self._devices

    def description(self) -> str:
        if hvd.size() == 1:
            return "Horovod, alone"
        return "Horovod on MPI" if hvd.mpi_enabled() else "Horovod on Gloo"

    def distribute(
        self, optimizer: keras.optimizers.Optimizer, check_finite: bool = False
    ) -> keras.optimizers.Optimizer:
        return hvd.DistributedOptimizer(optimizer, compression=self.compression, check_finite=check_finite)

    def ranks_at_fault(self, error: Exception, optimizer: keras.optimizers.Optimizer) -> list[int]:
        return hvd.ranks_at_fault(optimizer) if hvd.NOT_FINITE in str(error) else []

    def weight_check(self, model: keras.Model, enabled: bool = True) -> WeightCheck:
        return hvd.WeightCheck(model, enabled)

    def num_reductions(self, optimizer: keras.optimizers.Optimizer) -> int:
        return hvd.num_reductions(optimizer)

    def callbacks(self) -> list[keras.callbacks.Callback]:
        return [hvd.ReductionCheckCallback()]

    def agreement(self) -> list[keras.callbacks.Callback]:
        return [hvd.StopTogetherCallback()]

    def broadcast_model(self, model: keras.Model) -> None:
        hvd.broadcast_model(model)

    def broadcast(self, value: Any) -> Any:
        return hvd.broadcast_object(value, name="hvtrain.broadcast") if hvd.size() > 1 else value

    def gather(self, value: Any) -> list[Any]:
        return hvd.allgather_object(value, name="hvtrain.gather") if hvd.size() > 1 else [value]

    def sum_arrays(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return hvd.sum_arrays(arrays)

    def stop(self) -> None:
        hvd.shutdown()
