"""Sizes of a built Keras model: its gradients in the order of the backward pass, and bytes in memory and on disk."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvtrain.plan.costs.step import Gradient

# Layers whose output shares the memory of their input.
_VIEWS = (keras.layers.Flatten, keras.layers.Reshape, keras.layers.Identity)


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank. activation_bytes estimates one batch; it is None if a layer's output shape is unknown."""

    weight_bytes: int
    gradient_bytes: int
    slot_bytes: int
    activation_bytes: int | None
    checkpoint_bytes: int
    num_parameters: int


def footprint(model: keras.Model, batch_size: int) -> Footprint:
    """Sizes of a compiled model whose optimizer is built.

    Activations are the outputs of all layers, kept for the backward pass. They are an estimate, since TensorFlow keeps
    less of some and more of others (work space of convolutions, gaps of the allocator); the rest is exact.
    """
    weights, slots = _bytes(model.weights), _bytes(model.optimizer.variables)
    return Footprint(
        weight_bytes=weights,
        gradient_bytes=_bytes(model.trainable_variables),
        slot_bytes=slots,
        activation_bytes=_activation_bytes(model, batch_size),
        checkpoint_bytes=weights + slots,
        num_parameters=model.count_params(),
    )


def gradients(model: keras.Model) -> list[Gradient]:
    """Gradients of the trainable variables, last layer first, with the multiplications for one example as work.

    Each weight of a kernel is used once at each position of the layer's output, in convolution, dense and depthwise
    layers alike. Layers without weights count as nothing.
    """
    found = []
    for layer in reversed(list(_layers(model))):
        variables, shape = layer.trainable_variables, _output_shape(layer)
        places = math.prod(shape[1:-1]) if shape and None not in shape[1:] else 1
        work = float(places * sum(math.prod(variable.shape) for variable in variables))
        for number, variable in enumerate(reversed(variables)):
            # The layer's work is done before its first gradient.
            found.append(Gradient(_bytes([variable]), 0.0 if number else work))
    return found


def _layers(model: Any) -> Iterator[Any]:
    """The innermost layers, those of nested models included."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _layers(layer)
        else:
            yield layer


def _output_shape(layer: Any) -> tuple[Any, ...] | None:
    try:
        output = layer.output
    except (AttributeError, ValueError):  # Never called, or called several times.
        return None
    return tuple(output.shape) if hasattr(output, "shape") else None


def _activation_bytes(model: Any, batch_size: int) -> int | None:
    total = 0
    for layer in _layers(model):
        shape = _output_shape(layer)
        if shape is None or None in shape[1:]:
            return None
        if not isinstance(layer, _VIEWS):
            total += math.prod(shape[1:]) * tf.as_dtype(layer.compute_dtype).size
    return total * batch_size


def _bytes(variables: list[Any]) -> int:
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)
