"""A folder of small images, a class each half."""

import struct
import zlib
from pathlib import Path

import numpy as np


def png(pixels: np.ndarray) -> bytes:
    """A grey image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 0, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def pictures(number: int) -> list[bytes]:
    random = np.random.default_rng(0)
    return [png(random.integers(0, 256, (6, 6), np.uint8)) for _ in range(number)]


def write_images(folder: Path, number: int) -> list[Path]:
    """In the order in which ranks share them out: those of odd places are rank 1's of two."""
    paths = []
    for index, data in enumerate(pictures(number)):
        path = folder / f"class_{index * 2 // number}" / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        paths.append(path)
    return paths
