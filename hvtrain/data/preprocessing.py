"""The way from an example as the user holds it to what the model trains on, as Keras layers that a saved model carries.

A source returns a Preprocessing (Source.preprocessing); training/saved_model.py puts its layers before the model.
Only what plain Keras can load without hvtrain may be in it, and it must give the same bits as the input pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

_EPSILON = 1e-6  # Normalization divides by 1e-7 where the scale is less; above this it is left alone.


@dataclass(frozen=True)
class Preprocessing:
    """From one raw example, of any type of numbers, to the float32 image that the model trains on."""

    shape: tuple[int | None, ...]
    """Of a raw example; None where any size will do."""
    layers: Sequence[Callable[[Any], Any]] = ()
    """Keras layers or functions of keras.ops, in order."""
    values: str = "as the data set's streams give them"
    """What a raw example holds, for people."""
    range: tuple[float, float] | None = None
    """The least and the largest value, where they are known."""

    def inputs(self) -> keras.KerasTensor:
        """The input of a saved model: float32, into which Keras converts all other types of numbers."""
        return keras.Input(self.shape, dtype="float32", name="raw")

    def __call__(self, raw: Any) -> Any:
        for layer in self.layers:
            raw = layer(raw)
        return raw


def reshape(shape: tuple[int | None, ...], image_shape: tuple[int, int, int]) -> list[keras.layers.Layer]:
    """To [height, width, channels], where an example does not have that shape yet."""
    return [] if shape == image_shape else [keras.layers.Reshape(image_shape, dtype="float32")]


def resize(image_shape: tuple[int, int, int]) -> list[Callable[[Any], Any]]:
    """What data/decode.py does to decoded pixels of any size: resized, and rounded as for uint8."""
    height, width, _ = image_shape
    # The format is said, since what the user has in keras.json may be another one.
    resizing = keras.layers.Resizing(height, width, antialias=True, data_format="channels_last", dtype="float32")
    return [resizing, keras.ops.round]


def normalize(
    mean: np.ndarray | float, scale: np.ndarray | float, image_shape: tuple[int, int, int]
) -> list[keras.layers.Layer]:
    """(x - mean) / scale in float32, to the last bit; nothing where that changes nothing.

    Keras's layer takes the variance, and the root of a square is exact; Rescaling would multiply by 1 / scale, which
    rounds otherwise.
    """
    means, scales = np.broadcast_arrays(np.asarray(mean, np.float32), np.asarray(scale, np.float32))
    if not means.any() and (scales == 1).all():
        return []
    axis = {0: None, 1: -1}.get(means.ndim, (1, 2, 3))
    if means.ndim > 1:
        means, scales = np.broadcast_to(means, image_shape), np.broadcast_to(scales, image_shape)
    layers: list[keras.layers.Layer] = []
    if scales.min() < _EPSILON:
        factor = np.float32(2.0 ** np.ceil(np.log2(_EPSILON / scales.min())))  # A power of two rounds nothing.
        layers.append(keras.layers.Rescaling(float(factor), dtype="float32"))
        means, scales = means * factor, scales * factor
    layers.append(keras.layers.Normalization(axis, means.tolist(), np.square(scales).tolist(), dtype="float32"))
    return layers
