"""CIFAR-10: 60,000 color images of 32x32 pixels, from the binary version's files or through Keras.

The binary version needs no unpickling. Keras's copy is pickled, and Keras checks the archive's
SHA-256 first.
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
# One label, then the red, green and blue planes.
RECORD_BYTES = 1 + 3 * 32 * 32
# The folder inside the archive.
ARCHIVE_FOLDER = "cifar-10-batches-bin"
FILES = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["test_batch.bin"],
}
CLASS_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
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
    """Makes a source of 32x32 images in 10 classes.

    Args:
        dir: the folder with the six .bin files, or the one that holds cifar-10-batches-bin; None:
            Keras's cache, or its download.
        num_validation, standardize, shift_pixels, flip: see ArraySource.

    Raises:
        DataError: if files are missing, or the download's host does not answer.
    """
    load: Callable[[], Arrays]
    if dir is None:
        origin = KERAS_FILES.fetch()
        load = KERAS_FILES.load
    else:
        origin = f"dataset.dir={dir}"
        load = partial(_read_folder, _complete_folder(dir))

    return ArraySource(
        "cifar10",
        load,
        image_shape=(32, 32, 3),
        num_classes=10,
        origin=origin,
        standardize=standardize,
        num_validation=num_validation,
        shift_pixels=shift_pixels,
        flip=flip,
        class_names=CLASS_NAMES,
    )


def _complete_folder(dir: str) -> Path:
    """Returns the folder with the files. Raises DataError if one is missing."""
    folder = user_path(dir)
    if (folder / ARCHIVE_FOLDER).is_dir():
        folder /= ARCHIVE_FOLDER
    missing = [name for names in FILES.values() for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"cifar10: {folder} lacks {', '.join(missing)}; {KERAS_FILES.advice}")
    return folder


def _read_folder(folder: Path) -> Arrays:
    """Reads images uint8 [n, 32, 32, 3] and labels [n] from the binary version's files."""
    file_bytes = IMAGES_PER_FILE * RECORD_BYTES
    arrays = {}
    for split, names in FILES.items():
        for name in names:
            # Otherwise nothing would name a file that was cut.
            size = (folder / name).stat().st_size
            if size != file_bytes:
                raise DataError(f"{folder / name}: {file_bytes} bytes expected, {size} found; fetch the file again")

        records = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names])
        records = records.reshape(-1, RECORD_BYTES)
        # From planes to channels last, as models take them.
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[split] = images, records[:, 0]

    return arrays
