"""TFRecord files as files: how many records each holds, and which rank reads which. No TensorFlow.

Framing (tensorflow/core/lib/io/record_writer.h): length uint64, its CRC uint32, data, their CRC uint32.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvtrain.errors import DataError

HEADER_BYTES, FOOTER_BYTES = 12, 4
LEAVE_OUT = "or leave out what cannot be read with data.on_error=skip"


def count_records(path: Path) -> int:
    """Records in the file, from their lengths alone: the data are jumped over, so their CRC goes unseen."""
    offsets, problem = scan_records(path)
    if problem:
        raise DataError(f"{path}: {problem}; write or fetch it again, {LEAVE_OUT}")
    return len(offsets)


def scan_records(path: Path, check_lengths: bool = False) -> tuple[array[int], str | None]:
    """Where each record begins, and what is wrong with the rest of the file, if anything is.

    check_lengths: believe no length whose CRC is wrong. What came after it would be read as records, too.
    """
    offsets, offset = array("Q"), 0
    try:
        file_bytes = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            while offset < file_bytes:
                file.seek(offset)
                header = file.read(HEADER_BYTES)
                length = struct.unpack("<Q", header[:8])[0] if len(header) == HEADER_BYTES else 0
                end = offset + HEADER_BYTES + length + FOOTER_BYTES
                place = f"record {len(offsets)} at byte {offset}"
                if end > file_bytes:
                    return offsets, (
                        f"{place} should end at byte {end}, but the file has {file_bytes} bytes: "
                        "it is truncated or damaged"
                    )
                if check_lengths and header[8:] != masked_crc(header[:8]):
                    return offsets, f"{place} has a length whose CRC is wrong: it is damaged"
                offsets.append(offset)
                offset = end
    except OSError as error:
        return offsets, f"cannot be read ({error.strerror})"
    return offsets, None if offsets else "is empty"


def masked_crc(data: bytes) -> bytes:
    """The CRC-32C of a few bytes as the format stores it.

    >>> masked_crc(bytes(8)).hex()
    '29039807'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


_CRC32C = [_crc_of_byte(byte) for byte in range(256)]


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
