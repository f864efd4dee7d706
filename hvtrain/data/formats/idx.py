"""Reads idx files, the format of MNIST and its kin: magic number, sizes, bytes; plain or gzipped."""

from __future__ import annotations

import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from hvtrain.errors import DataError

UNSIGNED_BYTE = 0x08
MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
MEND = "the file is damaged: fetch it again"


def find_idx(folder: Path, name: str) -> Path | None:
    """The file of that name in folder, plain or .gz; None when there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, num_dims: int) -> np.ndarray:
    """The array of unsigned bytes in an idx file that must have num_dims dimensions.

    Format: http://yann.lecun.com/exdb/mnist/ (two zero bytes, type, number of dimensions, big-endian sizes).
    """
    header_bytes = 4 + 4 * num_dims
    try:
        packed = path.read_bytes() if path.suffix == ".gz" else b""
        header = _gunzip(path, packed, header_bytes) if packed else _begin(path, header_bytes)
        sizes = _sizes(path, header, num_dims)
        expected = header_bytes + math.prod(sizes)
        # Before the bytes are asked for: a header may claim anything, and a small .gz may hold gigabytes.
        if expected > MOST_BYTES:
            raise DataError(f"{path}: says that it holds {expected:,} bytes, more than half of the memory here; {MEND}")
        if packed:
            data = np.frombuffer(_gunzip(path, packed, expected + 1), np.uint8)
            found = "more" if len(data) > expected else str(len(data))
        else:
            found = str(path.stat().st_size)
            data = np.fromfile(path, np.uint8) if found == str(expected) else np.empty(0, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {MEND}") from error
    if len(data) != expected:
        raise DataError(f"{path}: {expected} bytes expected, {found} found; {MEND}")
    return data[header_bytes:].reshape(sizes)


def _begin(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(num_bytes)


def _sizes(path: Path, header: bytes, num_dims: int) -> tuple[int, ...]:
    if len(header) < 4 + 4 * num_dims:
        raise DataError(f"{path}: {4 + 4 * num_dims} bytes of header expected, {len(header)} found; {MEND}")
    magic = header[:4]
    if magic != bytes([0, 0, UNSIGNED_BYTE, num_dims]):
        raise DataError(
            f"{path}: starts with {magic.hex()}, not 0000{UNSIGNED_BYTE:02x}{num_dims:02x}; "
            f"an idx file of bytes with {num_dims} dimension(s) is needed"
        )
    return struct.unpack(f">{num_dims}I", header[4:])


def _gunzip(path: Path, packed: bytes, most_bytes: int) -> bytes:
    """What can be unpacked, up to most_bytes; of a truncated file the part that is there, so that it can be told."""
    try:
        return zlib.decompressobj(wbits=31).decompress(packed, most_bytes)
    except zlib.error as error:
        raise DataError(f"{path}: not readable as gzip ({error}); {MEND}") from error


def read_pair(images_path: Path, labels_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, h, w] and labels [n], as many of one as of the other."""
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} holds {len(images)} images but {labels_path} {len(labels)} labels; "
            f"the two files do not belong together"
        )
    return images, labels
