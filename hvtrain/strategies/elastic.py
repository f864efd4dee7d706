"""Ranks that come and go while training goes on, on what Horovod calls elastic: the default strategy, and resets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import hvtrain.keras as hvd
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError
from hvtrain.strategies.horovod import HorovodStrategy

T = TypeVar("T")


class ElasticStrategy(HorovodStrategy):
    """For `horovodrun --gloo --min-np ... --host-discovery-script ...`; with one rank and no launcher too.

    Every rank holds the state in memory, committed now and then. After a loss the first rank that is left restores
    its last commit, or a newer checkpoint, and the run goes on as it would be resumed on another number of ranks.

    Args:
        commit_steps: commit after so many steps, and at the end of each epoch; a loss throws back by less than that.
        compression, share_gpus, bucket_mib, pin_cores: as in HorovodStrategy.
    """

    def __init__(
        self,
        commit_steps: int = 100,
        compression: str = "none",
        share_gpus: bool = False,
        bucket_mib: float = 25,
        pin_cores: bool = True,
    ) -> None:
        super().__init__(compression, share_gpus, bucket_mib, pin_cores)
        if commit_steps < 1:
            raise ConfigError(f"strategy.commit_steps={commit_steps} is out of range; it must be at least 1")
        self.commit_steps = commit_steps
        self._resets = hvd.Resets()

    def start(self) -> Topology:
        topology = super().start()
        if topology.size > 1 and not hvd.is_elastic():
            raise ConfigError(
                "strategy=elastic needs an elastic job and this one is not; start it with horovodrun --gloo --min-np N "
                "--host-discovery-script FILE, or leave strategy=elastic out"
            )
        return topology

    def expect_restart(self) -> None:
        raise ConfigError("comm=auto and strategy=elastic exclude each other; leave one of them out")

    def description(self) -> str:
        return f"{super().description()}, elastic"

    def run_with_restarts(self, attempt: Callable[[], T]) -> T:
        # The watch over the ranks before a reset lasts until the one over those after it: a reset may hang, too.
        return self._resets.run_with_restarts(attempt)

    def check_membership(self) -> None:
        self._resets.check_host_updates()
