"""Reads idx files, the format of MNIST and its relatives: magic number, sizes, bytes; plain or gzipped."""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from hvtrain.errors import DataError

UNSIGNED_BYTE = 0x08
MAX_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
FETCH = "the file is damaged: fetch it again"


def find_idx(folder: Path, name: str) -> Path | None:
    """The file of that name in folder, plain or .gz; None if there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, num_dims: int) -> np.ndarray:
    """The array of unsigned bytes in an idx file that must have num_dims dimensions.

    Format: http://yann.lecun.com/exdb/mnist/ (two zero bytes, type, number of dimensions, big-endian sizes).
    """
    try:
        file: IO[bytes]
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:  # type: ignore[assignment]
            sizes = _read_sizes(path, file, num_dims)
            expected = math.prod(sizes)
            # Checked before the bytes are read: a header may claim anything, and a small .gz may hold gigabytes.
            if expected > MAX_BYTES:
                raise DataError(f"{path}: claims {expected:,} bytes, more than half of the memory here; {FETCH}")
            data = np.frombuffer(file.read(expected + 1), np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); {FETCH}") from error
    if len(data) != expected:
        found = "more" if len(data) > expected else len(data)
        raise DataError(f"{path}: {expected} bytes expected after the header, {found} found; {FETCH}")
    return data.reshape(sizes)


def _read_sizes(path: Path, file: IO[bytes], num_dims: int) -> tuple[int, ...]:
    header = file.read(4 + 4 * num_dims)
    magic = header[:4]
    if len(header) < 4 + 4 * num_dims:
        raise DataError(f"{path}: {4 + 4 * num_dims} bytes of header expected, {len(header)} found; {FETCH}")
    if magic != bytes([0, 0, UNSIGNED_BYTE, num_dims]):
        raise DataError(
            f"{path}: starts with {magic.hex()}, not 0000{UNSIGNED_BYTE:02x}{num_dims:02x}; "
            f"an idx file of bytes with {num_dims} dimension(s) is needed"
        )
    return struct.unpack(f">{num_dims}I", header[4:])


def read_pair(images_path: Path, labels_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, h, w] and labels [n], as many of one as of the other."""
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} holds {len(images)} images but {labels_path} {len(labels)} labels; "
            f"the two files do not belong together"
        )
    return images, labels
