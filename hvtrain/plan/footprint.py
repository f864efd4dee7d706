"""What a built Keras model weighs: its gradients in the order of the backward pass, and bytes of memory and of disk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from hvtrain.plan.costs.step import Gradient

# What keeps its input's memory, or computes nothing while training.
_VIEWS = (keras.layers.Flatten, keras.layers.Reshape, keras.layers.Identity)


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank. activation_bytes: estimated, of one batch; None where the layers do not say their shapes."""

    weight_bytes: int
    gradient_bytes: int
    slot_bytes: int
    activation_bytes: int | None
    checkpoint_bytes: int
    num_parameters: int


def footprint(model: keras.Model, batch_size: int) -> Footprint:
    """Of a compiled model whose optimizer is built.

    Activations are all outputs of all layers, kept for the backward pass. TensorFlow keeps fewer of some and more of
    others (work space of convolutions, the allocator's gaps), so they are an estimate; the rest is exact.
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
    """Those of the trainable variables, last layer first, with multiplications of one example as work.

    Each weight of a kernel is used once at each place of the layer's output: convolution, dense and depthwise layers
    alike. What has no weights counts as nothing.
    """
    found = []
    for layer in reversed(list(_layers(model))):
        variables = layer.trainable_variables
        places = _places(layer)
        work = float(places * sum(math.prod(variable.shape) for variable in variables))
        for number, variable in enumerate(reversed(variables)):
            # The work of the layer is done before any of its gradients.
            found.append(Gradient(_bytes([variable]), 0.0 if number else work))
    return found


def _layers(model: Any) -> Iterator[Any]:
    """The layers with weights of their own, those inside models inside the model too."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _layers(layer)
        else:
            yield layer


def _places(layer: Any) -> int:
    shape = _output_shape(layer)
    return math.prod(shape[1:-1]) if shape and None not in shape[1:] else 1


def _output_shape(layer: Any) -> tuple[Any, ...] | None:
    try:
        output = layer.output
    except (AttributeError, ValueError):  # Never called, or in several places.
        return None
    return tuple(output.shape) if hasattr(output, "shape") else None


def _activation_bytes(model: Any, batch_size: int) -> int | None:
    total = 0
    for layer in _layers(model):
        shape = _output_shape(layer)
        if shape is None or None in shape[1:]:
            return None
        if not isinstance(layer, _VIEWS):
            total += math.prod(shape[1:]) * _size(layer.compute_dtype)
    return total * batch_size


def _bytes(variables: list[Any]) -> int:
    return sum(math.prod(variable.shape) * _size(variable.dtype) for variable in variables)


def _size(dtype: str) -> int:
    """Of one number.

    >>> _size("float32"), _size("bfloat16"), _size("int64")
    (4, 2, 8)
    """
    digits = "".join(filter(str.isdigit, str(dtype)))
    return max(1, int(digits) // 8) if digits else 1
