"""Where this process stands among the others. A value that is handed around, never asked of a library."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Topology:
    """Place of one process (rank) in a job; the default is a job of one.

    rank is 0 ... size - 1 over all hosts, local_rank is 0 ... local_size - 1 on this host.

    >>> Topology(rank=1, size=4).is_chief
    False
    >>> Topology().size
    1
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = field(default_factory=socket.gethostname)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside 0 ... {self.size - 1}")
        if not 0 <= self.local_rank < self.local_size:
            raise ValueError(f"local rank {self.local_rank} is outside 0 ... {self.local_size - 1}")

    @property
    def is_chief(self) -> bool:
        """True on rank 0, the only one that writes checkpoints and records and speaks on the console."""
        return self.rank == 0

    def share(self, num_items: int) -> range:
        """Indices of this rank's share of num_items: rank, rank + size, ...; shares differ by at most one.

        >>> list(Topology(rank=1, size=3).share(8))
        [1, 4, 7]
        """
        return range(self.rank, num_items, self.size)
