"""CIFAR-10: 60,000 color images of 32x32, from a folder with the binary version, or Keras's cache or download.

The binary version needs no unpickling. Keras's copy is pickled, and Keras checks the archive's SHA-256 first.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from hvtrain.data.sources.arrays import Arrays, ArraySource
from hvtrain.data.sources.keras_cache import KerasFiles
from hvtrain.errors import DataError

IMAGES_PER_FILE = 10_000
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD_BYTES = 1 + 3 * 32 * 32  # One label, then the red, green and blue planes.
FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
KERAS_FILES = KerasFiles(
    "cifar10",
    ("cifar-10-batches-py-target_archive",),
    "www.cs.toronto.edu",
    "unpack the binary version (cifar-10-binary.tar.gz: data_batch_1.bin ... data_batch_5.bin, "
    "test_batch.bin) into a folder and set dataset.dir=FOLDER",
)


def cifar10(
    dir: str | None = None,
    num_validation: int = 5000,
    standardize: str = "per_channel",
    shift_pixels: int = 4,
    flip: bool = True,
) -> ArraySource:
    """`dir` or its folder cifar-10-batches-bin holds the six .bin files."""
    load: Callable[[], Arrays]
    if dir is None:
        origin, load = KERAS_FILES.fetch(), KERAS_FILES.load
    else:
        origin, load = f"dataset.dir={dir}", partial(_read_folder, _find(Path(dir).expanduser()))
    changes = num_validation, shift_pixels, flip
    return ArraySource("cifar10", load, (32, 32, 3), 10, origin, standardize, 255.0, *changes, CLASS_NAMES)


def _find(folder: Path) -> Path:
    names = [name for group in FILES.values() for name in group]
    for place in (folder, folder / "cifar-10-batches-bin"):
        if all((place / name).is_file() for name in names):
            return place
    missing = [name for name in names if not (folder / name).is_file()]
    raise DataError(f"cifar10: {folder} lacks {', '.join(missing)}; {KERAS_FILES.advice}")


def _read_folder(folder: Path) -> Arrays:
    return {split: read_files([folder / name for name in names]) for split, names in FILES.items()}


def read_files(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, 32, 32, 3] and labels [n] of the binary version's files."""
    expected = IMAGES_PER_FILE * RECORD_BYTES
    for path in paths:
        found = path.stat().st_size
        if found != expected:
            raise DataError(f"{path}: {expected} bytes expected, {found} found; fetch the file again")
    records = np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, RECORD_BYTES)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, records[:, 0]
