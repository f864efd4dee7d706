"""Sources of images that fit in memory as NumPy arrays.

Images keep their original type, mostly bytes, and are normalized batch by batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from safetensors import numpy as safetensors

from hvtrain.config.validate import check_choice
from hvtrain.data.pipeline.transform import CHANNELS, IGNORED, STANDARDIZE, Transform, fit
from hvtrain.data.source import ImageShape, Parts, Phrases, Preprocessing, check_class_names
from hvtrain.data.sources.memory import Elements, MemorySource, Part
from hvtrain.errors import DataError

# A split with pixels above this does not have the range 0 ... 1.
UNIT_RANGE_LIMIT = 30

FITTED_FILE = "normalization.safetensors"


class ArraySource(MemorySource):
    """A source of images and their targets, from a function that returns arrays.

    The first stream fits the normalization to the whole training part; see MemorySource.

    Example:
        source = ArraySource("cats", load_cats, image_shape=(64, 64, 3), num_classes=2)

    Args:
        name: Name of the data set, for messages and the manifest.
        load: Returns {"train": (images, targets), "test": ..., "validation": ...}; the last two
            are optional. Images are [n, h, w] or [n, h, w, c]; labels are integers [n] or [n, 1].
        image_shape: (height, width, channels).
        num_classes: If given, each target is the index of a class.
        standardize: "per_pixel" or "per_channel" (to mean 0 and standard deviation 1), "scale" (by
            1 / max_value) or "none".
        max_value: The largest value that a pixel may have.
        shift_pixels, flip: Augmentation of training batches; see Transform.
        class_names: The name of each class, for users of the saved model.
        example_shape: Shape of an example before load() reshaped it, which the saved model takes.
        more: origin, num_validation and more_facts; see MemorySource.

    Raises:
        ConfigError: For an unknown standardize, or if the number of class_names is not num_classes.
        DataError: If image_shape has its channels first; once loaded, for wrong shapes, labels or values.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], Elements],
        image_shape: ImageShape,
        num_classes: int | None,
        standardize: str = "per_channel",
        max_value: float = 255.0,
        shift_pixels: int = 0,
        flip: bool = False,
        class_names: Sequence[str] | None = None,
        example_shape: tuple[int, ...] | None = None,
        **more: Any,
    ) -> None:
        check_choice("dataset.standardize", standardize, STANDARDIZE)
        super().__init__(name, load, **more)

        if image_shape[0] in CHANNELS and image_shape[2] not in CHANNELS:
            raise DataError(
                f"{name}: images of shape {image_shape} have their channels first, but [height, width, channels] is "
                "needed; give x.transpose(0, 2, 3, 1), or images=False if x does not hold images"
            )

        self.image_shape = image_shape
        if num_classes is not None:
            self.num_classes = num_classes
        self.class_names = check_class_names(class_names, num_classes)

        self.transform = Transform(shift_pixels=shift_pixels, flip=flip)
        self._standardize = standardize
        self._max_value = max_value
        self._example_shape = example_shape
        # The arrays in FITTED_FILE; empty until they are fitted.
        self._fitted: dict[str, np.ndarray] = {}

    @property
    def element_spec(self) -> Parts:
        _, *others = super().element_spec
        return tf.TensorSpec(self.image_shape, tf.float32), *others

    @property
    def _has_labels(self) -> bool:
        """True if each image has one class: num_classes was given, or is one of more_facts."""
        return hasattr(self, "num_classes")

    def fit(self, train: Part) -> None:
        if self._fitted:  # Already fitted, or restored by fit_as().
            return

        images = train.elements[0]
        mean, scale = fit(images, train.rows, self._standardize, self._max_value)
        self._set_fitted(
            {
                "mean": np.asarray(mean),
                "scale": np.asarray(scale),
                "range": np.array([images.min(), images.max()], np.float64),
                # Empty: only its type matters, which the file stores with each array.
                "dtype": np.zeros(0, images.dtype),
            }
        )

    def _set_fitted(self, fitted: dict[str, np.ndarray]) -> None:
        self._fitted = fitted
        self.transform = replace(self.transform, mean=fitted["mean"], scale=fitted["scale"])

    def fitted(self) -> dict[str, bytes]:
        # Usually, the first stream has fitted the normalization, but a run without steps left opens none.
        if not self._fitted:
            self.fit(self.parts()["train"])
        return {FITTED_FILE: safetensors.save(self._fitted)}

    def fit_as(self, files: Mapping[str, bytes]) -> None:
        if FITTED_FILE in files:
            self._set_fitted(safetensors.load(files[FITTED_FILE]))

    def preprocessing(self) -> Preprocessing:
        self.fitted()
        low, high = self._fitted["range"].tolist()
        return self.transform.preprocessing(
            self._example_shape or self.image_shape,
            self.image_shape,
            f"as in the arrays ({self._fitted['dtype'].dtype}); any numeric type is accepted",
            (low, high),
        )

    def description(self) -> Phrases:
        ranges = []
        largest = []
        for split, part in self.parts().items():
            images = part.elements[0]
            if len(images):
                ranges.append(f"{split} {images.min():g} to {images.max():g}")
                largest.append(images.max())
        shown = ", ".join(ranges)
        description = super().description() | {"images": [f"values of {shown} ({images.dtype})"]}
        if 0 < min(largest) <= 1 and max(largest) > UNIT_RANGE_LIMIT:
            description["warnings"] = [f"the splits hold values in different ranges: {shown}"]
        return description

    def value_range(self) -> tuple[float, float] | None:
        """Returns 0 ... max_value for integers, 0 ... 1 for floats; if training images exceed that, their range."""
        self.fitted()
        low, high = self._fitted["range"].tolist()
        is_integer = self._fitted["dtype"].dtype.kind in "iu"
        top = self._max_value if is_integer else 1.0
        return (0.0, top) if 0 <= low <= high <= top else (low, high)

    def check(self, split: str, *elements: Any) -> Parts:
        """Checks a split, and returns it with images [n, h, w, c] and labels [n].

        Raises:
            DataError: For wrong shapes, labels or values.
        """
        images, *targets = elements
        location = f"{self.name}, {split} ({self.origin})"

        # The shape of the user's examples, before a channel axis is added.
        if split == "train":
            self._example_shape = self._example_shape or images.shape[1:]
        if images.ndim == 3:
            images = images[..., None]
        if images.shape[1:] != self.image_shape:
            raise DataError(
                f"{location}: images have shape {images.shape[1:]}, and image_shape is {self.image_shape}; change one "
                "of the two"
            )

        if self._has_labels:
            labels = class_indices(targets[0], location)
            outside = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
            if outside.size:
                raise DataError(
                    f"{location}: label {labels[outside[0]]} at index {outside[0]} is outside 0 ... "
                    f"{self.num_classes - 1}; fix the labels or set num_classes"
                )
            targets[0] = labels
        return super().check(split, images, *targets)

    def cast_elements(self, elements: Any) -> Any:
        # Images keep their type: bytes take a quarter of the memory of float32.
        images, *others = elements
        if self._has_labels:
            others[0] = others[0].astype(np.int32)
        return images, *super().cast_elements(tuple(others))


class ImagesWithMasks(ArraySource):
    """A source of images whose targets are masks [n, h, w] of class indices; 255 is ignored.

    Augmentation transforms images and masks together.
    """

    has_masks = True
    _has_labels = False
    _is_binary = False
    """True if 255 is class 1, not ignored."""

    def check(self, split: str, *elements: Any) -> Parts:
        images, masks, *weights = elements
        location = f"{self.name}, {split} ({self.origin})"
        height, width, _ = self.image_shape

        has_integers = masks.dtype.kind in "iu"
        if not has_integers or masks.shape[1:] != (height, width):
            raise DataError(
                f"{location}: masks are {masks.dtype} of shape {masks.shape}; whole numbers [n, "
                f"{height}, {width}] are needed, a class for each pixel"
            )

        if masks.size and not 0 <= masks.min() <= masks.max() <= IGNORED:
            raise DataError(
                f"{location}: masks hold labels from {masks.min()} to {masks.max()}; give classes "
                f"from 0, and {IGNORED} for pixels to be ignored"
            )

        # Many tools paint the foreground white, 255. If 255 were ignored, only one class would be left.
        if split == "train" and self.num_classes == 2:
            self._is_binary = {IGNORED} <= set(np.unique(masks).tolist()) <= {0, IGNORED}
        if self._is_binary:
            others = masks[~np.isin(masks, (0, IGNORED))]
            if others.size:
                raise DataError(
                    f"{location}: masks hold the value {others[0]}, but those of train hold only 0 and {IGNORED}; fix "
                    "these masks"
                )
            masks = masks == IGNORED

        return super().check(split, images, masks.astype(np.uint8), *weights)

    def description(self) -> Phrases:
        masks = ["0 and 255, read as classes 0 and 1"] if self._is_binary else []
        return super().description() | {"masks": masks}


def class_indices(labels: np.ndarray, location: str) -> np.ndarray:
    """Returns labels [n] or [n, 1] as [n].

    Raises:
        DataError: If they are not one integer per example; `location` begins the message.
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{location}: labels are {labels.dtype} of shape {labels.shape}; give one integer for each "
            "example (for rows of scores: labels.argmax(axis=1))"
        )

    return labels


def check_image_cell(cell: np.ndarray, shape: ImageShape, location: str) -> None:
    """Raises DataError unless the array in a table's cell holds one image of this shape, with its axes in order."""
    num_pixels = int(np.prod(shape))
    if cell.size != num_pixels or cell.dtype.kind not in "biuf":
        raise DataError(
            f"{location}: the image has {cell.size} value(s) of type {cell.dtype}; {num_pixels} numbers are needed "
            "(encoded images: write Parquet and choose dataset=parquet)"
        )
    # Axes of length 1 have no order. Channels may come first, as in PyTorch.
    sides = [side for side in cell.shape if side != 1]
    needed = [side for side in shape if side != 1]
    if sides != needed and sorted(sides) == sorted(needed):
        raise DataError(
            f"{location}: the image has the shape {cell.shape}, and image_shape is {tuple(shape)}; transpose it"
        )
