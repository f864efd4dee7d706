"""Any network of keras.applications by its name, untrained, with a head for the data set's classes."""

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import layers

from hvtrain.errors import ConfigError
from hvtrain.models.networks import check_rate, image_input, logits

# Options that this builder sets itself; a network's others (alpha, minimalistic ...) are up to the user.
OURS = {"include_top", "include_preprocessing", "weights", "input_tensor", "input_shape", "pooling", "classes"}
OURS |= {"classifier_activation", "dropout", "dropout_rate", "name"}


def application(
    image_shape: Sequence[int], num_outputs: int, name: str, dropout: float = 0.0, **options: Any
) -> keras.Model:
    """keras.applications.<name> with random weights, global average pooling, dropout and a dense layer of logits.

    Two things differ from Keras's own, so the network is built once and then cloned layer by layer:
    - rescaling and normalization layers, with which some networks (EfficientNet, ConvNeXt ...) begin, are removed,
      because the images are normalized already;
    - layers that Keras named itself get the names that a new process would give them (see _fresh_names).

    options: passed on to the network, such as alpha=0.5 for MobileNet.

    Raises:
        ConfigError: no such network, an image smaller than the network takes (usually 32x32), unknown options.
    """
    check_rate(name, dropout)
    image = image_input(image_shape, num_outputs, network=name)
    trunk = body(image_shape, name, pooling="avg", **options)
    x = clone(trunk, image).output
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    return keras.Model(image, logits(x, num_outputs), name=trunk.name)


def body(image_shape: Sequence[int], name: str, pooling: str | None = None, **options: Any) -> keras.Model:
    """Keras's own network without its head, with random weights. Raises ConfigError."""
    networks = {key: value for key, value in vars(keras.applications).items() if inspect.isfunction(value)}
    if name not in networks:
        by_lower_case = {key.lower(): key for key in networks}
        near = [by_lower_case[key] for key in difflib.get_close_matches(str(name).lower(), by_lower_case, n=4)]
        known = f"the nearest: {', '.join(near)}" if near else f"it has {', '.join(sorted(networks))}"
        raise ConfigError(f"keras.applications has no network {name!r}; {known}")
    free = sorted(set(inspect.signature(networks[name]).parameters) - OURS)
    if unknown := sorted(set(options) - set(free)):
        takes = ", ".join(free) if free else "none"
        raise ConfigError(f"{name} was given the options {', '.join(unknown)}; those that can be set are: {takes}")
    try:
        return networks[name](
            include_top=False, weights=None, pooling=pooling, input_shape=tuple(image_shape), **options
        )
    except ValueError as error:
        raise ConfigError(
            f"keras.applications.{name} was given images of shape {tuple(image_shape)} and options {options}, "
            f"and answered: {error}; enlarge the images, fix the option or choose a smaller model (resnet20, cnn)"
        ) from error


def clone(trunk: keras.Model, image: Any, changes: Mapping[str, dict[str, Any]] | None = None) -> keras.Model:
    """The network on another input, without rescaling and normalization, and with fresh names.

    changes: settings of layers, by the name that they have in the trunk, to build them with others.
    """
    names = _fresh_names(trunk)

    def rebuild(layer: Any) -> Any:
        fresh = names.get(layer.name, layer.name)
        if isinstance(layer, (layers.Rescaling, layers.Normalization)):
            return layers.Identity(name=fresh)
        return layer.__class__.from_config({**layer.get_config(), **(changes or {}).get(layer.name, {}), "name": fresh})

    return keras.models.clone_model(trunk, input_tensors=image, clone_function=rebuild)


def _fresh_names(model: keras.Model) -> dict[str, str]:
    """New names of the layers that Keras named itself, by class name and a number counted through the process.

    A second InceptionV3 in one process begins at conv2d_94 instead of conv2d, so it could not load a checkpoint of
    the first. Counting within the model gives both the same names.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for layer in model.layers:
        prefix, number = re.fullmatch(r"(.*?)(?:_(\d+))?", layer.name).groups()  # type: ignore[union-attr]
        if prefix.replace("_", "") == type(layer).__name__.lower():
            found.setdefault(prefix, []).append((int(number or 0), layer.name))
    return {
        old: prefix if i == 0 else f"{prefix}_{i}"
        for prefix, numbered in found.items()
        for i, (_, old) in enumerate(sorted(numbered))
    }
