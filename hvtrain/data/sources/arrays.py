"""Images that fit in memory as NumPy arrays, in their original type; and arrays of any kind, from_arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from safetensors import numpy as safetensors

from hvtrain.data.pipeline.transform import IGNORED, STANDARDIZE, Transform, fit
from hvtrain.data.source import Preprocessing
from hvtrain.data.sources.memory import Elements, MemorySource, Part
from hvtrain.errors import ConfigError, DataError

Arrays = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Split name -> images [n, h, w] or [n, h, w, c], labels integer [n] or [n, 1]. "train" must be there."""
FITTED_FILE = "normalization.safetensors"


class ArraySource(MemorySource):
    """Images and their targets, which are class indices if num_classes is given, from a function that returns arrays.

    The first stream fits the normalization on the whole training part; see MemorySource.

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
        load: Callable[[], Elements],
        image_shape: tuple[int, int, int],
        num_classes: int | None,
        origin: str = "arrays in memory",
        standardize: str = "per_channel",
        max_value: float = 255.0,
        num_validation: int = 0,
        shift_pixels: int = 0,
        flip: bool = False,
        class_names: Sequence[str] | None = None,
        example_shape: tuple[int, ...] | None = None,
        more_facts: Mapping[str, Any] | None = None,
    ) -> None:
        if standardize not in STANDARDIZE:
            raise ConfigError(f"dataset.standardize={standardize} is unknown; choose {', '.join(STANDARDIZE)}")
        super().__init__(name, load, origin, num_validation, more_facts)
        self.image_shape = image_shape
        if num_classes is not None:
            self.num_classes = num_classes
        if class_names is not None and len(class_names) != num_classes:
            raise ConfigError(f"{name}: {len(class_names)} class names for {num_classes} classes; give one for each")
        self.class_names = class_names
        self.transform = Transform(shift_pixels=shift_pixels, flip=flip)
        self._example_shape = example_shape
        self._range: tuple[float, float] | None = None  # Of training images, once the normalization is fitted.
        self._dtype = np.dtype(np.float32)
        self._standardize, self._max_value = standardize, max_value

    @property
    def element_spec(self) -> tuple[Any, ...]:
        image = tf.TensorSpec(self.image_shape, tf.float32)
        _, targets, *weights = super().element_spec
        return image, tf.TensorSpec((), tf.int32) if self._has_classes else targets, *weights

    @property
    def _has_classes(self) -> bool:
        """Whether each image has one class."""
        return hasattr(self, "num_classes")

    def fit(self, train: Part) -> None:
        if self._range:
            return
        images = train.elements[0]
        mean, scale = fit(images, train.rows, self._standardize, self._max_value)
        self.transform = replace(self.transform, mean=mean, scale=scale)
        self._range = float(images.min()), float(images.max())
        self._dtype = images.dtype

    def fitted(self) -> dict[str, bytes]:
        self._fit_once()
        found = {"mean": self.transform.mean, "scale": self.transform.scale, "range": self._range}
        arrays = {name: np.asarray(value) for name, value in found.items()}
        return {FITTED_FILE: safetensors.save({**arrays, "dtype": np.zeros(0, self._dtype)})}

    def fit_as(self, files: Mapping[str, bytes]) -> None:
        if FITTED_FILE not in files:
            return
        found = safetensors.load(files[FITTED_FILE])
        self.transform = replace(self.transform, mean=found["mean"], scale=found["scale"])
        self._range = tuple(found["range"].tolist())
        self._dtype = found["dtype"].dtype

    def _fit_once(self) -> None:
        if not self._range:
            self.fit(self.parts()["train"])

    def preprocessing(self) -> Preprocessing:
        self._fit_once()  # No stream was opened, if the run had nothing left to do.
        shape = self._example_shape or self.image_shape
        values = f"as in the arrays ({self._dtype}); any numeric type is taken"
        return self.transform.preprocessing(shape, self.image_shape, values, self._range)

    def value_range(self) -> tuple[float, float] | None:
        """That of the type, rather than of these images: 0 ... max_value for whole numbers, 0 ... 1 for fractions."""
        low, high = self.preprocessing().range or (0.0, 0.0)
        top = self._max_value if np.issubdtype(self._dtype, np.integer) else 1.0
        return (0.0, float(top)) if low >= 0 and high <= top else (low, high)

    def check(self, split: str, *elements: Any) -> tuple[Any, ...]:
        """A split in its final shapes, checked against the shape, the classes and each other."""
        where, (images, *targets) = f"{self.name}, {split} ({self.origin})", elements
        if split == "train":
            self._example_shape = self._example_shape or np.shape(images)[1:]
        if images.ndim == 3:
            images = images[..., np.newaxis]
        if images.shape[1:] != self.image_shape:
            raise DataError(f"{where}: images are {images.shape[1:]}; {self.image_shape} was given as image_shape")
        if np.issubdtype(images.dtype, np.floating) and not np.isfinite(images).all():
            raise DataError(f"{where}: images hold NaN or infinite values; fix or drop those examples")
        if not self._has_classes:
            return images, *super().check(split, images, *targets)[1:]
        labels = _class_indices(targets[0], where)
        if len(labels) != len(images):
            raise DataError(f"{where}: {len(images)} images but {len(labels)} labels; each image needs one")
        if (outside := np.flatnonzero((labels < 0) | (labels >= self.num_classes))).size:
            found = f"label {labels[outside[0]]} at index {outside[0]} is outside 0 ... {self.num_classes - 1}"
            raise DataError(f"{where}: {found}; fix the labels or set num_classes")
        return super().check(split, images, labels, *targets[1:])

    def in_model_type(self, elements: Any) -> Any:
        images, targets, *weights = elements
        targets = targets.astype(np.int32) if self._has_classes else super().in_model_type(targets)
        return images, targets, *super().in_model_type(tuple(weights))


class ImagesWithMasks(ArraySource):
    """Images whose targets are masks of class indices [n, h, w]; 255 is ignored. Augmentation moves them together."""

    _has_classes = False

    def check(self, split: str, *elements: Any) -> tuple[Any, ...]:
        images, masks, *weights = elements
        where = f"{self.name}, {split} ({self.origin})"
        if not np.issubdtype(masks.dtype, np.integer) or masks.shape[1:] != self.image_shape[:2]:
            raise DataError(
                f"{where}: masks are {masks.dtype} of shape {masks.shape}; whole numbers [n, {self.image_shape[0]}, "
                f"{self.image_shape[1]}] are needed, a class for each pixel"
            )
        if masks.size and not 0 <= masks.min() <= masks.max() <= IGNORED:
            raise DataError(
                f"{where}: masks hold labels from {masks.min()} to {masks.max()}; give classes from 0, and {IGNORED} "
                "where a pixel does not count"
            )
        return super().check(split, images, masks.astype(np.uint8), *weights)

    def augment(self, elements: tuple[Any, ...], seed: tf.Tensor) -> tuple[Any, ...]:
        images, masks, *weights = elements
        return *self.transform.augment_with_masks(images, masks, seed), *weights


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
    x_train: Any,
    y_train: Any,
    x_test: Any = None,
    y_test: Any = None,
    x_validation: Any = None,
    y_validation: Any = None,
    *,
    w_train: Any = None,
    w_test: Any = None,
    w_validation: Any = None,
    name: str = "arrays",
    images: bool | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    num_validation: int = 0,
    facts: Mapping[str, Any] | None = None,
    **options,
) -> MemorySource:
    """A source from arrays that are already in memory: x are inputs, y targets and w weights of the examples.

    x, y and w may be arrays [n, ...] or nested structures of them, such as a dict by the names of the model's inputs.
    The caller's arrays stay in memory beside the shard; for large ones give MemorySource or ArraySource a function that
    loads them.

    Args:
        images: x are images [n, h, w] or [n, h, w, c], to be normalized and augmented; None: if x is an array of such a
            shape, and of 8-bit numbers or with whole numbers as y. The `options` are those of ArraySource.
        num_classes: of targets that are one whole number each; default: the largest of y_train + 1. With it, whole
            numbers [n, h, w] are masks of classes (255: ignored), which augmentation moves with their images.
        facts: others, for the model's builder and the task, such as vocabulary_size.
    """
    splits = {"train": (x_train, y_train, w_train), "validation": (x_validation, y_validation, w_validation)}
    splits["test"] = x_test, y_test, w_test
    arrays = {}
    for split, (x, y, w) in splits.items():
        if (x is None) != (y is None):
            raise DataError(f"{name}: x_{split} and y_{split} belong together; give both or neither")
        if (w is None) != (w_train is None) and x is not None:
            raise DataError(
                f"{name}: w_{split} is {'missing' if w is None else 'there'}, unlike w_train; weight all or none"
            )
        if x is not None:
            arrays[split] = tuple(tf.nest.map_structure(np.asarray, part) for part in (x, y, w) if part is not None)
    x, y = arrays["train"][:2]
    numbers = isinstance(y, np.ndarray) and np.issubdtype(y.dtype, np.integer)
    whole = numbers and y.shape[1:] in ((), (1,))
    masks = numbers and y.ndim == 3 and num_classes is not None and images is not False
    if images is None:
        images = isinstance(x, np.ndarray) and x.ndim in (3, 4) and (x.dtype == np.uint8 or whole or masks)
    if isinstance(y, np.ndarray) and y.dtype.kind in "USO":
        _class_indices(y, f"{name}, y_train")  # Names, which it refuses.
    if whole and num_classes is None:
        num_classes = int(np.max(_class_indices(y, f"{name}, y_train"))) + 1
    if not images:
        if options:
            raise ConfigError(f"{name}: {', '.join(options)} are for images, and x_train holds none; leave them out")
        if whole:
            arrays = {split: (x, _class_indices(y, f"{name}, y_{split}"), *w) for split, (x, y, *w) in arrays.items()}
        found = {"num_classes": num_classes, "class_names": class_names, **(facts or {})}
        found = {key: value for key, value in found.items() if value is not None}
        return MemorySource(name, lambda: arrays, num_validation=num_validation, more_facts=found)
    if not isinstance(x, np.ndarray) or x.ndim not in (3, 4):
        shape = x.shape[1:] if isinstance(x, np.ndarray) else "several arrays"
        raise DataError(f"{name}: x_train holds examples of shape {shape}; images [h, w] or [h, w, c] are needed")
    height, width, channels = (*x.shape[1:], 1)[:3]
    more: Any = {"num_validation": num_validation, "class_names": class_names, "more_facts": facts, **options}
    kind = ImagesWithMasks if masks else ArraySource
    return kind(name, lambda: arrays, (height, width, channels), num_classes, **more)
