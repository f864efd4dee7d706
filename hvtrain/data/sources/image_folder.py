"""Image files in DIR/train/CLASS/, DIR/validation/CLASS/, DIR/test/CLASS/: one folder per class."""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import IndexedSource, Read, finish
from hvtrain.data.pipeline.transform import Transform, decode, decode_files
from hvtrain.data.source import Unreadable
from hvtrain.data.sources.file_source import Example, FileSource
from hvtrain.data.sources.memory import SPLIT_SEED
from hvtrain.errors import ConfigError, DataError

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp")
CACHE_BATCH = 32
Files = list[tuple[str, int]]  # Paths and labels.


class ImageFolder(FileSource, IndexedSource):
    """Class names are the sorted folder names, the same in every split; pixels are scaled to 0 ... 1.

    image_shape: every image is resized to [height, width], and read with that many channels.
    validation_fraction, test_fraction: taken out of train if there is no such folder, class by class and the same
        in every run.
    cache: keeps this rank's decoded shard in memory (h x w x c bytes an image) instead of reading files again.
    """

    name = "image_folder"

    def __init__(
        self,
        dir: str,
        image_shape: Sequence[int] = (224, 224, 3),
        validation_fraction: float = 0.0,
        test_fraction: float = 0.0,
        shift_pixels: int = 0,
        flip: bool = True,
        cache: bool = False,
    ) -> None:
        super().__init__(dir, image_shape, Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip))
        self.class_names: list[str] = class_folders(self.folder / "train")
        self.num_classes = len(self.class_names)
        self._cache = cache
        self._cached: dict[tuple[str, int, int], tuple[tf.Tensor, tf.Tensor]] = {}  # By split, rank, size.
        fractions = {"validation": validation_fraction, "test": test_fraction}
        if min(fractions.values()) < 0 or sum(fractions.values()) >= 1:
            given = f"dataset.validation_fraction={validation_fraction} and dataset.test_fraction={test_fraction}"
            raise ConfigError(f"{given}: each must be 0 or more, their sum less than 1")
        train = list_files(self.folder / "train", self.class_names)
        self._files: dict[str, Files] = {}
        for split, fraction in fractions.items():
            folder = self.folder / split
            if folder.is_dir():
                if differing := sorted(set(class_folders(folder)) ^ set(self.class_names)):
                    found = f"{folder} and {self.folder / 'train'} differ in their classes: {', '.join(differing[:5])}"
                    raise DataError(f"{found}; every split needs the same class folders")
                self._files[split] = list_files(folder, self.class_names)
            elif fraction:
                train, self._files[split] = split_off(train, fraction)
        self._files["train"] = train

    def num_examples(self, split: str) -> int:
        return len(self._files.get(split, []))

    def paths(self, split: str) -> list[str]:
        return [path for path, _ in self._files.get(split, [])]

    def reader(self, split: str, topology: Topology) -> Read:
        if not self._cache:
            return self.sure_reader(split, topology)
        key = (split, topology.rank, topology.size)
        if key not in self._cached:
            self._cached[key] = self._decode_all(*self._shard(split, topology), topology)
        pixels, labels = self._cached[key]
        return lambda indices: (tf.gather(pixels, indices), tf.gather(labels, indices))

    def sure_reader(self, split: str, topology: Topology) -> Read:
        paths, labels = self._shard(split, topology)

        def read(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return decode_files(tf.gather(paths, indices), self.image_shape), tf.gather(labels, indices)

        return read

    def locate(self, split: str, topology: Topology, example: Example, why: str) -> Unreadable:
        files = self._files[split]
        path, _ = files[topology.share(len(files))[example[0][0]]]
        return Unreadable(path, why.removeprefix(f"{path}; "))

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        paths, _ = self._shard(split, topology)
        read = partial(tf.io.decode_image, channels=self.image_shape[-1], expand_animations=False)
        return [read(tf.io.read_file(path)).numpy() for path in paths[:number]]

    def _shard(self, split: str, topology: Topology) -> tuple[tf.Tensor, tf.Tensor]:
        """This rank's paths and labels."""
        files = self._files.get(split, [])
        mine = [files[index] for index in topology.share(len(files))]
        with tf.device("CPU:0"):
            return tf.constant([path for path, _ in mine], tf.string), tf.constant([at for _, at in mine], tf.int32)

    def _decode_all(self, paths: tf.Tensor, labels: tf.Tensor, topology: Topology) -> tuple[tf.Tensor, tf.Tensor]:
        """All images, and their labels: -1 for one that cannot be read, so that it is read again, and named, later."""
        pixels = np.zeros([len(paths), *self.image_shape], np.uint8)
        known = np.full([len(paths)], -1, np.int32)

        def read(number: tf.Tensor, path: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return number, decode(tf.io.read_file(path), self.image_shape)

        numbered = tf.data.Dataset.from_tensor_slices(paths).enumerate()
        images = numbered.map(read, num_parallel_calls=tf.data.AUTOTUNE).ignore_errors()
        for numbers, batch in finish(images.batch(CACHE_BATCH), topology).as_numpy_iterator():
            pixels[numbers], known[numbers] = batch, labels.numpy()[numbers]
        with tf.device("CPU:0"):
            return tf.constant(pixels), tf.constant(known)


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the class folders, without hidden ones."""
    names = sorted(path.name for path in _visible(folder) if path.is_dir()) if folder.is_dir() else []
    if not names:
        raise DataError(f"{folder} holds no class folders; files are needed as {folder}/CLASS/IMAGE.jpg")
    return names


def list_files(folder: Path, class_names: list[str]) -> Files:
    """All images below folder, sorted by class and name. An empty class is an error; other files are reported."""
    files: Files = []
    others: Counter[str] = Counter()
    for label, class_name in enumerate(class_names):
        found = []
        for path in _visible(folder / class_name):
            if path.suffix.lower() in SUFFIXES:
                found.append(str(path))
            else:
                others["folder" if path.is_dir() else path.suffix or path.name] += 1
        if not found:
            raise DataError(f"{folder / class_name} holds no images ({', '.join(SUFFIXES)}); add some or remove it")
        files += [(path, label) for path in sorted(found)]
    if others:
        kinds = ", ".join(f"{number} x {kind}" for kind, number in others.most_common(5))
        log.warning("%s: left out what is not %s: %s", folder, ", ".join(SUFFIXES), kinds)
    return files


def _visible(folder: Path) -> list[Path]:
    """The entries of a folder without hidden ones, such as .ipynb_checkpoints or macOS's ._NAME."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def split_off(files: Files, fraction: float) -> tuple[Files, Files]:
    """(rest, part): from each class the same fraction, rounded, chosen by a fixed seed."""
    taken: set[tuple[str, int]] = set()
    for label, group in groupby(files, key=itemgetter(1)):
        members = list(group)
        order = np.random.default_rng([SPLIT_SEED, label]).permutation(len(members))
        taken.update(members[index] for index in order[: round(fraction * len(members))])
    return [file for file in files if file not in taken], [file for file in files if file in taken]
