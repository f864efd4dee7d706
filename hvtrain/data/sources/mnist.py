"""MNIST and Fashion-MNIST: 70,000 images of 28x28 in four idx files, or from Keras's cache or download."""

from collections.abc import Callable, Sequence
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
    origin, load = _find(files, dir)
    return ArraySource(
        files.name,
        load,
        (28, 28, 1),
        10,
        origin=origin,
        standardize=standardize,
        num_validation=num_validation,
        shift_pixels=shift_pixels,
        flip=flip,
        class_names=class_names,
    )


mnist = partial(_idx_source, MNIST_FILES, tuple("0123456789"))
fashion_mnist = partial(_idx_source, FASHION_FILES, FASHION_CLASSES)


def _find(files: KerasFiles, dir: str | None) -> tuple[str, Callable[[], Arrays]]:
    """Origin of the data, for the run's header, and the function that reads them. Refuses a `dir` that lacks a file."""
    folder, origin = DEBIAN_FOLDER, f"Debian package dataset-fashion-mnist ({DEBIAN_FOLDER})"
    if dir is not None:
        folder, origin = Path(dir).expanduser(), f"dataset.dir={dir}"
        missing = [name for name in FILE_NAMES if not find_idx(folder, name)]
        if missing:
            raise DataError(f"{files.name}: {folder} lacks {', '.join(missing)}; {files.advice}")
    elif files is MNIST_FILES or not all(find_idx(folder, name) for name in FILE_NAMES):
        return files.fetch(), files.load
    return origin, partial(_read_folder, folder)


def _read_folder(folder: Path) -> Arrays:
    # A file that went away since it was found is named when it is read.
    return {
        split: read_pair(*(find_idx(folder, name) or folder / name for name in names)) for split, names in FILES.items()
    }
