"""Reads idx files, the format of MNIST and its kin: magic number, sizes, bytes; plain or gzipped."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import numpy as np

from hvtrain.errors import DataError

UNSIGNED_BYTE = 0x08
MEND = "the file is damaged: fetch it again"


def find_idx(folder: Path, name: str) -> Path | None:
    """The file of that name in folder, plain or .gz; None when there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, num_dims: int) -> np.ndarray:
    """The array of unsigned bytes in an idx file that must have num_dims dimensions.

    Format: http://yann.lecun.com/exdb/mnist/ (two zero bytes, type, number of dimensions, big-endian sizes).
    """
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = _gunzip(path, data)
    header_bytes = 4 + 4 * num_dims
    if len(data) < header_bytes:
        raise DataError(f"{path}: {header_bytes} bytes of header expected, {len(data)} found; {MEND}")
    magic = data[:4]
    if magic != bytes([0, 0, UNSIGNED_BYTE, num_dims]):
        raise DataError(
            f"{path}: starts with {magic.hex()}, not 0000{UNSIGNED_BYTE:02x}{num_dims:02x}; "
            f"an idx file of bytes with {num_dims} dimension(s) is needed"
        )
    sizes = struct.unpack(f">{num_dims}I", data[4:header_bytes])
    expected = header_bytes + math.prod(sizes)
    if len(data) != expected:
        raise DataError(f"{path}: {expected} bytes expected, {len(data)} found; {MEND}")
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(sizes)


def _gunzip(path: Path, data: bytes) -> bytes:
    """All that can be unpacked: of a truncated file the part that is there, so that its length can be told."""
    try:
        return zlib.decompressobj(wbits=31).decompress(data)
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
