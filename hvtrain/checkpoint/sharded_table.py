"""A whole embedding table as the ranks hold it: rank k of N has the rows k, k + N, k + 2N, ..."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# A table is read, written and exchanged in pieces of this size, however large it is.
PIECE_BYTES = 64 << 20


def whole_shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of an array or variable; of some rows of a sharded table, the shape of the whole table."""
    num_rows = getattr(getattr(value, "rank_part", None), "num_rows", None)
    return (num_rows, *value.shape[1:]) if num_rows else tuple(value.shape)


class ShardedTable:
    """A table whose row r is row r // N of shard r mod N; reads like an array of its rows in order.

    The shards may be mapped from a file. Only the rows that are asked for are then read.

    Args:
        shards: The rows of each rank, [own, ...], by rank.

    Raises:
        ValueError: A shard does not have the number of rows that its rank holds.

    >>> table = ShardedTable([np.array([0, 2, 4]), np.array([1, 3])])
    >>> table[1:4], table[np.array([4, 0])], table.shape
    (array([1, 2, 3]), array([4, 0]), (5,))
    """

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self.shards = shards
        self.dtype = shards[0].dtype
        num_rows = sum(map(len, shards))
        self.shape = (num_rows, *shards[0].shape[1:])
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        for rank, shard in enumerate(shards):
            expected = len(range(rank, num_rows, len(shards)))
            if len(shard) != expected:
                raise ValueError(f"rank {rank} has {len(shard)} rows instead of {expected}")

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Returns a copy of the rows of a slice, or of an array of row numbers [n]."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(self.shape[0]))
        copy = np.empty((len(rows), *self.shape[1:]), self.dtype)
        owners = rows % len(self.shards)
        for rank, shard in enumerate(self.shards):
            is_own = owners == rank
            copy[is_own] = shard[rows[is_own] // len(self.shards)]
        return copy

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields the rows in order, a piece at a time, and where they are in the table."""
        step = max(1, PIECE_BYTES * self.shape[0] // max(1, self.nbytes))
        for begin in range(0, self.shape[0], step):
            place = slice(begin, begin + step)
            yield place, self[place]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)
