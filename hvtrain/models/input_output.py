"""Input and output of every network: the checked image that goes in, the float32 logits that come out."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvtrain.errors import ConfigError


def image_input(image_shape: Sequence[int], num_classes: int, *, network: str, min_side: int = 1) -> Any:
    """Input layer for images of shape (height, width, channels).

    Raises:
        ConfigError: if the shape is not an image's, a side is under min_side pixels, or there are not two classes.
    """
    shape = tuple(image_shape)
    if len(shape) != 3 or any(not isinstance(extent, int) or extent < 1 for extent in shape):
        raise ConfigError(
            f"{network} was given image_shape {shape}; it needs (height, width, channels), each at least 1: "
            "add the channel axis to grey images"
        )
    if min(shape[:2]) < min_side:
        raise ConfigError(
            f"{network} was given images of {shape[0]}x{shape[1]}; it needs {min_side}x{min_side} or more, "
            "because its pooling halves them: choose a smaller model (mlp, cnn) or enlarge the images"
        )
    if num_classes < 2:
        raise ConfigError(f"{network} was given num_classes={num_classes}; it needs at least 2")
    return keras.Input(shape, name="image")


def logits(features: Any, num_classes: int, initializer: str = "glorot_uniform") -> Any:
    """Dense layer without activation; float32 whatever the policy, because a softmax in bfloat16 loses digits."""
    return keras.layers.Dense(num_classes, kernel_initializer=initializer, dtype="float32", name="logits")(features)


def check_rate(network: str, option: str, rate: float) -> None:
    """Raises ConfigError unless rate is a fraction in [0, 1), as dropout needs."""
    if not 0 <= rate < 1:
        raise ConfigError(f"{network} was given {option}={rate}; it needs a fraction in [0, 1), such as 0.5")


def check_name(network: str, option: str, name: str, get: Callable[[str], Any], examples: str) -> None:
    """Raises ConfigError unless Keras has an activation or initializer of that name: get(name) finds it."""
    try:
        get(name)
    except ValueError:
        raise ConfigError(f"{network} was given {option}={name}; it needs a Keras name, such as {examples}") from None


def check_activation(network: str, name: str) -> None:
    check_name(network, "activation", name, keras.activations.get, "relu, selu, gelu or tanh")
