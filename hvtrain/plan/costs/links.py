"""The machine in the cost model: links with latency and bandwidth, and hosts of several ranks. Pure.

Sending m bytes takes alpha + m / beta seconds: Hockney's model, on which Thakur, Rabenseifner and Gropp (2005,
"Optimization of Collective Communication Operations in MPICH") base their formulas, as we do ours.
"""

from dataclasses import dataclass

import numpy as np

# Share of a link's nominal speed that an all-reduce gets. Fitted once, together with step.Rules.interference and
# .deviation, to Horovod's figures at 16 and 128 GPUs (docs/plan.md).
LINK_SHARE = 0.825

# Latency of one step of a ring. NCCL's tuning (src/graph/tuning.cc, 2.8) has 3.4 us over NVLink, 5.7 over PCIe and 9.6
# over a network, and 1.9 times as much for large messages ("plateau effect of ring"), such as gradients.
NVLINK_SECONDS, PCIE_SECONDS, NETWORK_SECONDS = 1.9 * 3.4e-6, 1.9 * 5.7e-6, 1.9 * 9.6e-6


@dataclass(frozen=True)
class Link:
    """One direction of a link: seconds until the first byte arrives, and bytes per second from then on.

    corrections are pairs (bytes, measured / predicted seconds) of all-reduces over it: no real link has the same speed
    for all sizes.
    """

    latency_seconds: float
    bytes_per_second: float
    corrections: tuple[tuple[int, float], ...] = ()

    def seconds(self, num_bytes: float) -> float:
        """Time of one message.

        >>> Link(1e-5, 1e9).seconds(1e6)
        0.00101
        """
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def correction(self, num_bytes: float) -> float:
        """Factor on the formulas' time of an all-reduce, interpolated between the measured sizes.

        >>> measured = Link(0.0, 1e9, corrections=((1024, 1.5), (4096, 1.0)))
        >>> [measured.correction(num_bytes) for num_bytes in (0, 1024, 2048, 4096, 10**9)]
        [1.5, 1.5, 1.25, 1.0, 1.0]
        """
        if not self.corrections:
            return 1.0
        sizes, factors = zip(*self.corrections)
        return float(np.interp(np.log2(max(num_bytes, 1)), np.log2(sizes), factors))


def network(gbits_per_second: float, latency_seconds: float = NETWORK_SECONDS, share: float = LINK_SHARE) -> Link:
    """A host's link to the others, from its nominal speed and the share of it that an all-reduce gets.

    >>> network(25, share=0.8).bytes_per_second
    2500000000.0
    """
    return Link(latency_seconds, gbits_per_second * share / 8 * 1e9)


def bus(gbytes_per_second: float, latency_seconds: float = PCIE_SECONDS, share: float = LINK_SHARE) -> Link:
    """The link between ranks of one host, one for each rank, in one direction."""
    return Link(latency_seconds, gbytes_per_second * share * 1e9)


@dataclass(frozen=True)
class Machine:
    """Hosts of ranks_per_host ranks, which share the host's link to the others.

    Args:
        inside: link between ranks of a host; each rank has one.
        between: link from host to host; all ranks of a host share it.
        start_seconds: fixed cost of an all-reduce of any size: with Horovod, until all ranks have agreed on it.
    """

    inside: Link
    between: Link
    ranks_per_host: int
    start_seconds: float = 0.0

    def num_hosts(self, num_ranks: int) -> int:
        """Number of hosts for so many ranks; the last may be partly filled."""
        return -(-num_ranks // self.ranks_per_host)

    def slowest(self, num_ranks: int) -> str:
        """Name of the link that limits so many ranks: "inside" or "between"."""
        return "inside" if self.num_hosts(num_ranks) == 1 else "between"
