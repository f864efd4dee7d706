"""The size of a model in bytes: weights, gradients, optimizer slots, activations. Pure."""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

# Layers whose output shares the memory of their input.
_VIEWS = (keras.layers.Flatten, keras.layers.Reshape, keras.layers.Identity)


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank. activation_bytes estimates one batch; it is None if a layer's output shape is unknown."""

    weight_bytes: int
    gradient_bytes: int
    slot_bytes: int
    activation_bytes: int | None

    @property
    def checkpoint_bytes(self) -> int:
        return self.weight_bytes + self.slot_bytes


def footprint(model: keras.Model, batch_size: int) -> Footprint:
    """Sizes of a compiled model whose optimizer is built.

    Activations are the outputs of all layers, kept for the backward pass. They are an estimate,
    since TensorFlow keeps less of some and more of others (work space of convolutions, gaps of the
    allocator); the rest is exact.
    """
    return Footprint(
        weight_bytes=num_bytes(model.weights),
        gradient_bytes=num_bytes(model.trainable_variables),
        slot_bytes=num_bytes(model.optimizer.variables),
        activation_bytes=_activation_bytes(model, batch_size),
    )


def num_bytes(variables: Iterable[Any]) -> int:
    """Bytes of the variables' values."""
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)


def innermost_layers(model: Any) -> Iterator[Any]:
    """The innermost layers, those of nested models included."""
    for layer in model.layers:
        yield from innermost_layers(layer) if isinstance(layer, keras.Model) else [layer]


def example_shape(layer: Any) -> tuple[int, ...] | None:
    """Shape of a layer's output for one example; None if it is not known."""
    with suppress(AttributeError, ValueError):  # Never called, or called several times; or several outputs.
        shape = tuple(layer.output.shape[1:])
        return None if None in shape else shape
    return None


def _activation_bytes(model: Any, batch_size: int) -> int | None:
    total = 0
    for layer in innermost_layers(model):
        # A layer of unknown shape makes the whole estimate worthless.
        shape = example_shape(layer)
        if shape is None:
            return None
        # A view has no memory of its own.
        if not isinstance(layer, _VIEWS):
            total += math.prod(shape) * tf.as_dtype(layer.compute_dtype).size

    return total * batch_size
