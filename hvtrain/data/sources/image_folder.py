"""Image files in DIR/train/CLASS/, DIR/validation/CLASS/, DIR/test/CLASS/: one folder per class."""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import IndexedSource, Read, finish
from hvtrain.data.pipeline.transform import Transform, decode, decode_files
from hvtrain.data.source import Unreadable
from hvtrain.data.sources.file_source import Example, FileSource, decode_whole
from hvtrain.data.sources.memory import SPLIT_SEED
from hvtrain.errors import ConfigError, DataError

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp")
CACHE_BATCH = 32  # Images that are decoded at a time, when a shard is cached.

Files = list[tuple[str, int]]
"""Paths and labels."""


class ImageFolder(FileSource, IndexedSource):
    """Images in one folder per class. Pixels are scaled to 0 ... 1.

    Class names are the sorted folder names, the same in every split.

    Example:
        python -m hvtrain dataset=image_folder dataset.dir=flowers dataset.validation_fraction=0.1

    Args:
        dir: holds the folders train, validation and test; the last two are optional.
        image_shape: every image is resized to [height, width], and read with that many channels.
        validation_fraction, test_fraction: taken out of train if there is no such folder, class by
            class and the same in every run.
        shift_pixels, flip: augmentation of training images; see Transform.
        cache: keeps this rank's decoded shard in memory (height * width * channels bytes an image)
            instead of reading files again.

    Raises:
        ConfigError: if the fractions leave nothing to train on.
        DataError: if a folder holds no classes, a class no images, or splits differ in their
            classes.
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
        transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)
        super().__init__(dir, image_shape, transform)
        self.class_names: list[str] = class_folders(self.folder / "train")
        self.num_classes = len(self.class_names)
        self._cache = cache
        # Pixels and labels by split, rank and number of ranks.
        self._cached: dict[tuple[str, int, int], tuple[tf.Tensor, tf.Tensor]] = {}

        fractions = {"validation": validation_fraction, "test": test_fraction}
        if min(fractions.values()) < 0 or sum(fractions.values()) >= 1:
            raise ConfigError(
                f"dataset.validation_fraction={validation_fraction} and "
                f"dataset.test_fraction={test_fraction}: each must be 0 or more, their sum less "
                "than 1"
            )

        self._files = self._list_splits(fractions)

    def _list_splits(self, fractions: dict[str, float]) -> dict[str, Files]:
        """Lists each split's own folder, or takes a fraction of train in its place."""
        train_folder = self.folder / "train"
        train = list_files(train_folder, self.class_names)
        files: dict[str, Files] = {}

        for split, fraction in fractions.items():
            folder = self.folder / split
            if folder.is_dir():
                differing = sorted(set(class_folders(folder)) ^ set(self.class_names))
                if differing:
                    raise DataError(
                        f"{folder} and {train_folder} differ in their classes: "
                        f"{', '.join(differing[:5])}; every split needs the same class folders"
                    )

                files[split] = list_files(folder, self.class_names)
            elif fraction:
                train, files[split] = split_off(train, fraction)

        return {**files, "train": train}

    def num_examples(self, split: str) -> int:
        return len(self._files.get(split, []))

    def paths(self, split: str) -> list[str]:
        return [path for path, _ in self._files.get(split, [])]

    def reader(self, split: str, topology: Topology) -> Read:
        if not self._cache:
            return self.sure_reader(split, topology)

        key = (split, topology.rank, topology.size)
        if key not in self._cached:
            self._cached[key] = self._decode_all(split, topology)
        pixels, labels = self._cached[key]

        def read(indices):
            return tf.gather(pixels, indices), tf.gather(labels, indices)

        return read

    def sure_reader(self, split: str, topology: Topology) -> Read:
        paths, labels = self._shard(split, topology)

        def read(indices):
            images = decode_files(tf.gather(paths, indices), self.image_shape)
            return images, tf.gather(labels, indices)

        return read

    def locate(self, split: str, topology: Topology, example: Example, problem: str) -> Unreadable:
        files = self._files[split]
        number = example[0][0]  # Within the rank's shard.
        path, _ = files[topology.share(len(files))[number]]
        return Unreadable(path, problem.removeprefix(f"{path}; "))

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        paths, _ = self._shard(split, topology)
        channels = self.image_shape[2]
        return [decode_whole(tf.io.read_file(path), channels) for path in paths[:number]]

    def _shard(self, split: str, topology: Topology) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this rank's paths and labels."""
        files = self._files.get(split, [])
        local = [files[index] for index in topology.share(len(files))]
        with tf.device("CPU:0"):
            paths = tf.constant([path for path, _ in local], tf.string)
            labels = tf.constant([label for _, label in local], tf.int32)

        return paths, labels

    def _decode_all(self, split: str, topology: Topology) -> tuple[tf.Tensor, tf.Tensor]:
        """Decodes this rank's images, uint8 [n, h, w, c], and returns them with their labels."""
        paths, labels = self._shard(split, topology)
        pixels = np.zeros([len(paths), *self.image_shape], np.uint8)
        # -1 stays where an image cannot be read: then it is read again, and named, when it is used.
        readable_labels = np.full([len(paths)], -1, np.int32)

        def read(number, path):
            return number, decode(tf.io.read_file(path), self.image_shape)

        # With their numbers, since ignore_errors() leaves gaps.
        numbered = tf.data.Dataset.from_tensor_slices(paths).enumerate()
        images = numbered.map(read, num_parallel_calls=tf.data.AUTOTUNE).ignore_errors()
        batches = finish(images.batch(CACHE_BATCH), topology)
        for numbers, batch in batches.as_numpy_iterator():
            pixels[numbers] = batch
            readable_labels[numbers] = labels.numpy()[numbers]

        with tf.device("CPU:0"):
            return tf.constant(pixels), tf.constant(readable_labels)


def class_folders(folder: Path) -> list[str]:
    """Returns the sorted names of the class folders.

    Raises:
        DataError: if there are none.
    """
    names = []
    if folder.is_dir():
        names = sorted(path.name for path in _visible(folder) if path.is_dir())
    if not names:
        raise DataError(f"{folder} holds no class folders; files are needed as {folder}/CLASS/IMAGE.jpg")
    return names


def list_files(folder: Path, class_names: list[str]) -> Files:
    """Returns all images of the classes, sorted by class and name.

    Logs which other files there are, since a data set in an unknown format would be silently
    smaller.

    Raises:
        DataError: if a class has no images.
    """
    files: Files = []
    others: Counter[str] = Counter()
    for label, class_name in enumerate(class_names):
        paths = []
        for path in _visible(folder / class_name):
            if path.suffix.lower() in SUFFIXES:
                paths.append(str(path))
            else:
                kind = path.suffix or path.name
                others["folder" if path.is_dir() else kind] += 1

        if not paths:
            raise DataError(f"{folder / class_name} holds no images ({', '.join(SUFFIXES)}); add some or remove it")
        files += [(path, label) for path in sorted(paths)]

    if others:
        kinds = ", ".join(f"{number} x {kind}" for kind, number in others.most_common(5))
        log.warning(
            "%s: left out what is not %s: %s",
            folder,
            ", ".join(SUFFIXES),
            kinds,
        )

    return files


def _visible(folder: Path) -> list[Path]:
    """Returns the entries of a folder without hidden ones."""
    # Such as .ipynb_checkpoints, and the ._NAME that macOS writes beside each file.
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def split_off(files: Files, fraction: float) -> tuple[Files, Files]:
    """Takes the same fraction, rounded, out of each class, chosen by a fixed seed.

    Returns:
        The rest, and the part that was taken out, both in the order of files.
    """
    chosen: set[tuple[str, int]] = set()
    for label, group in groupby(files, key=itemgetter(1)):
        members = list(group)
        order = np.random.default_rng([SPLIT_SEED, label]).permutation(len(members))
        chosen.update(members[index] for index in order[: round(fraction * len(members))])

    rest = [file for file in files if file not in chosen]
    part = [file for file in files if file in chosen]
    return rest, part
