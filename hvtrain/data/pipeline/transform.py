"""Augments and normalizes pixels inside the input pipeline.

Transform.preprocessing() returns Keras layers that normalize in the same way, for the saved model.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from hvtrain.config.validate import check_least
from hvtrain.data.source import ImageShape, Preprocessing
from hvtrain.errors import ConfigError

STANDARDIZE = ("per_pixel", "per_channel", "scale", "none")
# Usual numbers of channels.
CHANNELS = (1, 3, 4)
# The label of mask pixels that are ignored, as in PASCAL VOC.
IGNORED = 255
# Number of images passed to the scaler at a time.
FIT_ROWS = 4096
# Keras's Normalization replaces scales below 1e-7. Scales of at least this are safe.
_EPSILON = 1e-6


def fold_in(seed: Tensor, data: Any) -> Tensor:
    """Derives another seed int64 [2] from a seed and an integer."""
    return tf.random.experimental.stateless_fold_in(seed, tf.cast(data, tf.int64))


@dataclass(frozen=True)
class Transform:
    """Shifts and flips raw images at random (in training), and normalizes them to (x - mean) / scale in float32.

    Raises:
        ConfigError: shift_pixels is negative, or a scale is not above 0.
    """

    mean: np.ndarray | float = 0.0
    """A number, [channels] or [h, w, channels], broadcast over an image."""
    scale: np.ndarray | float = 1.0
    shift_pixels: int = 0
    """Each image is shifted by up to this many pixels in each direction; zeros fill the border."""
    flip: bool = False
    """Mirrors half of the images left to right."""

    def __post_init__(self) -> None:
        check_least("dataset.shift_pixels", self.shift_pixels, 0)
        if not np.min(self.scale) > 0:
            raise ConfigError(f"scale={self.scale} cannot divide pixels; give numbers above 0")

    def augment(self, images: Tensor, seed: Tensor) -> Tensor:
        """Augments raw images [batch, h, w, c], keeping shape and type.

        Pure function of images and seed int64 [2].
        """
        if self.shift_pixels:
            images = _shift(images, self.shift_pixels, seed)
        if self.flip:
            # With the same seed as the shift, flips and shifts would depend on each other.
            draws = tf.random.stateless_uniform([tf.shape(images)[0], 1, 1, 1], fold_in(seed, 1))
            images = tf.where(draws < 0.5, tf.reverse(images, axis=[2]), images)
        return images

    def augment_with_masks(
        self, images: Tensor, masks: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Augments raw images and their masks uint8 [batch, h, w] in the same way.

        Pixels that a shift brings in at a border get the label IGNORED.
        """
        # The same seed moves masks like their images. Masks are not cast to the images' type, which may
        # be bool. Labels are augmented plus one: a shift fills borders with 0, and 0 - 1 is 255, which
        # is IGNORED, in uint8.
        labels = self.augment((masks + 1)[..., None], seed)
        return self.augment(images, seed), labels[..., 0] - 1

    def normalize(self, images: Tensor) -> Tensor:
        """Normalizes raw images to float32."""
        mean = np.float32(self.mean)
        scale = np.float32(self.scale)
        pixels = tf.cast(images, tf.float32)
        # Keras's Normalization subtracts a mean of 0 too, which flushes denormal numbers to 0. So
        # the subtraction is left out only for integers, none of which is denormal.
        if mean.any() or not images.dtype.is_integer:
            pixels -= mean
        return pixels / scale

    def preprocessing(
        self,
        shape: tuple[int | None, ...],
        image_shape: ImageShape,
        values: str,
        limits: tuple[float, float] | None = None,
        resizing: Sequence[Callable[[Any], Any]] = (),
    ) -> Preprocessing:
        """Returns layers that turn a raw example into what evaluation streams give, to the last bit.

        Args:
            shape: Shape of a raw example; None for a side of any size.
            image_shape: Shape of the streams' images.
            values: Description of the values in a raw example.
            limits: The smallest and the largest value, if known.
            resizing: Layers that resize images of any size to image_shape.
        """
        layers = list(resizing)
        if not layers and shape != image_shape:
            layers.append(keras.layers.Reshape(image_shape, dtype="float32"))

        mean, scale = np.broadcast_arrays(np.float32(self.mean), np.float32(self.scale))
        if mean.any() or (scale != 1).any():
            layers += _normalization_layers(mean, scale)
        return Preprocessing(shape, layers, values, limits)


class Unchanged(Transform):
    """A transform for inputs of any structure, which the model takes as they are read."""

    def augment(self, inputs: Any, seed: Tensor) -> Any:
        return inputs

    def normalize(self, inputs: Any) -> Any:
        return inputs


def _normalization_layers(mean: np.ndarray, scale: np.ndarray) -> list[keras.Layer]:
    """Returns layers that compute (x - mean) / scale to the last bit, for mean and scale of the same shape."""
    axis = {0: None, 1: -1}.get(mean.ndim, (1, 2, 3))
    layers = []
    if scale.min() < _EPSILON:
        # Multiplying by a power of two is exact.
        factor = np.float32(2.0 ** np.ceil(np.log2(_EPSILON / scale.min())))
        layers.append(keras.layers.Rescaling(float(factor), dtype="float32"))
        mean = mean * factor
        scale = scale * factor
    # Keras takes the variance, and the root of a square is exact. Rescaling by
    # 1 / scale would round instead.
    variance = np.square(scale).tolist()
    layers.append(keras.layers.Normalization(axis, mean.tolist(), variance, dtype="float32"))
    return layers


def _shift(images: Tensor, pixels: int, seed: Tensor) -> Tensor:
    """Pads images by `pixels` on each side, and cuts a random window of the old size out of each."""
    size = [tf.shape(images)[0], 2]
    corner = tf.random.stateless_uniform(size, seed, maxval=2 * pixels + 1, dtype=tf.int32)
    shifted = tf.pad(images, [[0, 0], [pixels, pixels], [pixels, pixels], [0, 0]])
    shifted = tf.gather(shifted, corner[:, :1] + tf.range(images.shape[1]), axis=1, batch_dims=1)
    shifted = tf.gather(shifted, corner[:, 1:] + tf.range(images.shape[2]), axis=2, batch_dims=1)
    return tf.ensure_shape(shifted, images.shape)


def fit(
    images: np.ndarray, rows: np.ndarray, standardize: str, max_value: float
) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Fits mean and scale to training images with scikit-learn's StandardScaler.

    A pixel or channel that never changes gets scale 1.

    Args:
        images: [n, h, w, c], of which only `rows` are read.
        standardize: "per_pixel" and "per_channel" fit; "scale" divides by max_value; "none" keeps the values.

    Returns:
        Mean and scale, of shape [h, w, c] or [c], or numbers if nothing is fitted.
    """
    if standardize == "none":
        return 0.0, 1.0
    if standardize == "scale":
        return 0.0, max_value

    from sklearn.preprocessing import StandardScaler

    feature_shape = images.shape[1:] if standardize == "per_pixel" else images.shape[-1:]
    scaler = StandardScaler()
    # In pieces, so that the scaler's float64 copy stays small.
    for start in range(0, len(rows), FIT_ROWS):
        piece = images[rows[start : start + FIT_ROWS]]
        scaler.partial_fit(piece.reshape(-1, np.prod(feature_shape)))
    return scaler.mean_.reshape(feature_shape), scaler.scale_.reshape(feature_shape)


def check_image_shape(image_shape: object) -> ImageShape:
    """Checks a configuration's list of height, width and channels, and returns it as a tuple.

    Raises:
        ConfigError: It is not the shape of an image.
    """
    with suppress(TypeError, ValueError):
        height, width, channels = (int(side) for side in image_shape)  # type: ignore[attr-defined]
        if height > 0 and width > 0 and channels in CHANNELS:
            return height, width, channels
    raise ConfigError(
        f"dataset.image_shape={image_shape} is not [height, width, channels]; give a height and a width above 0, and "
        "1, 3 or 4 channels"
    )
