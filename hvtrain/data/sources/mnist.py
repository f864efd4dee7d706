"""MNIST and Fashion-MNIST: 70,000 images of 28x28 pixels, from four idx files or through Keras."""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
UNSIGNED_BYTES = 8  # The code of this type in an idx file.
# Half of this machine's memory.
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
    """Makes a source of 28x28 images in 10 classes.

    Args:
        dir: the folder with the four files; None: the Debian package (of Fashion-MNIST), Keras's
            cache, or its download, whichever is there first.
        num_validation, standardize, shift_pixels, flip: see ArraySource.

    Raises:
        DataError: if files are missing, or the download's host does not answer.
    """
    folder = DEBIAN_FOLDER
    origin = f"Debian package dataset-fashion-mnist ({DEBIAN_FOLDER})"
    if dir is not None:
        folder = user_path(dir)
        origin = f"dataset.dir={dir}"

    load: Callable[[], Arrays] = partial(_read_folder, folder)
    # The Debian package holds Fashion-MNIST, under the same file names as MNIST's: it must not be
    # taken for MNIST.
    missing = [name for name in FILE_NAMES if not _find_idx(folder, name)]
    if missing and dir is not None:
        raise DataError(f"{files.name}: {folder} lacks {', '.join(missing)}; {files.advice}")
    if dir is None and (missing or files is MNIST_FILES):
        origin = files.fetch()
        load = files.load

    return ArraySource(
        files.name,
        load,
        image_shape=(28, 28, 1),
        num_classes=10,
        origin=origin,
        standardize=standardize,
        num_validation=num_validation,
        shift_pixels=shift_pixels,
        flip=flip,
        class_names=class_names,
    )


mnist = partial(_idx_source, MNIST_FILES, tuple("0123456789"))
fashion_mnist = partial(_idx_source, FASHION_FILES, FASHION_CLASSES)


def _read_folder(folder: Path) -> Arrays:
    """Reads images uint8 [n, 28, 28] and labels [n] of both splits."""
    arrays = {}
    for split, names in FILES.items():
        # A file that has vanished since it was found is named when it is read.
        images_path, labels_path = (_find_idx(folder, name) or folder / name for name in names)
        images = read_idx(images_path, 3)
        labels = read_idx(labels_path, 1)
        if len(images) != len(labels):
            raise DataError(
                f"{images_path} holds {len(images)} images but {labels_path} {len(labels)} "
                "labels; the two files do not belong together"
            )

        arrays[split] = images, labels

    return arrays


def _find_idx(folder: Path, name: str) -> Path | None:
    """Returns the file of that name, plain or .gz; None if there is neither."""
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.is_file()), None)


def read_idx(path: Path, num_dims: int) -> np.ndarray:
    """Reads the array of unsigned bytes in an idx file.

    Format: two zero bytes, the type, the number of dimensions, the sizes as big-endian uint32, the
    values (http://yann.lecun.com/exdb/mnist/).

    Args:
        path: the file, plain or .gz.
        num_dims: the number of dimensions that it must have.

    Raises:
        DataError: if the file is damaged, of another kind, or larger than half of this machine's
            memory.
    """
    magic = bytes([0, 0, UNSIGNED_BYTES, num_dims])
    header_bytes = 4 + 4 * num_dims
    try:
        open_file: Any = gzip.open if path.suffix == ".gz" else Path.open
        with open_file(path, "rb") as file:
            header = file.read(header_bytes)
            if len(header) < header_bytes:
                raise DataError(f"{path}: {header_bytes} bytes of header expected, {len(header)} found; {FETCH}")
            if header[:4] != magic:
                raise DataError(
                    f"{path}: starts with {header[:4].hex()}, not {magic.hex()}; an idx file of "
                    f"bytes with {num_dims} dimension(s) is needed"
                )

            sizes = struct.unpack(f">{num_dims}I", header[4:])
            expected = math.prod(sizes)
            # Checked before the bytes are read: a header may claim anything, and a small .gz may
            # hold gigabytes.
            if expected > MAX_BYTES:
                raise DataError(f"{path}: claims {expected:,} bytes, more than half of the memory here; {FETCH}")
            # One byte more, to notice a file that goes on.
            values = np.frombuffer(file.read(expected + 1), np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read ({reason}); {FETCH}") from error

    if len(values) != expected:
        # Only one more byte was read, so the number of all is unknown.
        size = "more" if len(values) > expected else len(values)
        raise DataError(f"{path}: {expected} bytes expected after the header, {size} found; {FETCH}")

    return values.reshape(sizes)
