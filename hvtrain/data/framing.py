"""TFRecord files as files: how many records each holds, and which rank reads which. No TensorFlow.

Framing (tensorflow/core/lib/io/record_writer.h): length uint64, its CRC uint32, data, their CRC uint32.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvtrain.errors import DataError

HEADER_BYTES, FOOTER_BYTES = 12, 4


def count_records(path: Path) -> int:
    """Records in the file, from their lengths alone: the data are jumped over, so their CRC goes unseen."""
    file_bytes = path.stat().st_size
    count = offset = 0
    with path.open("rb", buffering=0) as file:
        while offset < file_bytes:
            file.seek(offset)
            header = file.read(HEADER_BYTES)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == HEADER_BYTES else 0
            end = offset + HEADER_BYTES + length + FOOTER_BYTES
            if end > file_bytes:
                raise DataError(
                    f"{path}: record {count} at byte {offset} should end at byte {end}, but the file has "
                    f"{file_bytes} bytes: it is truncated or damaged; write or fetch it again"
                )
            count, offset = count + 1, end
    return count


def deal(counts: Mapping[str, int], num_shards: int, weights: Sequence[int] = ()) -> list[list[str]]:
    """Files for each shard: the largest first, each to the shard that has least so far for its weight. Pure.

    >>> deal({"a": 5, "b": 3, "c": 2}, 2)
    [['a'], ['b', 'c']]
    """
    shards: list[list[str]] = [[] for _ in range(num_shards)]
    loads = [0.0] * num_shards
    for path in sorted(counts, key=lambda path: (-counts[path], path)):
        lightest = min(range(num_shards), key=lambda shard: (loads[shard], len(shards[shard]), shard))
        shards[lightest].append(path)
        loads[lightest] += counts[path] / (weights[lightest] if weights else 1)
    return shards
