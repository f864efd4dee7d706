"""Horovod with ranks that leave and join during a run."""

from typing import Any

import hvtrain.keras as hvd
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError
from hvtrain.keras.elastic import Resets
from hvtrain.strategies.base import Membership
from hvtrain.strategies.horovod import HorovodStrategy


class ElasticMembership(Resets, Membership):
    """A restart may hang, so the earlier ranks' watchdog runs until the new ranks have theirs."""

    def __init__(self, commit_steps: int) -> None:
        super().__init__()
        self.commit_steps = commit_steps

    def check(self) -> None:
        self.check_host_updates()


class ElasticStrategy(HorovodStrategy):
    """Strategy for `horovodrun --gloo --min-np ... --host-discovery-script ...`, or one rank without a launcher.

    Every rank commits the state to memory periodically. After a loss the first remaining rank restores its last
    commit, or a newer checkpoint, and the run continues like one resumed on another number of ranks.

    Args:
        commit_steps: steps between commits, besides those at the end of each epoch; a loss costs fewer steps than that.
        horovod: the arguments of HorovodStrategy.
    """

    def __init__(self, commit_steps: int = 100, **horovod: Any) -> None:
        super().__init__(**horovod)
        if commit_steps < 1:
            raise ConfigError(f"strategy.commit_steps={commit_steps} is out of range; it must be at least 1")
        self.membership = ElasticMembership(commit_steps)

    def start(self) -> Topology:
        topology = super().start()
        if topology.size > 1 and not hvd.is_elastic():
            raise ConfigError(
                "strategy=elastic needs an elastic job and this one is not; start it with horovodrun --gloo --min-np N "
                "--host-discovery-script FILE, or leave strategy=elastic out"
            )
        return topology

    def expect_restart(self) -> None:
        raise ConfigError("comm.tune=true and strategy=elastic exclude each other; leave one of them out")

    def description(self) -> str:
        return f"{super().description()}, elastic"
