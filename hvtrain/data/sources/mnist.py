"""MNIST and Fashion-MNIST: 70,000 images of 28x28 in four idx files, or from Keras's cache or download."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from hvtrain.data.formats.idx import find_idx, read_pair
from hvtrain.data.sources.arrays import Arrays, ArraySource
from hvtrain.data.sources.keras_cache import KerasFiles
from hvtrain.errors import DataError

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FILE_NAMES = [name for pair in FILES.values() for name in pair]
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
)  # fmt: skip

_ADVICE = f"put {', '.join(FILE_NAMES)} (each plain or .gz) into a folder and give dataset.dir=FOLDER"
MNIST_FILES = KerasFiles("mnist", ("mnist.npz",), "storage.googleapis.com", _ADVICE)
FASHION_FILES = KerasFiles(
    "fashion_mnist",
    tuple(f"fashion-mnist/{name}.gz" for name in FILE_NAMES),
    "storage.googleapis.com",
    f"{_ADVICE}, or install the Debian package dataset-fashion-mnist",
)


def mnist(
    dir: str | None = None,
    num_validation: int = 5000,
    standardize: str = "per_pixel",
    shift_pixels: int = 0,
    flip: bool = False,
) -> ArraySource:
    """Handwritten digits. Without `dir`: Keras's cache, then Keras's download."""
    origin, load = _find(MNIST_FILES, dir, None)
    return ArraySource(
        "mnist",
        load,
        (28, 28, 1),
        10,
        origin=origin,
        standardize=standardize,
        num_validation=num_validation,
        shift_pixels=shift_pixels,
        flip=flip,
        class_names=[str(digit) for digit in range(10)],
    )


def fashion_mnist(
    dir: str | None = None,
    num_validation: int = 5000,
    standardize: str = "per_pixel",
    shift_pixels: int = 0,
    flip: bool = False,
) -> ArraySource:
    """Articles of clothing. Without `dir`: the Debian package, then Keras's cache, then its download."""
    origin, load = _find(FASHION_FILES, dir, DEBIAN_FOLDER)
    return ArraySource(
        "fashion_mnist",
        load,
        (28, 28, 1),
        10,
        origin=origin,
        standardize=standardize,
        num_validation=num_validation,
        shift_pixels=shift_pixels,
        flip=flip,
        class_names=FASHION_CLASSES,
    )


def _find(files: KerasFiles, dir: str | None, package_folder: Path | None) -> tuple[str, Callable[[], Arrays]]:
    """Where the data lies, in words, and the function that reads it. A `dir` that lacks a file is an error."""
    folder, origin = package_folder, f"Debian package dataset-fashion-mnist ({package_folder})"
    if dir is not None:
        folder, origin = Path(dir).expanduser(), f"dataset.dir={dir}"
        missing = [name for name in FILE_NAMES if not find_idx(folder, name)]
        if missing:
            raise DataError(f"{files.name}: {folder} lacks {', '.join(missing)}; {files.advice}")

    if folder is not None and all(find_idx(folder, name) for name in FILE_NAMES):
        return origin, partial(_read_folder, folder)
    return files.fetch(), files.load


def _read_folder(folder: Path) -> Arrays:
    arrays = {}
    for split, names in FILES.items():
        images_path, labels_path = (find_idx(folder, name) for name in names)
        if images_path is None or labels_path is None:
            raise DataError(f"{folder}: the {split} files went away since they were found")
        arrays[split] = read_pair(images_path, labels_path)
    return arrays
