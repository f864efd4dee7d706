"""Image files in one folder per class: DIR/train/CLASS/, DIR/validation/CLASS/, DIR/test/CLASS/."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import tensorflow as tf
from tensorflow import Tensor, nest
from tensorflow.data import Dataset

from hvtrain.core.topology import Topology
from hvtrain.data.description import format_counts, listed
from hvtrain.data.formats.folders import look_up_labels, split_folders, unused_warnings, visible
from hvtrain.data.formats.image_files import SUFFIXES, is_image, sample
from hvtrain.data.formats.tar_files import is_remote_file, members_ahead
from hvtrain.data.manifest import digest_arrays
from hvtrain.data.pipeline.decoding import decode_batch
from hvtrain.data.pipeline.epochs import call_python
from hvtrain.data.pipeline.streams import IndexedSource, Read, finish
from hvtrain.data.source import Phrases, Unreadable, reason
from hvtrain.data.sources.file_source import Example, FileSource
from hvtrain.data.sources.memory import SPLIT_SEED, check_shares, on_cpu
from hvtrain.errors import ConfigError, DataError
from hvtrain.system.files import is_remote

# Number of batches whose images are read ahead from object storage, since
# each read waits for the network.
BATCHES_AHEAD = 4

# Paths of images, each with its class index or the path of its mask.
Files = list[tuple[str, Any]]


def read_members(paths: Tensor) -> Tensor:
    """Reads the files at these paths, which may be members of shards or in object storage."""

    def read(encoded):
        return np.array([members_ahead.take(path.decode()) for path in encoded], object)

    return tf.ensure_shape(tf.numpy_function(read, [paths], tf.string), paths.shape)


class ListedImages(FileSource, IndexedSource):
    """Base class for sources that list images by path. A subclass sets _files, by split, and defines reader()."""

    REMOTE_SUFFIXES = SUFFIXES
    _files: dict[str, Files]
    read_files: Callable[[Any], Tensor] = staticmethod(partial(tf.map_fn, tf.io.read_file))

    def __init__(self, dir: str, *settings: Any, **more: Any) -> None:
        super().__init__(dir, *settings, **more)
        if is_remote(dir):
            self.read_files = read_members

    def num_examples(self, split: str) -> int:
        return len(self._files.get(split, []))

    def shard(self, split: str, topology: Topology) -> tuple[Tensor, list[Any]]:
        """Returns the paths of this rank's images, as a tensor, and their targets."""
        files = self._files.get(split, [])
        local = [files[index] for index in topology.share(len(files))]
        targets = [target for _, target in local]
        with tf.device("CPU:0"):
            return tf.constant([path for path, _ in local], tf.string), targets

    def load(self, batches: Dataset, split: str, topology: Topology, *settings: Any) -> Dataset:
        files = self._files.get(split)
        if files and is_remote_file(files[0][0]):
            paths = [path.decode() for path in self.shard(split, topology)[0].numpy()]

            def announce(indices):
                members_ahead.announce(paths[index] for index in indices)
                return [np.True_]

            def announce_batch(step, batch):
                indices = nest.flatten(batch)[0]
                done = call_python(announce, [indices], [tf.TensorSpec((), tf.bool)])
                with tf.control_dependencies(done):
                    return step, nest.map_structure(tf.identity, batch)

            # The images of these batches are read ahead; the indices stay the same.
            batches = batches.map(announce_batch).prefetch(BATCHES_AHEAD)
        return super().load(batches, split, topology, *settings)

    def sample_images(self) -> list[tuple[str, str]]:
        paths = [path for path, _ in sample(self._files["train"])]
        if paths and is_remote_file(paths[0]):
            members_ahead.announce(paths)
        return [(path, path) for path in paths]

    def locate(self, split: str, topology: Topology, example: Example, problem: str) -> Unreadable:
        files = self._files[split]
        index = example[0][0]  # Within the rank's shard.
        path, _ = files[topology.share(len(files))[index]]
        return Unreadable(path, problem.removeprefix(f"{path}; "))

    def raw_examples(self, split: str, topology: Topology, count: int) -> list[np.ndarray]:
        # Only images, since masks are not inputs of the saved model.
        paths, _ = self.shard(split, topology)
        examples = []
        for path in paths[:count]:
            try:
                image = self.read_files(path[None])[0]
                examples.append(self.sizing.decode_for_model(image).numpy())
            except tf.errors.OpError as error:
                name = path.numpy().decode()
                self.refuse(Unreadable(name, reason(error).removeprefix(f"{name}; ")))
        return examples


class LabelledImages(ListedImages):
    """Base class for sources of listed images, each with a class."""

    def whole_targets(self) -> dict[str, Any]:
        return {
            split: np.array([label for _, label in files], np.int32)
            for split, files in self._files.items()
        }

    def reader(self, split: str, topology: Topology) -> Read:
        paths, targets = self.shard(split, topology)
        labels = on_cpu(np.array(targets, np.int32))

        def read(indices, *draws):
            images = decode_batch(self.read_files(tf.gather(paths, indices)), self.sizing, *draws)
            return images, tf.gather(labels, indices)

        return read


class ImageFolder(LabelledImages):
    """A source of images in one folder per class. Pixels are scaled to 0 ... 1.

    Class names are the sorted folder names of the training part. The other parts may lack some of them.

    Example:
        python -m hvtrain dataset=image_folder dataset.dir=flowers dataset.validation_fraction=0.1

    Args:
        dir: Holds the folders train, validation (or val, valid, dev) and test; the last two are
            optional.
        image_shape: [height, width, channels]; every image is resized, and read with that many channels.
        validation_fraction, test_fraction: Fraction of each class taken out of train if the split has
            no folder of its own; the same images in every run.
        shift_pixels, flip: Augmentation of training images; see Transform.
        cache: Keep this rank's decoded shard in memory (height * width * channels bytes per image)
            instead of reading its files again.
        sizing: resize, fit, crop_fraction and exif; see Sizing.
        labels, class_numbers: Files with the classes of validation and test, if those folders hold
            images instead of class folders; see look_up_labels.

    Raises:
        ConfigError: If the fractions leave nothing to train on, or take nothing.
        DataError: If a folder holds no classes, a class has no training images, or a split has other classes.
    """

    name = "image_folder"
    # Reads the files even if decoded images are cached.
    retry_reader = LabelledImages.reader

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
        super().__init__(dir, image_shape, shift_pixels=shift_pixels, flip=flip, **sizing)
        self._folders = {"train": self.folder / "train", **split_folders(self.folder)}
        self.class_names: list[str] = list(class_folders(self._folders["train"]).values())
        self.num_classes = len(self.class_names)
        self._labels = labels
        self._class_numbers = class_numbers
        self._cache = cache
        if cache:
            self.no_random_crop = "keeps decoded images (dataset.cache=true)"
        # Pixels and labels by split and topology.
        self._cached: dict[tuple[str, Topology], tuple[Tensor, Tensor]] = {}

        check_shares(validation_fraction=validation_fraction, test_fraction=test_fraction)
        # Number of entries that are not images in class folders, by split and suffix.
        self._others: dict[str, Counter[str]] = {}
        fractions = {"validation": validation_fraction, "test": test_fraction}
        self._files = self._list_splits(fractions)
        # Computed here, since it refuses images that would be misread.
        self._image_phrases  # noqa: B018

    def manifest(self) -> dict[str, Any]:
        manifest = super().manifest()
        targets = self.whole_targets() if self._labels else {}
        # The names of files hold their classes, unless these are in a file of their own.
        for split in manifest["splits"].keys() & targets.keys() - {"train"}:
            manifest["splits"][split]["labels"] = digest_arrays([targets[split]])
        return manifest

    def _list_splits(self, fractions: dict[str, float]) -> dict[str, Files]:
        """Lists the files of each split, from its own folder or, without one, a fraction of train."""
        train = self._list_files("train")
        num_images = Counter(label for _, label in train)
        for label, name in enumerate(self.class_names):
            if not num_images[label]:
                raise DataError(
                    f"{self._folders['train'] / name} holds no images ({', '.join(SUFFIXES)}); add some, move those of "
                    "its subfolders into it, set dataset.dir one folder deeper, or remove it"
                )

        files = {}
        for split, fraction in fractions.items():
            if split in self._folders:
                files[split] = self._list_files(split)
            elif fraction:
                train, files[split] = split_off(train, fraction, num_images)
                num_left = len({label for _, label in train})
                if not files[split] or num_left < self.num_classes:
                    raise ConfigError(
                        f"dataset.{split}_fraction={fraction} takes {len(files[split]):,} images, and leaves training "
                        f"images of {num_left:,} of {self.num_classes:,} classes: each class has "
                        f"{min(num_images.values()):,} to {max(num_images.values()):,} images; change the fraction, "
                        f"or make a folder {split}/"
                    )

        return files | {"train": train}

    def _list_files(self, split: str) -> Files:
        """Lists all images of a split, sorted by class and name, and counts other entries."""
        folder = self._folders[split]
        entries = visible(folder)
        # Folders of other splits may have the same name in another Unicode form.
        labels = {normalize("NFC", name): label for label, name in enumerate(self.class_names)}
        if self._labels and split != "train" and not any(path.is_dir() for path in entries):
            images = list(filter(is_image, entries))
            return look_up_labels(images, labels, self._labels, self._class_numbers)

        names = class_folders(folder)
        unknown = sorted(set(names) - set(labels))
        if unknown:
            raise DataError(
                f"{folder} has classes that {self._folders['train']} lacks: {listed(unknown)}; a model can only "
                "predict classes that it has seen: move these folders, or rename them as in train"
            )

        others = Counter(path.suffix or path.name for path in entries if not path.is_dir())
        files = []
        for name in sorted(names, key=labels.__getitem__):
            for path in visible(folder / names[name]):
                if is_image(path) and not path.is_dir():
                    files.append((str(path), labels[name]))
                else:
                    others["folder" if path.is_dir() else path.suffix or path.name] += 1

        self._others[split] = others
        return files

    def description(self) -> Phrases:
        description = super().description()
        entries = [path for path in visible(self.folder) if path.is_dir() or is_image(path)]
        description["warnings"] += unused_warnings(entries, self._folders.values())
        for split, others in self._others.items():
            if others:
                description["warnings"].append(
                    f"{self._folders[split]}: left out entries that are not images of a class: {format_counts(others)}"
                )
        return description

    def paths(self, split: str) -> list[str]:
        return [path for path, _ in self._files.get(split, [])]

    def spread(self, split: str, step: int, batch_size: int) -> Dataset:
        # Only the chosen images are decoded, not the whole split.
        cache, self._cache = self._cache, False
        try:
            return super().spread(split, step, batch_size)
        finally:
            self._cache = cache

    def reader(self, split: str, topology: Topology) -> Read:
        if not self._cache:
            return self.retry_reader(split, topology)

        key = (split, topology)
        if key not in self._cached:
            self._cached[key] = self._decode_all(split, topology)
        pixels, labels = self._cached[key]

        def read(indices):
            return tf.gather(pixels, indices), tf.gather(labels, indices)

        return read

    def _decode_all(self, split: str, topology: Topology) -> tuple[Tensor, Tensor]:
        """Decodes all images of this rank, uint8 [n, h, w, c], and returns them with their labels, int32 [n]."""
        read = self.retry_reader(split, topology)
        num_local = topology.share_size(self.num_examples(split))
        pixels = np.zeros([num_local, *self.image_shape], np.uint8)
        # An unreadable image keeps the label -1. When it is used, it is read again and reported.
        labels = np.full(num_local, -1, np.int32)

        # Read one by one, since ignore_errors() drops a whole batch.
        images = Dataset.range(num_local).batch(1)
        images = images.map(lambda index: (index, *read(index)), tf.data.AUTOTUNE).ignore_errors()
        for index, image, label in finish(images, topology).as_numpy_iterator():
            pixels[index] = image
            labels[index] = label

        return on_cpu((pixels, labels))


def class_folders(folder: Path) -> dict[str, str]:
    """Returns the names of the class folders by their Unicode normal form (NFC), sorted.

    Raises:
        DataError: If there are no class folders, or two differ only in their Unicode form.
    """
    names: dict[str, str] = {}
    for path in filter(Path.is_dir, visible(folder)):
        # Composed, since macOS and its archives write é as e with a separate accent.
        key = normalize("NFC", path.name)
        if key in names:
            raise DataError(
                f"{folder} has two folders {key} whose names differ only in their Unicode form "
                f"({names[key].encode()!r} and {path.name.encode()!r}); merge them"
            )
        names[key] = path.name
    if not names:
        raise DataError(
            f"{folder} holds no class folders; files are needed as {folder}/CLASS/IMAGE.jpg or, except for train, with "
            "their classes in the file dataset.labels (docs/imagenet.md)"
        )
    return names


def split_off(files: Files, fraction: float, num_images: Mapping[int, int]) -> tuple[Files, Files]:
    """Takes the same fraction, rounded to whole images, out of each class, at random with a fixed seed.

    Args:
        files: Images with their classes, sorted by class.
        fraction: The fraction of num_images to take.
        num_images: Number of images of each class before any were taken out.

    Returns:
        The rest and the part that was taken out, both in the order of files.
    """
    chosen: set[tuple[str, int]] = set()
    for label, group in groupby(files, key=itemgetter(1)):
        members = list(group)
        order = np.random.default_rng([SPLIT_SEED, label]).permutation(len(members))
        chosen.update(members[index] for index in order[: round(fraction * num_images[label])])

    rest = [file for file in files if file not in chosen]
    part = [file for file in files if file in chosen]
    return rest, part
