"""CIFAR-10: 60,000 color images of 32x32, from a folder with the binary version, or Keras's cache or download.

The binary version needs no unpickling. Keras's copy is pickled, and Keras checks the archive's SHA-256 first.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from hvtrain.data.manifest import user_path
from hvtrain.data.sources.arrays import Arrays, ArraySource
from hvtrain.data.sources.keras_cache import KerasFiles
from hvtrain.errors import DataError

IMAGES_PER_FILE = 10_000
INNER = "cifar-10-batches-bin"  # The folder inside the archive.
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
        folder = user_path(dir)
        folder = folder / INNER if (folder / INNER).is_dir() else folder
        if missing := [name for group in FILES.values() for name in group if not (folder / name).is_file()]:
            raise DataError(f"cifar10: {folder} lacks {', '.join(missing)}; {KERAS_FILES.advice}")
        origin, load = f"dataset.dir={dir}", partial(_read_folder, folder)
    changes = num_validation, shift_pixels, flip
    return ArraySource("cifar10", load, (32, 32, 3), 10, origin, standardize, 255.0, *changes, CLASS_NAMES)


def _read_folder(folder: Path) -> Arrays:
    """Images uint8 [n, 32, 32, 3] and labels [n] of the binary version's files."""
    arrays = {}
    for split, names in FILES.items():
        for name in names:
            expected, found = IMAGES_PER_FILE * RECORD_BYTES, (folder / name).stat().st_size
            if found != expected:
                raise DataError(f"{folder / name}: {expected} bytes expected, {found} found; fetch the file again")
        records = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names]).reshape(-1, RECORD_BYTES)
        arrays[split] = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]
    return arrays
