"""Image files in DIR/train/CLASS/, DIR/validation/CLASS/, DIR/test/CLASS/: one folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvtrain.data.arrays import SPLIT_SEED
from hvtrain.data.decode import check_image_shape, decode, decode_batch
from hvtrain.data.pipeline import IndexedSource, Read, parallel_map
from hvtrain.data.source import reason
from hvtrain.data.transform import Transform
from hvtrain.errors import ConfigError, DataError
from hvtrain.topology import Topology

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp")
Files = tuple[list[str], list[int]]  # Paths and labels.


class ImageFolder(IndexedSource):
    """Class names are the sorted folder names, the same in every split; pixels are scaled to 0 ... 1.

    image_shape: every image is resized to [height, width], and read with that many channels.
    validation_fraction, test_fraction: taken out of train, class by class and the same in every run,
    where there is no such folder.
    cache: keep this rank's decoded shard in memory (h x w x c bytes an image) instead of reading files anew.
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
        folder = Path(dir).expanduser()
        self.origin = str(folder)
        self.image_shape = check_image_shape(image_shape)
        self.class_names = class_folders(folder / "train")
        self.num_classes = len(self.class_names)
        self.transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)
        self._cache = cache
        self._cached: dict[tuple[str, int, int], tf.Tensor] = {}  # Pixels by split, rank, size.
        self._opened: dict[str, None] = {}  # Files that streams of this process read, for explain().
        self._files = self._find_files(folder, {"validation": validation_fraction, "test": test_fraction})

    def _find_files(self, folder: Path, fractions: dict[str, float]) -> dict[str, Files]:
        if min(fractions.values()) < 0 or sum(fractions.values()) >= 1:
            raise ConfigError(
                f"dataset.validation_fraction={fractions['validation']} and "
                f"dataset.test_fraction={fractions['test']}: each must be 0 or more, their sum less than 1"
            )
        train = list_files(folder / "train", self.class_names)
        files = {}
        for split, fraction in fractions.items():
            if (folder / split).is_dir():
                found = class_folders(folder / split)
                if found != self.class_names:
                    differing = sorted(set(found) ^ set(self.class_names))
                    raise DataError(
                        f"{folder / split} and {folder / 'train'} differ in their classes: "
                        f"{', '.join(differing[:5])}; every split needs the same class folders"
                    )
                files[split] = list_files(folder / split, self.class_names)
            elif fraction:
                train, files[split] = split_off(train, fraction)
        return {**files, "train": train}

    def num_examples(self, split: str) -> int:
        return len(self._files.get(split, ([], []))[0])

    def reader(self, split: str, topology: Topology) -> Read:
        paths, labels = self._files.get(split, ([], []))
        share, shape = topology.share(len(paths)), self.image_shape
        shard = [paths[index] for index in share]
        self._opened.update(dict.fromkeys(shard))
        with tf.device("CPU:0"):
            path_tensor = tf.constant(shard, tf.string)
            label_tensor = tf.constant([labels[index] for index in share], tf.int32)

        if self._cache:
            key = (split, topology.rank, topology.size)
            if key not in self._cached:
                self._cached[key] = self._decode_all(path_tensor)
            pixels = self._cached[key]
            return lambda indices: (tf.gather(pixels, indices), tf.gather(label_tensor, indices))

        def read(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            encoded = tf.map_fn(tf.io.read_file, tf.gather(path_tensor, indices))
            return decode_batch(encoded, shape), tf.gather(label_tensor, indices)

        return read

    def _decode_all(self, paths: tf.Tensor) -> tf.Tensor:
        files = tf.data.Dataset.from_tensor_slices(paths)
        pixels = np.zeros([len(paths), *self.image_shape], np.uint8)
        images = parallel_map(files, lambda path: decode(tf.io.read_file(path), self.image_shape))
        try:
            for index, image in enumerate(images.as_numpy_iterator()):
                pixels[index] = image
        except tf.errors.OpError as error:
            raise self.explain(error) from error
        with tf.device("CPU:0"):
            return tf.constant(pixels)

    def explain(self, error: Exception) -> Exception:
        """Decodes the files that were opened, one by one, until one fails as the pipeline did."""
        if "DecodeImage" not in str(error):
            return error
        for path in self._opened:
            try:
                decode(tf.io.read_file(path), self.image_shape)
            except tf.errors.OpError as cause:
                return DataError(f"{path} cannot be decoded ({reason(cause)}); mend or remove the file")
        return error


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the class folders."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    if not names:
        raise DataError(f"{folder} holds no class folders; files are needed as {folder}/CLASS/IMAGE.jpg")
    return names


def list_files(folder: Path, class_names: list[str]) -> Files:
    """All images below folder, sorted by class and name. An empty class is an error."""
    paths: list[str] = []
    labels: list[int] = []
    for label, class_name in enumerate(class_names):
        found = sorted(str(path) for path in (folder / class_name).iterdir() if path.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(f"{folder / class_name} holds no images ({', '.join(SUFFIXES)}); add some or remove it")
        paths += found
        labels += [label] * len(found)
    return paths, labels


def split_off(files: Files, fraction: float) -> tuple[Files, Files]:
    """(rest, part): from each class the same fraction, rounded, chosen by a fixed seed."""
    paths, labels = files
    taken = np.zeros(len(paths), bool)
    label_array = np.asarray(labels)
    for label in np.unique(label_array):
        members = np.flatnonzero(label_array == label)
        order = np.random.default_rng([SPLIT_SEED, int(label)]).permutation(members)
        taken[order[: round(fraction * len(members))]] = True

    def chosen(mask: np.ndarray) -> Files:
        rows = np.flatnonzero(mask)
        return [paths[row] for row in rows], [labels[row] for row in rows]

    return chosen(~taken), chosen(taken)
