"""Turns raw pixels into what the model sees: seeded augmentation, then normalization, in whole batches."""

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from hvtrain.data.preprocessing import normalize
from hvtrain.errors import ConfigError

STANDARDIZE = ("per_pixel", "per_channel", "scale", "none")
FIT_ROWS = 4096


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

    def normalize(self, images: tf.Tensor) -> tf.Tensor:
        """Normalizes raw images to float32."""
        mean, scale = np.asarray(self.mean, np.float32), np.asarray(self.scale, np.float32)
        return (tf.cast(images, tf.float32) - mean) / scale

    def layers(self, image_shape: tuple[int, int, int]) -> list[keras.layers.Layer]:
        """normalize() as Keras layers, for a saved model; augmentation belongs to training only."""
        return normalize(self.mean, self.scale, image_shape)


def _shift(images: tf.Tensor, pixels: int, seed: tf.Tensor) -> tf.Tensor:
    """Pads by `pixels` on each side and cuts a window of the old size out of each image, at random."""
    batch, height, width = tf.shape(images)[0], images.shape[1], images.shape[2]
    corner = tf.random.stateless_uniform([batch, 2], seed, maxval=2 * pixels + 1, dtype=tf.int32)
    padded = tf.pad(images, [[0, 0], [pixels, pixels], [pixels, pixels], [0, 0]])
    rows = corner[:, :1] + tf.range(height)
    columns = corner[:, 1:] + tf.range(width)
    shifted = tf.gather(padded, rows, axis=1, batch_dims=1)
    return tf.ensure_shape(tf.gather(shifted, columns, axis=2, batch_dims=1), images.shape)


def check_standardize(standardize: str) -> None:
    if standardize not in STANDARDIZE:
        raise ConfigError(f"dataset.standardize={standardize} is unknown; choose {', '.join(STANDARDIZE)}")


def fit(
    images: np.ndarray, rows: np.ndarray, standardize: str, max_value: float
) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Mean and scale of the training images (images[rows], [n, h, w, c]), by scikit-learn's StandardScaler.

    It is fed in pieces, so its float64 copy stays small. A pixel that never changes gets scale 1. "scale" divides by
    max_value; "none" keeps the values.
    """
    if standardize == "none":
        return 0.0, 1.0
    if standardize == "scale":
        return 0.0, max_value
    from sklearn.preprocessing import StandardScaler

    feature_shape = images.shape[1:] if standardize == "per_pixel" else images.shape[-1:]
    scaler = StandardScaler()
    for start in range(0, len(rows), FIT_ROWS):
        piece = images[rows[start : start + FIT_ROWS]]
        scaler.partial_fit(piece.reshape(-1, int(np.prod(feature_shape))))
    return scaler.mean_.reshape(feature_shape), scaler.scale_.reshape(feature_shape)
