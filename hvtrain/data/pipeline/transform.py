"""Turns encoded images into pixels of one size, and pixels into what the model sees: augmented, then normalized.

Both are done inside the input pipeline. Transform.preprocessing is the same as Keras layers, for the saved model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.data.source import Preprocessing
from hvtrain.errors import ConfigError

STANDARDIZE = ("per_pixel", "per_channel", "scale", "none")
IGNORED = 255  # A mask's label of pixels that do not count, as in PASCAL VOC.
FIT_ROWS = 4096
_EPSILON = 1e-6  # Keras's Normalization replaces scales below 1e-7; scales above this are safe from that.


@dataclass(frozen=True)
class Transform:
    """Shifts and flips raw images at random (training only), then gives (x - mean) / scale in float32."""

    mean: np.ndarray | float = 0.0
    """Broadcasts over an image: a number, [channels] or [h, w, channels]."""
    scale: np.ndarray | float = 1.0
    shift_pixels: int = 0
    """Each image moves by up to this many pixels each way; zeros fill the border."""
    flip: bool = False
    """Mirrors half of the images left to right."""

    def __post_init__(self) -> None:
        if self.shift_pixels < 0:
            raise ConfigError(f"dataset.shift_pixels={self.shift_pixels} is negative; 0 turns shifting off")
        if not np.all(np.asarray(self.scale) > 0):
            raise ConfigError(f"scale={self.scale} cannot divide pixels; give numbers above 0")

    def augment(self, images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Augments raw images [batch, h, w, c], keeping shape and type. Pure function of images and seed int64 [2]."""
        if self.shift_pixels:
            images = _shift(images, self.shift_pixels, seed)
        if self.flip:
            flip_seed = tf.random.experimental.stateless_fold_in(seed, tf.constant(1, tf.int64))
            chosen = tf.random.stateless_uniform([tf.shape(images)[0], 1, 1, 1], flip_seed) < 0.5
            images = tf.where(chosen, tf.reverse(images, axis=[2]), images)
        return images

    def augment_with_masks(self, images: tf.Tensor, masks: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Augments raw images and their masks (uint8 [batch, h, w]) alike; what comes in at a border is ignored."""
        # As one more channel, masks move with their images. Borders come in as 0, which is then the ignored label.
        labels = tf.cast(masks + 1, images.dtype)[..., tf.newaxis]
        both = self.augment(tf.concat([images, labels], axis=-1), seed)
        return both[..., :-1], tf.cast(both[..., -1], tf.uint8) - 1

    def normalize(self, images: tf.Tensor) -> tf.Tensor:
        """Normalizes raw images to float32."""
        mean, scale = np.asarray(self.mean, np.float32), np.asarray(self.scale, np.float32)
        pixels = tf.cast(images, tf.float32)
        # Only whole numbers surely keep their bits if 0 is not subtracted: others may be denormal, which it flushes.
        if mean.any() or not images.dtype.is_integer:
            pixels -= mean
        return pixels / scale

    def preprocessing(
        self,
        shape: tuple[int | None, ...],
        image_shape: tuple[int, int, int],
        values: str,
        limits: tuple[float, float] | None = None,
    ) -> Preprocessing:
        """From a raw example to what the streams give, to the last bit; augmentation belongs to training only."""
        layers: list[Callable[[Any], Any]] = []
        if None in shape:
            # As decode() resizes. The format is explicit, since the user's keras.json may name another.
            # Not keras.layers.Resizing: a model that begins with it and is called without `training` trains behind it.
            options = {"size": image_shape[:2], "antialias": True, "data_format": "channels_last"}
            layers += [partial(keras.ops.image.resize, **options), keras.ops.round]
        elif shape != image_shape:
            layers.append(keras.layers.Reshape(image_shape, dtype="float32"))
        means, scales = np.broadcast_arrays(np.asarray(self.mean, np.float32), np.asarray(self.scale, np.float32))
        if means.any() or (scales != 1).any():
            axis = {0: None, 1: -1}.get(means.ndim, (1, 2, 3))
            if means.ndim > 1:
                means, scales = np.broadcast_to(means, image_shape), np.broadcast_to(scales, image_shape)
            if scales.min() < _EPSILON:
                factor = np.float32(2.0 ** np.ceil(np.log2(_EPSILON / scales.min())))  # A power of two rounds nothing.
                layers.append(keras.layers.Rescaling(float(factor), dtype="float32"))
                means, scales = means * factor, scales * factor
            # Keras takes the variance, and the root of a square is exact; Rescaling by 1 / scale would round otherwise.
            layers.append(keras.layers.Normalization(axis, means.tolist(), np.square(scales).tolist(), dtype="float32"))
        return Preprocessing(shape, layers, values, limits)


class Unchanged(Transform):
    """For inputs of any structure, which the model takes as they are read."""

    def augment(self, inputs: Any, seed: tf.Tensor) -> Any:
        return inputs

    def normalize(self, inputs: Any) -> Any:
        return inputs


def _shift(images: tf.Tensor, pixels: int, seed: tf.Tensor) -> tf.Tensor:
    """Pads by `pixels` on each side and cuts a window of the old size out of each image, at random."""
    batch, height, width = tf.shape(images)[0], images.shape[1], images.shape[2]
    corner = tf.random.stateless_uniform([batch, 2], seed, maxval=2 * pixels + 1, dtype=tf.int32)
    padded = tf.pad(images, [[0, 0], [pixels, pixels], [pixels, pixels], [0, 0]])
    shifted = tf.gather(padded, corner[:, :1] + tf.range(height), axis=1, batch_dims=1)
    shifted = tf.gather(shifted, corner[:, 1:] + tf.range(width), axis=2, batch_dims=1)
    return tf.ensure_shape(shifted, images.shape)


def fit(
    images: np.ndarray, rows: np.ndarray, standardize: str, max_value: float
) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Mean and scale of the training images (images[rows], [n, h, w, c]), by scikit-learn's StandardScaler.

    It is fed in pieces, so its float64 copy stays small. A pixel that never changes gets scale 1. "scale" divides by
    max_value; "none" keeps the values.
    """
    if standardize in ("none", "scale"):
        return 0.0, max_value if standardize == "scale" else 1.0
    from sklearn.preprocessing import StandardScaler

    feature_shape = images.shape[1:] if standardize == "per_pixel" else images.shape[-1:]
    scaler = StandardScaler()
    for start in range(0, len(rows), FIT_ROWS):
        piece = images[rows[start : start + FIT_ROWS]]
        scaler.partial_fit(piece.reshape(-1, int(np.prod(feature_shape))))
    return scaler.mean_.reshape(feature_shape), scaler.scale_.reshape(feature_shape)


def decode(encoded: tf.Tensor, image_shape: tuple[int, int, int]) -> tf.Tensor:
    """Decodes one encoded image (JPEG, PNG, GIF, BMP) to uint8 image_shape; an animation gives its first frame.

    Other sizes are resized (bilinear, antialiased); the aspect ratio is not kept. Antialiasing costs more than the
    decoding itself (docs/input.md).
    """
    height, width, channels = image_shape
    image = tf.io.decode_image(encoded, channels=channels, expand_animations=False)

    def resized() -> tf.Tensor:
        found = tf.image.resize(image, [height, width], antialias=True)
        return tf.saturate_cast(tf.round(found), tf.uint8)

    # Resizing to the same size would change no bit, and take longer than the decoding.
    fits = tf.reduce_all(tf.shape(image) == image_shape)
    return tf.ensure_shape(tf.cond(fits, lambda: image, resized), image_shape)


def decode_batch(encoded: tf.Tensor, image_shape: tuple[int, int, int]) -> tf.Tensor:
    """Strings [batch] to uint8 [batch, h, w, c], in turn, since the pipeline decodes several batches at once."""
    pixels = tf.TensorSpec(image_shape, tf.uint8)
    return tf.map_fn(lambda one: decode(one, image_shape), encoded, fn_output_signature=pixels)


def decode_files(paths: tf.Tensor, image_shape: tuple[int, int, int]) -> tf.Tensor:
    """As decode_batch, from the files of these paths."""
    pixels = tf.TensorSpec(image_shape, tf.uint8)
    return tf.map_fn(lambda path: decode(tf.io.read_file(path), image_shape), paths, fn_output_signature=pixels)


def check_image_shape(image_shape: object) -> tuple[int, int, int]:
    """(height, width, channels) from a configuration's list, checked."""
    try:
        height, width, channels = (int(side) for side in image_shape)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"dataset.image_shape={image_shape} is not [height, width, channels]") from error
    if height < 1 or width < 1 or channels not in (1, 3, 4):
        raise ConfigError(
            f"dataset.image_shape={image_shape}: height and width of at least 1 and 1, 3 or 4 channels are needed"
        )
    return height, width, channels
