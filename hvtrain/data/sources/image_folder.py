"""Image files in DIR/train/CLASS/, DIR/validation/CLASS/, DIR/test/CLASS/: one folder per class."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.description import listed
from hvtrain.data.formats.folders import left_out, split_folders, visible, with_labels
from hvtrain.data.formats.image_files import SUFFIXES, describe_images, sample
from hvtrain.data.pipeline.decoding import decode, decode_batch
from hvtrain.data.pipeline.streams import IndexedSource, Read, finish
from hvtrain.data.pipeline.transform import Transform
from hvtrain.data.source import Unreadable
from hvtrain.data.sources.file_source import Example, FileSource
from hvtrain.data.sources.memory import SPLIT_SEED
from hvtrain.errors import ConfigError, DataError

CACHE_BATCH = 32  # Images that are decoded at a time, when a shard is cached.

Files = list[tuple[str, Any]]
"""Paths of images, each with its class or the path of its mask."""


class ListedImages(FileSource, IndexedSource):
    """Images by their paths. A subclass lists them in _files, by split, and reads them."""

    _files: dict[str, Files]
    read_file: Callable[[Any], tf.Tensor] = staticmethod(tf.io.read_file)
    read_files: Callable[[Any], tf.Tensor] = staticmethod(partial(tf.map_fn, tf.io.read_file))

    def num_examples(self, split: str) -> int:
        return len(self._files.get(split, []))

    def shard(self, split: str, topology: Topology) -> tuple[tf.Tensor, list[Any]]:
        """Returns the paths of this rank's images, as a tensor, and their targets."""
        files = self._files.get(split, [])
        local = [files[index] for index in topology.share(len(files))]
        with tf.device("CPU:0"):
            return tf.constant([path for path, _ in local], tf.string), [target for _, target in local]

    def locate(self, split: str, topology: Topology, example: Example, problem: str) -> Unreadable:
        files = self._files[split]
        number = example[0][0]  # Within the rank's shard.
        path, _ = files[topology.share(len(files))[number]]
        return Unreadable(path, problem.removeprefix(f"{path}; "))

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        # Without masks, which are not inputs of the saved model.
        paths, _ = self.shard(split, topology)
        return [self.sizing.whole(self.read_file(path)).numpy() for path in paths[:number]]


class ImageFolder(ListedImages):
    """Images in one folder per class. Pixels are scaled to 0 ... 1.

    Class names are the sorted folder names of the training part. Another part may lack some of them.

    Example:
        python -m hvtrain dataset=image_folder dataset.dir=flowers dataset.validation_fraction=0.1

    Args:
        dir: holds the folders train, validation (or val, valid, dev) and test; the last two are
            optional.
        image_shape: every image becomes [height, width], and is read with that many channels.
        validation_fraction, test_fraction: taken out of train if there is no such folder, class by
            class and the same in every run.
        shift_pixels, flip: augmentation of training images; see Transform.
        cache: keeps this rank's decoded shard in memory (height * width * channels bytes an image)
            instead of reading files again.
        sizing: resize, fit, crop_fraction and exif; see Sizing.
        labels, class_numbers: files with the classes of validation and test, if those folders hold
            images instead of class folders; see with_labels.

    Raises:
        ConfigError: if the fractions leave nothing to train on, or take nothing.
        DataError: if a folder holds no classes, a class no training images, or a split has classes
            of its own.
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
        labels: str | None = None,
        class_numbers: str | None = None,
        **sizing: Any,
    ) -> None:
        transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)
        super().__init__(dir, image_shape, transform, **sizing)
        self._folders = {"train": self.folder / "train", **split_folders(self.folder)}
        self.class_names: list[str] = list(class_folders(self._folders["train"]).values())
        self.num_classes = len(self.class_names)
        self._labels = labels
        self._class_numbers = class_numbers
        self._cache = cache
        if cache:
            self.no_random_crop = "keeps decoded images (dataset.cache=true)"
        # Pixels and labels by split, rank and number of ranks.
        self._cached: dict[tuple[str, int, int], tuple[tf.Tensor, tf.Tensor]] = {}

        fractions = {"validation": validation_fraction, "test": test_fraction}
        if min(fractions.values()) < 0 or sum(fractions.values()) >= 1:
            raise ConfigError(
                f"dataset.validation_fraction={validation_fraction} and "
                f"dataset.test_fraction={test_fraction}: each must be 0 or more, their sum less "
                "than 1"
            )

        # What each split's class folders hold beside images, for the description.
        self._others: dict[str, Counter[str]] = {}
        self._files = self._list_splits(fractions)
        self._look = self._describe_sample()

    def _list_splits(self, fractions: dict[str, float]) -> dict[str, Files]:
        """Lists each split's own folder, or takes a fraction of train in its place."""
        train = self._list_files("train")
        num_images = Counter(label for _, label in train)
        for label, name in enumerate(self.class_names):
            if not num_images[label]:
                folder = self._folders["train"] / name
                raise DataError(f"{folder} holds no images ({', '.join(SUFFIXES)}); add some or remove it")

        files: dict[str, Files] = {}
        for split, fraction in fractions.items():
            if split in self._folders:
                files[split] = self._list_files(split)
            elif fraction:
                train, files[split] = split_off(train, fraction)
                emptied = set(num_images) - {label for _, label in train}
                if not files[split] or emptied:
                    names = [self.class_names[label] for label in sorted(emptied)]
                    effect = f"leaves no training images of {listed(names)}" if emptied else "takes no image"
                    raise ConfigError(
                        f"dataset.{split}_fraction={fraction} {effect}: the classes have "
                        f"{min(num_images.values()):,} to {max(num_images.values()):,} images; change it, or make "
                        f"a folder {split}/"
                    )

        return {**files, "train": train}

    def _list_files(self, split: str) -> Files:
        """Lists all images of a split, sorted by class and name, and counts what else there is."""
        folder = self._folders[split]
        entries = visible(folder)
        # Folders of other splits may write the same name in another Unicode form.
        labels = {normal_form(name): label for label, name in enumerate(self.class_names)}
        if self._labels and split != "train" and not any(path.is_dir() for path in entries):
            images = [path for path in entries if path.suffix.lower() in SUFFIXES]
            return with_labels(images, labels, self._labels, self._class_numbers)

        names = class_folders(folder)
        unknown = sorted(set(names) - set(labels))
        if unknown:
            raise DataError(
                f"{folder} has classes that {self._folders['train']} lacks: {listed(unknown)}; a model can only "
                "predict classes that it has seen, so move them, or rename them as in train"
            )

        others: Counter[str] = Counter()
        files: Files = []
        for name in sorted(names, key=labels.__getitem__):
            for path in visible(folder / names[name]):
                if path.suffix.lower() in SUFFIXES and not path.is_dir():
                    files.append((str(path), labels[name]))
                else:
                    others["folder" if path.is_dir() else path.suffix or path.name] += 1

        self._others[split] = others
        return files

    def _describe_sample(self) -> list[str]:
        images = [(path, path) for path, _ in sample(self._files["train"])]
        return describe_images(images, self.sizing.phrase(), self.sizing.exif)

    def description(self) -> dict[str, list[str]]:
        entries = [path for path in visible(self.folder) if path.is_dir() or path.suffix.lower() in SUFFIXES]
        warnings = left_out(entries, self._folders.values())
        for split, others in self._others.items():
            if others:
                kinds = ", ".join(f"{number} x {kind}" for kind, number in others.most_common(5))
                warnings.append(f"{self._folders[split]}: left out what is no image: {kinds}")
        return {**super().description(), "images": self._look, "warnings": warnings}

    def whole_targets(self) -> dict[str, Any]:
        return {split: np.array([label for _, label in files], np.int32) for split, files in self._files.items()}

    def class_counts(self) -> np.ndarray | None:
        return np.bincount(self.whole_targets()["train"], minlength=self.num_classes)

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
        paths, targets = self.shard(split, topology)
        with tf.device("CPU:0"):
            labels = tf.constant(targets, tf.int32)

        def read(indices, *draws):
            images = decode_batch(self.read_files(tf.gather(paths, indices)), self.sizing, *draws)
            return images, tf.gather(labels, indices)

        return read

    def _decode_all(self, split: str, topology: Topology) -> tuple[tf.Tensor, tf.Tensor]:
        """Decodes this rank's images, uint8 [n, h, w, c], and returns them with their labels."""
        paths, labels = self.shard(split, topology)
        pixels = np.zeros([len(paths), *self.image_shape], np.uint8)
        # -1 stays where an image cannot be read: then it is read again, and named, when it is used.
        readable_labels = np.full([len(paths)], -1, np.int32)

        def read(number, path):
            return number, decode(self.read_file(path), self.sizing)

        # With their numbers, since ignore_errors() leaves gaps.
        numbered = tf.data.Dataset.from_tensor_slices(paths).enumerate()
        images = numbered.map(read, num_parallel_calls=tf.data.AUTOTUNE).ignore_errors()
        batches = finish(images.batch(CACHE_BATCH), topology)
        for numbers, batch in batches.as_numpy_iterator():
            pixels[numbers] = batch
            readable_labels[numbers] = np.array(labels)[numbers]

        with tf.device("CPU:0"):
            return tf.constant(pixels), tf.constant(readable_labels)


def class_folders(folder: Path) -> dict[str, str]:
    """Returns the names of the class folders, by their normal form, sorted.

    Raises:
        DataError: if there are none, or two differ only in their Unicode form.
    """
    names: dict[str, str] = {}
    for path in visible(folder):
        key = normal_form(path.name)
        if path.is_dir() and key in names:
            raise DataError(
                f"{folder} has two folders {key} whose names differ only in their Unicode form "
                f"({names[key].encode()!r} and {path.name.encode()!r}); join them"
            )
        if path.is_dir():
            names[key] = path.name
    if not names:
        raise DataError(
            f"{folder} holds no class folders; files are needed as {folder}/CLASS/IMAGE.jpg, or, but for train, with "
            "their classes in a file, dataset.labels (docs/imagenet.md)"
        )
    return names


def normal_form(name: str) -> str:
    """A name in the Unicode form of most systems: macOS and archives write é as e and an accent."""
    return unicodedata.normalize("NFC", name)


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
