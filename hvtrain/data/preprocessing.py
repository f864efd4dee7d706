"""Preprocessing of an example as the user has it into what the model trains on, as Keras layers of the saved model.

A source returns a Preprocessing (Source.preprocessing), and training/saved_model.py puts its layers before the model.
It may hold only what plain Keras loads without hvtrain, and it must give the same bits as the input pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

_EPSILON = 1e-6  # Keras's Normalization replaces scales below 1e-7; scales above this are safe from that.


@dataclass(frozen=True)
class Preprocessing:
    """Turns one raw example, of any numeric type, into the float32 image that the model trains on."""

    shape: tuple[int | None, ...]
    """Shape of a raw example; None for a side of any size."""
    layers: Sequence[Callable[[Any], Any]] = ()
    """Keras layers or functions of keras.ops, in order."""
    values: str = "as the data set's streams give them"
    """The values in a raw example, described for the user of the saved model."""
    range: tuple[float, float] | None = None
    """The smallest and the largest value, if known."""

    def inputs(self) -> keras.KerasTensor:
        """The input of a saved model: float32, to which Keras converts all other numeric types."""
        return keras.Input(self.shape, dtype="float32", name="raw")

    def __call__(self, raw: Any) -> Any:
        for layer in self.layers:
            raw = layer(raw)
        return raw


def reshape(shape: tuple[int | None, ...], image_shape: tuple[int, int, int]) -> list[keras.layers.Layer]:
    """Reshapes to [height, width, channels], unless an example has that shape already."""
    return [] if shape == image_shape else [keras.layers.Reshape(image_shape, dtype="float32")]


def resize(image_shape: tuple[int, int, int]) -> list[Callable[[Any], Any]]:
    """Resizes decoded pixels of any size and rounds them as for uint8, as pipeline/decode.py does."""
    height, width, _ = image_shape
    # Explicit, since the user's keras.json may name another format.
    resizing = keras.layers.Resizing(height, width, antialias=True, data_format="channels_last", dtype="float32")
    return [resizing, keras.ops.round]


def normalize(
    mean: np.ndarray | float, scale: np.ndarray | float, image_shape: tuple[int, int, int]
) -> list[keras.layers.Layer]:
    """(x - mean) / scale in float32, to the last bit; no layer if that changes nothing.

    Keras's Normalization takes the variance, and the root of a square is exact. Rescaling would multiply by 1 / scale,
    which rounds differently.
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
