"""MNIST and Fashion-MNIST: 70,000 images of 28x28 in four idx files, or from Keras's cache or download."""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from hvtrain.data.manifest import user_path
from hvtrain.data.sources.arrays import Arrays, ArraySource
from hvtrain.data.sources.keras_cache import KerasFiles
from hvtrain.errors import DataError

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FILE_NAMES = [name for pair in FILES.values() for name in pair]
MAX_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
FETCH = "the file is damaged: fetch it again"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
)  # fmt: skip

_ADVICE = f"put {', '.join(FILE_NAMES)} (each plain or .gz) into a folder and set dataset.dir=FOLDER"
MNIST_FILES = KerasFiles("mnist", ("mnist.npz",), "storage.googleapis.com", _ADVICE)
FASHION_FILES = KerasFiles(
    "fashion_mnist",
    tuple(f"fashion-mnist/{name}.gz" for name in FILE_NAMES),
    "storage.googleapis.com",
    f"{_ADVICE}, or install the Debian package dataset-fashion-mnist",
)


def _idx_source(
    files: KerasFiles,
    class_names: Sequence[str],
    /,
    dir: str | None = None,
    num_validation: int = 5000,
    standardize: str = "per_pixel",
    shift_pixels: int = 0,
    flip: bool = False,
) -> ArraySource:
    """Without `dir`: the Debian package (of Fashion-MNIST), then Keras's cache, then Keras's download."""
    folder, origin = DEBIAN_FOLDER, f"Debian package dataset-fashion-mnist ({DEBIAN_FOLDER})"
    if dir is not None:
        folder, origin = user_path(dir), f"dataset.dir={dir}"
    load: Callable[[], Arrays] = partial(_read_folder, folder)
    missing = [name for name in FILE_NAMES if not find_idx(folder, name)]
    if missing and dir is not None:
        raise DataError(f"{files.name}: {folder} lacks {', '.join(missing)}; {files.advice}")
    if dir is None and (missing or files is MNIST_FILES):
        origin, load = files.fetch(), files.load
    changes = num_validation, shift_pixels, flip
    return ArraySource(files.name, load, (28, 28, 1), 10, origin, standardize, 255.0, *changes, class_names)


mnist = partial(_idx_source, MNIST_FILES, tuple("0123456789"))
fashion_mnist = partial(_idx_source, FASHION_FILES, FASHION_CLASSES)


def _read_folder(folder: Path) -> Arrays:
    arrays = {}
    for split, names in FILES.items():
        # A file that went away since it was found is named when it is read.
        paths = [find_idx(folder, name) or folder / name for name in names]
        images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
        if len(images) != len(labels):
            found = f"{paths[0]} holds {len(images)} images but {paths[1]} {len(labels)} labels"
            raise DataError(f"{found}; the two files do not belong together")
        arrays[split] = images, labels
    return arrays


def find_idx(folder: Path, name: str) -> Path | None:
    """The file of that name in folder, plain or .gz; None if there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, num_dims: int) -> np.ndarray:
    """The array of unsigned bytes in an idx file that must have num_dims dimensions.

    Format: http://yann.lecun.com/exdb/mnist/ (two zero bytes, type, number of dimensions, big-endian sizes).
    """
    magic, header_bytes = bytes([0, 0, 8, num_dims]), 4 + 4 * num_dims  # 8: unsigned bytes.
    try:
        file: IO[bytes]
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:  # type: ignore[assignment]
            if len(header := file.read(header_bytes)) < header_bytes:
                raise DataError(f"{path}: {header_bytes} bytes of header expected, {len(header)} found; {FETCH}")
            if header[:4] != magic:
                needed = f"an idx file of bytes with {num_dims} dimension(s) is needed"
                raise DataError(f"{path}: starts with {header[:4].hex()}, not {magic.hex()}; {needed}")
            sizes = struct.unpack(f">{num_dims}I", header[4:])
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
