"""The machine as the cost model sees it: a link has a latency and a bandwidth, hosts hold ranks. Pure.

Sending m bytes takes alpha + m / beta seconds: Hockney's model, on which Thakur, Rabenseifner and Gropp (2005,
"Optimization of Collective Communication Operations in MPICH") build all of their formulas, and ours stand.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import log2

# What of a link's nominal speed an allreduce gets. It was fitted once, together with interference and deviation of
# step.Rules, to Horovod's figures at 16 and 128 GPUs (docs/plan.md); all else that is published is predicted with it.
LINK_SHARE = 0.825

# Seconds of one step of a ring. NCCL's own tuning (src/graph/tuning.cc, 2.8) has 3.4 us over NVLink, 5.7 over PCIe and
# 9.6 over a network, and 1.9 times as much for large messages ("plateau effect of ring"), which gradients are.
NVLINK_SECONDS, PCIE_SECONDS, NETWORK_SECONDS = 1.9 * 3.4e-6, 1.9 * 5.7e-6, 1.9 * 9.6e-6


@dataclass(frozen=True)
class Link:
    """One direction of a link: seconds until the first byte arrives, and bytes a second from then on.

    corrections: of allreduces measured over it, by size: (bytes, seconds / those of the formulas). No real link has one
        speed for all sizes.
    """

    latency_seconds: float
    bytes_per_second: float
    corrections: tuple[tuple[int, float], ...] = ()

    def seconds(self, num_bytes: float) -> float:
        """Of one message.

        >>> Link(1e-5, 1e9).seconds(1e6)
        0.00101
        """
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def correction(self, num_bytes: float) -> float:
        """What an allreduce of so many bytes takes, as a multiple of what the formulas say.

        >>> measured = Link(0.0, 1e9, corrections=((1024, 1.5), (4096, 1.0)))
        >>> [measured.correction(num_bytes) for num_bytes in (0, 1024, 2048, 4096, 10**9)]
        [1.5, 1.5, 1.25, 1.0, 1.0]
        """
        if not self.corrections:
            return 1.0
        after = bisect_left(self.corrections, (num_bytes, 0.0))
        if after in (0, len(self.corrections)):
            return self.corrections[min(after, len(self.corrections) - 1)][1]
        (smaller, first), (larger, last) = self.corrections[after - 1 : after + 1]
        return first + (last - first) * log2(num_bytes / smaller) / log2(larger / smaller)


def network(gbits_per_second: float, latency_seconds: float = NETWORK_SECONDS, share: float = LINK_SHARE) -> Link:
    """A host's link to the others by its nominal speed, of which an allreduce gets a share.

    >>> network(25, share=0.8).bytes_per_second
    2500000000.0
    """
    return Link(latency_seconds, gbits_per_second * share / 8 * 1e9)


def bus(gbytes_per_second: float, latency_seconds: float = PCIE_SECONDS, share: float = LINK_SHARE) -> Link:
    """The link between ranks of one host: each rank's own, in one direction."""
    return Link(latency_seconds, gbytes_per_second * share * 1e9)


@dataclass(frozen=True)
class Machine:
    """Hosts of ranks_per_host ranks, which share the host's one link to the others.

    Args:
        inside: between ranks of a host; each has its own.
        between: from host to host; one for all of a host's ranks.
        start_seconds: what each allreduce takes however small it is: for Horovod, until all ranks have agreed on it.
    """

    inside: Link
    between: Link
    ranks_per_host: int
    start_seconds: float = 0.0

    def num_hosts(self, num_ranks: int) -> int:
        """Hosts that so many ranks fill, the last one perhaps in part."""
        return -(-num_ranks // self.ranks_per_host)

    def slowest(self, num_ranks: int) -> str:
        """Which link sets the pace of so many ranks: "inside" or "between"."""
        return "inside" if self.num_hosts(num_ranks) == 1 else "between"
