"""Models a machine, and the time of one all-reduce on it by bytes, ranks and algorithm. Pure.

Sending m bytes takes alpha + m / beta seconds: Hockney's model, on which our formulas are based, like
those of Thakur, Rabenseifner and Gropp (2005, "Optimization of Collective Communication Operations in
MPICH"). The time of the additions is left out, since a rank adds faster than its link delivers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Bandwidth of the trees relative to a ring's, from NCCL's tuning (src/graph/tuning.cc, 2.8).
TREE_SHARE = 0.9

# Share of a link's nominal speed that an all-reduce reaches. Fitted once,
# together with step_cost.Rules.interference and .deviation, to Horovod's figures
# at 16 and 128 GPUs (docs/plan.md).
LINK_SHARE = 0.825

# Latency of one step of a ring. NCCL's tuning (src/graph/tuning.cc, 2.8) has 3.4 us over NVLink,
# 5.7 over PCIe and 9.6 over a network, and 1.9 times as much for large messages such as gradients
# ("plateau effect of ring").
NVLINK_SECONDS = 1.9 * 3.4e-6
PCIE_SECONDS = 1.9 * 5.7e-6
NETWORK_SECONDS = 1.9 * 9.6e-6


@dataclass(frozen=True)
class Link:
    """One direction of a link.

    Attributes:
        latency_seconds: Time until the first byte arrives.
        bytes_per_second: Speed from then on.
        corrections: Pairs of an all-reduce's bytes and the ratio of its measured to its predicted time,
            by ascending size. No real link has the same speed for all sizes.
    """

    latency_seconds: float
    bytes_per_second: float
    corrections: tuple[tuple[int, float], ...] = ()

    def correction(self, num_bytes: float) -> float:
        """Returns the factor that corrects an all-reduce's predicted time, interpolated between measured sizes.

        >>> measured = Link(0.0, 1e9, corrections=((1024, 1.5), (4096, 1.0)))
        >>> [measured.correction(num_bytes) for num_bytes in (0, 1024, 2048, 4096, 10**9)]
        [1.5, 1.5, 1.25, 1.0, 1.0]
        """
        if not self.corrections:
            return 1.0

        # Measured sizes span many powers of two, so the interpolation is over their logarithm.
        sizes, factors = zip(*self.corrections)
        return float(np.interp(np.log2(max(num_bytes, 1)), np.log2(sizes), factors))


@dataclass(frozen=True)
class Machine:
    """A cluster of equal hosts.

    Attributes:
        inside: Each rank's link inside its host.
        between: A host's link to the others, which all its ranks share.
        ranks_per_host: Ranks on each host.
        start_seconds: Fixed cost of an all-reduce of any size: with Horovod, the time until all ranks
            have agreed on it.
        exchanges: The machines that model exchanges other than float32 all-reduces, by kind: "gather" for
            all-gathers (Gloo's are slower between hosts), "bytes" for two ranks that swap bytes, "half" for
            half precision (whose sums are slow on CPUs). A kind that is missing takes as long as float32.
    """

    inside: Link
    between: Link
    ranks_per_host: int
    start_seconds: float = 0.0
    exchanges: Mapping[str, "Machine"] = field(default_factory=dict)

    def num_hosts(self, num_ranks: int) -> int:
        """Returns the number of hosts for num_ranks ranks; the last may be partly filled."""
        return -(-num_ranks // self.ranks_per_host)

    def slowest_link(self, num_ranks: int) -> str:
        """Returns "inside" if num_ranks ranks fit on one host, else "between", whose link is usually slower."""
        return "inside" if self.num_hosts(num_ranks) == 1 else "between"


def ring_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Returns a ring all-reduce's time over one kind of link: 2 (n - 1) (alpha + bytes / n / beta).

    In each of 2 (n - 1) steps every rank passes on an n-th part of the data. No algorithm sends fewer
    bytes (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations"), but a ring's latency grows with the number of ranks.

    >>> round(ring_seconds(100e6, 4, Link(0.0, 1e9)), 6), round(ring_seconds(0, 4, Link(1e-5, 1e9)), 6)
    (0.15, 6e-05)
    """
    step_seconds = link.latency_seconds + num_bytes / num_ranks / link.bytes_per_second
    return 2 * (num_ranks - 1) * step_seconds


def halving_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Returns the time of recursive halving and doubling: as many bytes as in a ring, but in 2 log2 n steps.

    This is Rabenseifner's algorithm, described in Thakur et al. 2005. If n is not a power of two it
    would send more, so the ring's time is returned.

    >>> round(halving_seconds(100e6, 4, Link(0.0, 1e9)), 6), round(halving_seconds(0, 32, Link(1e-5, 1e9)), 6)
    (0.15, 0.0001)
    """
    # Not a power of two.
    if num_ranks.bit_count() > 1:
        return ring_seconds(num_bytes, num_ranks, link)

    steps = 2 * (num_ranks.bit_length() - 1)
    return (
        steps * link.latency_seconds
        + 2 * (num_ranks - 1) / num_ranks * num_bytes / link.bytes_per_second
    )


def flat_ring_seconds(num_bytes: float, num_ranks: int, machine: Machine) -> float:
    """Returns the time of one ring through all ranks, host by host.

    It crosses each host's link once in each direction, and the slowest link limits its speed. A part of the
    sum passes 2 (n - 1) links, of which 2 (hosts - 1) lead from host to host; NCCL's ncclTopoTuneModel
    counts the same way.

    >>> wide = Machine(Link(1e-6, 10e9), Link(1e-5, 1e9), ranks_per_host=4)
    >>> round(flat_ring_seconds(100e6, 8, wide), 6)  # 2 x 7 / 8 x 0.1 s, 12 steps of 1 us, 2 of 10
    0.175032
    """
    hosts = machine.num_hosts(num_ranks)
    if hosts == 1:
        return ring_seconds(num_bytes, num_ranks, machine.inside)

    bandwidth = machine.between.bytes_per_second
    # If ranks share a host, the ring passes links inside hosts too.
    if num_ranks > hosts:
        bandwidth = min(bandwidth, machine.inside.bytes_per_second)

    steps = 2 * (num_ranks - 1)
    outer_steps = 2 * (hosts - 1)
    inner_steps = steps - outer_steps
    latency = (
        inner_steps * machine.inside.latency_seconds + outer_steps * machine.between.latency_seconds
    )
    return latency + steps / num_ranks * num_bytes / bandwidth


def hierarchical_seconds(num_bytes: float, num_ranks: int, machine: Machine) -> float:
    """Returns the time of an all-reduce in three phases: inside the hosts, between them, and inside again.

    The phases are a reduce-scatter inside each host, halving and doubling between hosts for each part,
    and an allgather inside each host, as in Goyal et al. 2017 (arXiv:1706.02677, section 4). With
    HOROVOD_HIERARCHICAL_ALLREDUCE, MPI chooses how hosts reduce. The parts share each host's link,
    which carries all bytes; the latency between hosts grows only with the number of hosts.

    >>> hosts = Machine(Link(0.0, 10e9), Link(1e-5, 1e9), ranks_per_host=4)
    >>> round(hierarchical_seconds(100e6, 8, hosts), 6)  # inside 2 x 3/4 x 0.01 s, between 2 x 1/2 x 0.1 s, 20 us
    0.11502
    """
    hosts = machine.num_hosts(num_ranks)
    local = min(num_ranks, machine.ranks_per_host)
    return ring_seconds(num_bytes, local, machine.inside) + halving_seconds(
        num_bytes, hosts, machine.between
    )


def tree_seconds(num_bytes: float, num_ranks: int, machine: Machine) -> float:
    """Returns the time of two binary trees over the hosts, each for half of the data, and a chain inside each host.

    Inner ranks of one tree are leaves of the other, so each link carries 2 x bytes, and the latency
    grows with the logarithm of the number of hosts (Sanders, Speck and Traeff 2009, "Two-tree algorithms
    for full bandwidth broadcast, reduction and scan"). NCCL has had this algorithm since 2.4. The time
    to fill the pipeline is left out.

    >>> hosts = Machine(Link(0.0, 10e9), Link(1e-5, 1e9), ranks_per_host=1)
    >>> round(tree_seconds(90e6, 512, hosts), 6), round(tree_seconds(0, 512, hosts), 6)
    (0.20018, 0.00018)
    """
    if num_ranks == 1:
        return 0.0

    hosts = machine.num_hosts(num_ranks)
    local = min(num_ranks, machine.ranks_per_host)
    latency = (local - 1) * machine.inside.latency_seconds
    latency += math.ceil(math.log2(hosts)) * machine.between.latency_seconds
    # Only links that are used can limit the speed.
    links = [(machine.inside, local), (machine.between, hosts)]
    bandwidth = min(link.bytes_per_second for link, number in links if number > 1)
    return 2 * latency + 2 * num_bytes / (TREE_SHARE * bandwidth)


ALGORITHMS = {"ring": flat_ring_seconds, "hierarchical": hierarchical_seconds, "tree": tree_seconds}


def allreduce_seconds(
    num_bytes: float,
    num_ranks: int,
    machine: Machine,
    algorithms: Sequence[str] = tuple(ALGORITHMS),
) -> tuple[float, str]:
    """Returns the fastest algorithm's time, with start_seconds and the link's correction, and that algorithm's name.

    >>> hosts = Machine(Link(0.0, 10e9), Link(1e-5, 1e9), ranks_per_host=1)
    >>> [allreduce_seconds(num_bytes, 512, hosts, ("ring", "tree"))[1] for num_bytes in (1e3, 1e9)]
    ['tree', 'ring']
    """
    if num_ranks == 1:
        return 0.0, "none"

    # Ties go to the alphabetically first name.
    seconds, name = min(
        (ALGORITHMS[name](num_bytes, num_ranks, machine), name) for name in algorithms
    )
    link: Link = getattr(machine, machine.slowest_link(num_ranks))
    return (machine.start_seconds + seconds) * link.correction(num_bytes), name
