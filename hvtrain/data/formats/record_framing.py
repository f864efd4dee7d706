"""The framing of TFRecord files: how many records a file holds, and where.

Framing (tensorflow/core/lib/io/record_writer.h): length uint64, its CRC uint32, data, their CRC uint32.
"""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

from hvtrain.data.source import LEAVE_OUT
from hvtrain.errors import DataError

HEADER_BYTES, FOOTER_BYTES = 12, 4


def count_records(path: Path) -> int:
    """Records in the file, by their lengths alone; the CRCs of their data are not checked."""
    offsets, problem = scan_records(path)
    if problem:
        raise DataError(f"{path}: {problem}; write or fetch it again, {LEAVE_OUT}")
    return len(offsets)


def scan_records(path: Path, check_lengths: bool = False) -> tuple[array[int], str | None]:
    """Offset of each record, and the defect that keeps the rest of the file from being read, if there is one.

    check_lengths: stop at a length whose CRC is wrong, since the bytes after it would be taken for records.
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
