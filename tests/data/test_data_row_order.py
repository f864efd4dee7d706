"""The order of rows and the reading ahead, without a file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.formats.row_groups import RowGroup
from hvtrain.data.sources.parquet import Piece, pieces_of, read_ahead


def test_a_stream_that_starts_later_reads_nothing_of_before():
    groups = [RowGroup("file", number, 10) for number in range(6)]
    whole = list(islice(pieces_of(groups, 2, StreamRequest(Topology(), 5, 1, 0, 12)), 6))
    assert [len(piece.groups) for piece in whole] == [2] * 6, "so many are in memory"
    later = next(pieces_of(groups, 2, StreamRequest(Topology(), 5, 1, 12 + 7, 12)))
    assert later.groups == whole[4].groups
    np.testing.assert_array_equal(later.rows, whole[4].rows[15:])


def test_one_piece_is_read_ahead_and_no_more():
    begun = []

    def read(piece: Piece):
        begun.append(piece.groups)
        return np.zeros(1), np.zeros(1), piece.rows

    pieces = (Piece([RowGroup("file", number, 1)], np.zeros(1, np.int64)) for number in range(9))
    with ThreadPoolExecutor(1) as pool:
        for taken, _ in enumerate(read_ahead(pool, read, pieces), start=1):
            pool.submit(int).result()  # All that was asked for so far is done.
            assert len(begun) == min(taken + 1, 9)
