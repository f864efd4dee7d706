"""Data sets that fit in memory as NumPy arrays. Each rank keeps its shard only, in the original type."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.manifest import of_arrays
from hvtrain.data.pipeline.streams import IndexedSource, Read
from hvtrain.data.pipeline.transform import STANDARDIZE, Transform, fit
from hvtrain.data.source import Preprocessing
from hvtrain.errors import ConfigError, DataError

Arrays = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Split name -> images [n, h, w] or [n, h, w, c], labels integer [n] or [n, 1]. "train" must be there."""

SPLIT_SEED = 0  # The validation part is the same in every run, whatever its seed.


class Part(NamedTuple):
    """One split, as rows of a pair of arrays: splitting copies no pixels."""

    images: np.ndarray
    labels: np.ndarray
    rows: np.ndarray


class ArraySource(IndexedSource):
    """A data set from a function that returns whole arrays.

    `load` runs when counts or a stream are first needed. The first stream fits the normalization on the whole
    training part, cuts the arrays down to this rank's shards, and drops the rest.

    load: returns {"train": (images, labels), "test": ..., "validation": ...}; the last two are optional.
    standardize: "per_pixel" or "per_channel" (mean 0, deviation 1), "scale" (divide by max_value), "none".
    num_validation: number of examples taken out of the training part at random, with a fixed seed.
    shift_pixels, flip: augmentation of training batches, see Transform.
    class_names: by label, for users of the saved model.
    example_shape: of an example before load() reshaped it; the saved model takes that shape.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], Arrays],
        image_shape: tuple[int, int, int],
        num_classes: int,
        origin: str = "arrays in memory",
        standardize: str = "per_channel",
        max_value: float = 255.0,
        num_validation: int = 0,
        shift_pixels: int = 0,
        flip: bool = False,
        class_names: Sequence[str] | None = None,
        example_shape: tuple[int, ...] | None = None,
    ) -> None:
        if standardize not in STANDARDIZE:
            raise ConfigError(f"dataset.standardize={standardize} is unknown; choose {', '.join(STANDARDIZE)}")
        if num_validation < 0:
            raise ConfigError(f"dataset.num_validation={num_validation} is negative; 0 means none")
        self.name, self.origin = name, origin
        self.image_shape, self.num_classes = image_shape, num_classes
        if class_names is not None and len(class_names) != num_classes:
            raise ConfigError(f"{name}: {len(class_names)} class names for {num_classes} classes; give one for each")
        self.class_names = class_names
        self.transform = Transform(shift_pixels=shift_pixels, flip=flip)
        self._example_shape = example_shape
        self._range: tuple[float, float] | None = None  # Of training images, once the normalization is fitted.
        self._dtype = np.dtype(np.float32)
        self._load, self._num_validation = load, num_validation
        self._standardize, self._max_value = standardize, max_value
        self._counts: dict[str, int] = {}
        self._parts: dict[str, Part] | None = None  # Whole arrays, only between counting and cutting.
        self._shards: dict[Topology, dict[str, tuple[tf.Tensor, tf.Tensor]]] = {}  # Of several ranks: see regrouped().

    def num_examples(self, split: str) -> int:
        if not self._counts:
            self._parts = self._open()
            self._counts = {name: len(part.rows) for name, part in self._parts.items()}
        return self._counts.get(split, 0)

    def manifest(self) -> dict[str, Any]:
        found = super().manifest()
        parts = self._parts or self._open()
        whole: dict[int, str] = {}  # Validation and training are rows of the same arrays.
        for split, part in parts.items():
            digest = whole.get(id(part.images)) or of_arrays([part.images, part.labels])
            whole[id(part.images)] = digest
            if split in found["splits"]:
                found["splits"][split]["digest"] = of_arrays([np.frombuffer(digest.encode(), np.uint8), part.rows])
        return found

    def reader(self, split: str, topology: Topology) -> Read:
        if topology not in self._shards:  # Each rank's are cut once; then the whole arrays are dropped.
            parts, self._parts = self._parts or self._open(), None
            self._fit(parts["train"])
            shards = self._shards[topology] = {}
            with tf.device("CPU:0"):  # The input pipeline runs on the CPU, so no shard belongs on a GPU.
                for name, part in parts.items():
                    rows = part.rows[np.asarray(topology.share(len(part.rows)), np.int64)]
                    shards[name] = tf.constant(part.images[rows]), tf.constant(part.labels[rows].astype(np.int32))
        empty = tf.zeros([0, *self.image_shape], tf.uint8), tf.zeros([0], tf.int32)
        images, labels = self._shards[topology].get(split, empty)
        return lambda indices: (tf.gather(images, indices), tf.gather(labels, indices))

    def _fit(self, train: Part) -> None:
        """Fits the normalization, once: it is the same on every rank."""
        if self._range:
            return
        mean, scale = fit(train.images, train.rows, self._standardize, self._max_value)
        self.transform = Transform(mean, scale, self.transform.shift_pixels, self.transform.flip)
        self._range = float(train.images.min()), float(train.images.max())
        self._dtype = train.images.dtype

    def preprocessing(self) -> Preprocessing:
        if not self._range:  # No stream was opened, since the run had nothing left to do.
            self._fit((self._parts or self._open())["train"])
        shape = self._example_shape or self.image_shape
        values = f"as in the arrays ({self._dtype}); any numeric type is taken"
        return self.transform.preprocessing(shape, self.image_shape, values, self._range)

    def _open(self) -> dict[str, Part]:
        try:
            arrays = self._load()
            self._example_shape = self._example_shape or np.shape(arrays["train"][0])[1:]
            parts = {split: self._check(split, *map(np.asarray, pair)) for split, pair in arrays.items()}
        except OSError as error:
            raise DataError(f"{self.name} ({self.origin}) cannot be read: {error}; fix the file") from error
        except DataError as error:
            if self.on_error == "skip":
                raise DataError(f"{error} (arrays are read as a whole, so data.on_error=skip does not help)") from error
            raise

        train, wanted = parts["train"], self._num_validation
        if wanted and "validation" not in parts:
            if wanted >= len(train.rows):
                found = f"dataset.num_validation={wanted} leaves nothing of {len(train.rows)} training examples"
                raise ConfigError(f"{found}; choose 0 ... {len(train.rows) - 1}")
            order = np.random.default_rng(SPLIT_SEED).permutation(len(train.rows))
            parts["validation"] = train._replace(rows=np.sort(order[:wanted]))
            parts["train"] = train._replace(rows=np.sort(order[wanted:]))
        return parts

    def _check(self, split: str, images: np.ndarray, labels: np.ndarray) -> Part:
        """A split in its final shapes, checked against the shape, the classes and each other."""
        where = f"{self.name}, {split} ({self.origin})"
        if images.ndim == 3:
            images = images[..., np.newaxis]
        if images.shape[1:] != self.image_shape:
            raise DataError(f"{where}: images are {images.shape[1:]}; {self.image_shape} was given as image_shape")
        if np.issubdtype(images.dtype, np.floating) and not np.isfinite(images).all():
            raise DataError(f"{where}: images hold NaN or infinite values; fix or drop those examples")
        labels = _class_indices(labels, where)
        if len(labels) != len(images):
            raise DataError(f"{where}: {len(images)} images but {len(labels)} labels; each image needs one")
        if (outside := np.flatnonzero((labels < 0) | (labels >= self.num_classes))).size:
            found = f"label {labels[outside[0]]} at index {outside[0]} is outside 0 ... {self.num_classes - 1}"
            raise DataError(f"{where}: {found}; fix the labels or set num_classes")
        return Part(images, labels, np.arange(len(labels)))


def _class_indices(labels: np.ndarray, where: str) -> np.ndarray:
    """Labels [n] or [n, 1] as [n]. Raises DataError if they are not integers; where begins its message."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        fix = "for one-hot rows: labels.argmax(axis=1); for names: np.unique(labels, return_inverse=True)[1]"
        raise DataError(
            f"{where}: labels are {labels.dtype} of shape {labels.shape}; give one integer per image ({fix})"
        )
    return labels


def from_arrays(
    x_train: np.ndarray,
    y_train: np.ndarray,
    x_test: np.ndarray | None = None,
    y_test: np.ndarray | None = None,
    x_validation: np.ndarray | None = None,
    y_validation: np.ndarray | None = None,
    *,
    name: str = "arrays",
    num_classes: int | None = None,
    **options,
) -> ArraySource:
    """A source from arrays that are already in memory; `options` are those of ArraySource.

    Images [n, h, w] or [n, h, w, c], integer labels [n]. num_classes defaults to the largest training
    label + 1. The caller's arrays stay in memory beside the shard; for large ones give ArraySource a function
    that loads them.
    """
    pairs = {"train": (x_train, y_train), "validation": (x_validation, y_validation), "test": (x_test, y_test)}
    arrays = {}
    for split, (images, labels) in pairs.items():
        if (images is None) != (labels is None):
            raise DataError(f"{name}: x_{split} and y_{split} belong together; give both or neither")
        if images is not None and labels is not None:
            arrays[split] = np.asarray(images), np.asarray(labels)
    shape = arrays["train"][0].shape[1:]
    if len(shape) not in (2, 3):
        raise DataError(f"{name}: x_train holds examples of shape {shape}; images [h, w] or [h, w, c] are needed")
    height, width, channels = (*shape, 1)[:3]
    if num_classes is None:
        num_classes = int(np.max(_class_indices(arrays["train"][1], f"{name}, y_train"))) + 1
    return ArraySource(name, lambda: arrays, (height, width, channels), num_classes, **options)
