"""Which rows of which row groups a rank reads, in which order, and their batches. Plain NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np

from hvtrain.core.step_plan import Share
from hvtrain.data.formats.row_groups import RowGroup
from hvtrain.data.pipeline.streams import BLOCK, ORDER

Batch = tuple[np.ndarray, ...]
"""Images, labels, and where they come from."""
Read = tuple[Batch, np.ndarray]
"""What a piece holds, and its rows in the order in which they are taken."""


class Piece(NamedTuple):
    """Row groups that are in memory together, and which of their rows come in which order."""

    groups: list[RowGroup]
    rows: np.ndarray


def epochs(
    groups: list[RowGroup], share: Share, shuffle_groups: int, seed: int, rank: int, start_step: int
) -> Iterator[Piece]:
    """What a rank reads from a step of the run on, endlessly; share.num_examples rows of each epoch. Pure."""
    first_epoch, steps_done = divmod(start_step, share.steps)
    for epoch in itertools.count(first_epoch):
        order = np.random.default_rng((seed, ORDER, rank, epoch)).permutation(len(groups))
        begin = share.begin(steps_done) if epoch == first_epoch else 0
        before = 0  # Rows of the epoch before this piece.
        for number, at in enumerate(range(0, len(groups), shuffle_groups)):
            chosen = [groups[index] for index in order[at : at + shuffle_groups]]
            num_rows = sum(group.num_rows for group in chosen)
            low, high = max(begin - before, 0), min(share.num_examples - before, num_rows)
            if low < high:
                rows = np.random.default_rng((seed, BLOCK, rank, epoch, number)).permutation(num_rows)
                yield Piece(chosen, rows[low:high])
            before += num_rows


def read_ahead(pool: Executor, read: Callable[[Piece], Read], pieces: Iterable[Piece]) -> Iterator[Read]:
    """read(piece) of each piece in turn; while one is in use, the next is being read, and no other."""
    reading: Future[Read] | None = None
    for piece in pieces:
        ready = reading.result() if reading else None
        try:
            reading = pool.submit(read, piece)
        except RuntimeError:
            return  # Python is going down, and TensorFlow's threads still ask for more.
        if ready:
            yield ready
    if reading:
        yield reading.result()


def rebatch(pieces: Iterator[Read], sizes: Iterable[int]) -> Iterator[Batch]:
    """Batches of the given sizes, across the borders of pieces."""
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
