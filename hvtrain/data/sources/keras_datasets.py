"""MNIST, Fashion-MNIST and CIFAR-10, from the user's files or from Keras's cache and download.

Keras downloads straight to the final file name, so another rank could read an incomplete file. A
lock file in the cache makes ranks take turns: those of one host, and those of several hosts if
their shared home folder supports locks.

CIFAR-10's binary version, which users can provide, needs no unpickling. Keras's copy is pickled, but
Keras checks the archive's SHA-256 first.
"""

import fcntl
import gzip
import math
import os
import socket
import struct
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

from hvtrain.data.manifest import user_path
from hvtrain.data.source import ImageShape
from hvtrain.data.sources.arrays import ArraySource
from hvtrain.data.sources.memory import Elements
from hvtrain.errors import DataError, first_line
from hvtrain.system.console import within

# Timeout for an answer from the download's host, and for each read of the download.
PROBE_SECONDS = 5
FALLBACK = Path("/tmp/.keras")  # Keras's own choice if the home folder is not writable.

IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
IDX_NAMES = (*IDX_FILES["train"], *IDX_FILES["test"])
# Idx files larger than half of this machine's memory are refused.
MAX_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
FETCH_ADVICE = "the file may be damaged: fetch it again"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

_IDX_ADVICE = (
    f"put {', '.join(IDX_NAMES)} (each plain or .gz) into a folder and set dataset.dir=FOLDER"
)

CIFAR_FILES = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["test_batch.bin"],
}
CIFAR_FOLDER = "cifar-10-batches-bin"  # Inside the archive.
CIFAR_IMAGES = 10_000  # In each file.
# One label, then the red, green and blue planes.
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
)  # fmt: skip
CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
)  # fmt: skip


class KerasFiles(NamedTuple):
    """The files of one of the data sets in keras.datasets."""

    name: str
    """The name of the module in keras.datasets."""
    image_shape: ImageShape
    class_names: Sequence[str]
    cached: tuple[str, ...]
    """The files that the module keeps in the cache."""
    host: str
    """The host of the download."""
    advice: str
    """Another way to get the data, for error messages."""
    read: Callable[[Path], Elements]
    """Reads a folder of files that the user or a Debian package provides."""
    names: Sequence[str] = IDX_NAMES
    """The names of the files in such a folder."""

    def fetch(self) -> str:
        """Makes sure that the files are in the cache, and returns a phrase that names the cache.

        Raises:
            DataError: Within seconds, if files are missing and their host does not answer.
        """
        with _locked_cache() as folder:
            present = all((folder / name).exists() for name in self.cached)
        if not present:
            # Outside the lock, so that the ranks of an offline host fail together, not in turn.
            if not is_reachable(self.host):
                raise DataError(
                    f"{self.name} is not on this machine, and {self.host} does not answer; {self.advice}"
                )
            self.load()

        return f"Keras's cache ({folder})"

    def load(self) -> dict:
        """Returns whole arrays by split. Keras downloads them if necessary, and checks their hashes."""
        with _locked_cache() as folder:
            # Keras sets no timeout, so a stalled download would never end.
            timeout = socket.getdefaulttimeout()
            socket.setdefaulttimeout(PROBE_SECONDS)
            try:
                train, test = getattr(keras.datasets, self.name).load_data()
            except Exception as error:  # Downloads, archives, pickles and NumPy raise many types.
                paths = ", ".join(str(folder / name) for name in self.cached)
                raise DataError(
                    f"{self.name}: Keras could not read or fetch it ({error}); remove {paths} "
                    f"and try again, or {self.advice}"
                ) from error
            finally:
                socket.setdefaulttimeout(timeout)

        return {"train": train, "test": test}


@contextmanager
def _locked_cache() -> Iterator[Path]:
    """Holds the lock of the folder where keras.utils.get_file keeps data sets; yields the folder.

    It is in KERAS_HOME or ~/.keras, or in /tmp/.keras if that is not writable.

    Raises:
        DataError: If /tmp/.keras belongs to another user, or is a link.
    """
    home = user_path(os.environ.get("KERAS_HOME") or "~/.keras")
    if not os.access(home, os.W_OK):
        home = FALLBACK
        # Anyone can create that folder, with links to this user's files in it.
        if os.path.lexists(home) and (home.is_symlink() or home.stat().st_uid != os.geteuid()):
            raise DataError(
                f"{home} belongs to another user or is a link; set KERAS_HOME to a writable folder of your own"
            )

    folder = home / "datasets"
    folder.mkdir(parents=True, exist_ok=True)
    # O_NOFOLLOW: in a folder that others can write to, the name may be a link to one of this user's
    # files.
    path = folder / ".hvtrain.lock"
    flags = os.O_CREAT | os.O_NOFOLLOW
    try:
        lock = os.open(path, os.O_RDWR | flags, 0o644)
    except PermissionError:
        # The lock file belongs to another user. Only NFS needs write access to lock a file.
        lock = os.open(path, os.O_RDONLY | flags, 0o644)
    # The lock belongs to the open file, so it is released if this process dies.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)


def is_reachable(host: str) -> bool:
    """True if https://host answers within PROBE_SECONDS, directly or through a proxy."""

    def probe():
        request = urllib.request.Request(f"https://{host}/", method="HEAD")
        with suppress(urllib.request.HTTPError):  # An error status is an answer too.
            urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
        return True

    # In a thread, since the timeout does not cover a name lookup that hangs.
    return within(PROBE_SECONDS + 1, probe, False)


def _read_idx_folder(folder: Path) -> Elements:
    """Reads images uint8 [n, 28, 28] and labels [n] of both splits."""
    arrays = {}
    for split, names in IDX_FILES.items():
        images_path, labels_path = (_plain_or_gz(folder, name) for name in names)
        images = read_idx(images_path, 3)
        labels = read_idx(labels_path, 1)
        if len(images) != len(labels):
            raise DataError(
                f"{images_path} holds {len(images)} images but {labels_path} holds {len(labels)} "
                "labels; the two files do not belong together: fetch both again"
            )

        arrays[split] = images, labels

    return arrays


def _plain_or_gz(folder: Path, name: str) -> Path:
    """Returns the path of the plain file or, without one, of the .gz file, which may not exist."""
    path = folder / name
    return path if path.is_file() else folder / f"{name}.gz"


def read_idx(path: Path, num_dims: int) -> np.ndarray:
    """Reads the array of unsigned bytes in an idx file.

    Format: two zero bytes, the type, the number of dimensions, the sizes as big-endian uint32, and
    the values (http://yann.lecun.com/exdb/mnist/).

    Args:
        path: The file, plain or .gz.
        num_dims: Number of dimensions that the array must have.

    Raises:
        DataError: If the file is damaged, of another format, or larger than half of this machine's memory.
    """
    magic = bytes([0, 0, 8, num_dims])  # 8 is the code for unsigned bytes.
    try:
        open_file = gzip.open if path.suffix == ".gz" else Path.open
        with open_file(path, "rb") as file:
            header = file.read(4 + 4 * num_dims)
            if header[:4] != magic:
                raise DataError(
                    f"{path}: starts with {header[:4].hex() or 'nothing'}, not {magic.hex()}; an idx file of "
                    f"bytes with {num_dims} dimension(s) is needed"
                )

            sizes = struct.unpack(f">{num_dims}I", header[4:])
            expected = math.prod(sizes)
            # Checked first, since a header may claim any size, and a small .gz may hold gigabytes.
            if expected > MAX_BYTES:
                raise DataError(
                    f"{path}: claims {expected:,} bytes, more than half of this machine's memory; {FETCH_ADVICE}"
                )
            # One more byte shows whether the file is too long.
            values = np.frombuffer(file.read(expected + 1), np.uint8)
    except (OSError, EOFError, struct.error, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({first_line(error)}); {FETCH_ADVICE}") from error

    if len(values) != expected:
        # "At least", since the file is read only up to one byte more than expected.
        raise DataError(
            f"{path}: {expected} bytes expected after the header, at least {len(values)} found; {FETCH_ADVICE}"
        )

    return values.reshape(sizes)


def _read_cifar_folder(folder: Path) -> Elements:
    """Reads images uint8 [n, 32, 32, 3] and labels [n] of both splits from the binary version's files."""
    file_bytes = CIFAR_IMAGES * CIFAR_RECORD_BYTES
    arrays = {}
    for split, names in CIFAR_FILES.items():
        for name in names:
            # Checked file by file, to name the one that is truncated.
            size = (folder / name).stat().st_size
            if size != file_bytes:
                raise DataError(
                    f"{folder / name}: {file_bytes} bytes expected, {size} found; fetch the file again"
                )

        records = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names])
        records = records.reshape(-1, CIFAR_RECORD_BYTES)
        # From planes to channels last, as models take them.
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[split] = images, records[:, 0]

    return arrays


MNIST = KerasFiles(
    name="mnist",
    image_shape=(28, 28, 1),
    class_names=tuple("0123456789"),
    cached=("mnist.npz",),
    host="storage.googleapis.com",
    advice=_IDX_ADVICE,
    read=_read_idx_folder,
)
FASHION_MNIST = MNIST._replace(
    name="fashion_mnist",
    class_names=FASHION_CLASSES,
    cached=tuple(f"fashion-mnist/{name}.gz" for name in IDX_NAMES),
    advice=f"{_IDX_ADVICE}, or install the Debian package dataset-fashion-mnist",
)
CIFAR10 = KerasFiles(
    name="cifar10",
    image_shape=(32, 32, 3),
    class_names=CIFAR_CLASSES,
    cached=("cifar-10-batches-py-target_archive",),
    host="www.cs.toronto.edu",
    advice="unpack the binary version (cifar-10-binary.tar.gz: data_batch_1.bin ... data_batch_5.bin, "
    "test_batch.bin) into a folder and set dataset.dir=FOLDER",
    read=_read_cifar_folder,
    names=[name for names in CIFAR_FILES.values() for name in names],
)


def _source(
    files: KerasFiles,
    /,
    dir: str | None = None,
    num_validation: int = 5000,
    standardize: str = "per_pixel",
    shift_pixels: int = 0,
    flip: bool = False,
) -> ArraySource:
    """Makes a source of images in 10 classes.

    Args:
        dir: The folder with the files or, for CIFAR-10, with the folder cifar-10-batches-bin; None: the
            first available of the Debian package (for Fashion-MNIST), Keras's cache, and Keras's
            download.
        num_validation, standardize, shift_pixels, flip: See ArraySource.

    Raises:
        DataError: If files are missing, or the download's host does not answer.
    """
    load: Callable[[], Elements]
    if dir is not None:
        folder = user_path(dir)
        if (folder / CIFAR_FOLDER).is_dir():
            folder /= CIFAR_FOLDER
        missing = [name for name in files.names if not _plain_or_gz(folder, name).is_file()]
        if missing:
            raise DataError(f"{files.name}: {folder} lacks {', '.join(missing)}; {files.advice}")
        load = partial(files.read, folder)
        origin = f"dataset.dir={folder}"
    # The files of the Debian package are named like MNIST's, so only Fashion-MNIST looks there.
    elif files is FASHION_MNIST and DEBIAN_FOLDER.is_dir():
        load = partial(files.read, DEBIAN_FOLDER)
        origin = f"Debian package dataset-fashion-mnist ({DEBIAN_FOLDER})"
    else:
        load = files.load
        origin = files.fetch()
    return ArraySource(
        files.name,
        load,
        files.image_shape,
        num_classes=10,
        origin=origin,
        standardize=standardize,
        num_validation=num_validation,
        shift_pixels=shift_pixels,
        flip=flip,
        class_names=files.class_names,
    )


mnist = partial(_source, MNIST)
fashion_mnist = partial(_source, FASHION_MNIST)
cifar10 = partial(_source, CIFAR10, standardize="per_channel", shift_pixels=4, flip=True)
