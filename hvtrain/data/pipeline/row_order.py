"""Which rows of which row groups a rank reads, in which order, and their batches. Plain NumPy."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np

from hvtrain.data.formats.row_groups import RowGroup
from hvtrain.data.pipeline.streams import BLOCK, ORDER
from hvtrain.data.source import StreamRequest

Batch = tuple[np.ndarray, ...]
"""Images, labels, and the codes of their rows."""
Read = tuple[Batch, np.ndarray]
"""The content of a piece, and its rows in the order in which they are taken."""


class Piece(NamedTuple):
    """Row groups that are in memory together, and those of their rows that are used, in order."""

    groups: list[RowGroup]
    rows: np.ndarray


def pieces_of(groups: list[RowGroup], shuffle_groups: int, request: StreamRequest) -> Iterator[Piece]:
    """The pieces that a rank reads, endlessly, from request.start_step on. Pure."""
    share = request.share_of(sum(group.num_rows for group in groups))
    first_epoch, steps_done = request.position
    for epoch in itertools.count(first_epoch):
        order = np.random.default_rng((request.seed, ORDER, request.topology.rank, epoch)).permutation(len(groups))
        begin = share.begin(steps_done) if epoch == first_epoch else 0
        before = 0  # Rows of the epoch before this piece.
        for number, at in enumerate(range(0, len(groups), shuffle_groups)):
            chosen = [groups[index] for index in order[at : at + shuffle_groups]]
            num_rows = sum(group.num_rows for group in chosen)
            low, high = max(begin - before, 0), min(share.num_examples - before, num_rows)
            if low < high:
                random = np.random.default_rng((request.seed, BLOCK, request.topology.rank, epoch, number))
                yield Piece(chosen, random.permutation(num_rows)[low:high])
            before += num_rows


def read_ahead(pool: Executor, read: Callable[[Piece], Read], pieces: Iterable[Piece]) -> Iterator[Read]:
    """read(piece) of each piece in turn. While one is in use, the next one is being read, and no other."""
    reading: Future[Read] | None = None
    for piece in pieces:
        ready = reading.result() if reading else None
        try:
            reading = pool.submit(read, piece)
        except RuntimeError:
            return  # Python is shutting down, and TensorFlow's threads still ask for more.
        if ready:
            yield ready
    if reading:
        yield reading.result()


def rebatch(pieces: Iterator[Read], sizes: Iterable[int]) -> Iterator[Batch]:
    """Batches of the given sizes, across the boundaries of pieces."""
    at, rows = 0, np.empty(0, np.int64)
    for size in sizes:
        parts = []
        while size:
            if at == len(rows):
                piece = next(pieces, None)
                if piece is None:
                    return
                at, (arrays, rows) = 0, piece
            taken = rows[at : at + size]
            parts.append(tuple(array[taken] for array in arrays))
            at, size = at + len(taken), size - len(taken)
        yield parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts)))
