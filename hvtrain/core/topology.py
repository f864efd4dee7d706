"""This process's rank among the others, as a value that is passed around."""

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Topology:
    """Place of one process (rank) in a job; the default is a job of one process.

    rank is 0 ... size - 1 over all hosts, local_rank is 0 ... local_size - 1 on this host. weights, one for
    each rank, are their shares of the data; empty: equal shares.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    weights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside 0 ... {self.size - 1}")
        if not 0 <= self.local_rank < self.local_size:
            raise ValueError(f"local rank {self.local_rank} is outside 0 ... {self.local_size - 1}")

    @property
    def is_chief(self) -> bool:
        """True on rank 0, the only one that writes checkpoints and records and logs to the console."""
        return self.rank == 0

    def share(self, num_items: int) -> Sequence[int]:
        """Indices of this rank's share of num_items: rank, rank + size, ...; equal shares differ by at most one item.

        >>> list(Topology(rank=1, size=3).share(8))
        [1, 4, 7]
        >>> [list(Topology(rank, 2, weights=(6, 2)).share(9)) for rank in (0, 1)]
        [[0, 1, 2, 4, 5, 6, 8], [3, 7]]
        """
        period, first, width = self._pattern()
        if width == 1:
            return range(first, num_items, period)
        return [i for begin in range(first, num_items, period) for i in range(begin, min(begin + width, num_items))]

    def share_size(self, num_items: int) -> int:
        """The length of share(num_items), without making it.

        >>> [Topology(rank, 2, weights=(6, 2)).share_size(9) for rank in (0, 1)]
        [7, 2]
        """
        period, first, width = self._pattern()
        whole, rest = divmod(num_items, period)
        return whole * width + min(max(rest - first, 0), width)

    def _pattern(self) -> tuple[int, int, int]:
        """This rank has `width` items from `first` on, in each `period` of them."""
        weights = reduced(self.weights) or (1,) * self.size
        return sum(weights), sum(weights[: self.rank]), weights[self.rank]


def reduced(weights: Sequence[int]) -> tuple[int, ...]:
    """The same proportions in the smallest whole numbers: (48, 16) gives (3, 1)."""
    divisor = math.gcd(*weights) or 1
    return tuple(weight // divisor for weight in weights)
