"""Builds the layers of `augment` for a data set's images, and gives them to its streams."""

import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.data.pipeline.augmentation import Augmentation, Labels, Masks
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.tasks import Task

BYTES = (0.0, 255.0)


def open_augmentation(
    config: RunConfig,
    source: Source,
    task: Task,
    is_resized: bool = False,
) -> None:
    """Builds the layers of augment, and sets source.augmentation.

    Raises ConfigError for layers that do not fit the images or the targets. Keras's names and
    random numbers are to be reset afterwards, as they are for a model without augmentation.

    Args:
        config: The run's settings.
        source: A data set of images.
        task: The task, which tells how targets are mixed.
        is_resized: The run goes on with another number of ranks. Layers on the device then move to
            the input pipeline, where batches are still those of the ranks before.
    """
    inputs, targets, *weights = source.element_spec
    if not isinstance(inputs, tf.TensorSpec) or inputs.shape.rank != 3:
        raise ConfigError(
            f"augment={', '.join(config.augment)} changes images, and {source.name} gives none; leave it out, or "
            "choose another data set"
        )
    in_step = config.data.augment_on == "device"
    if in_step and config.train.jit_compile:
        raise ConfigError(
            "data.augment_on=device and train.jit_compile=true exclude each other, since XLA cannot compile most "
            "layers of augmentation; choose data.augment_on=cpu"
        )

    keras.config.set_dtype_policy("float32")  # Whatever the precision of the model.
    layers: dict[str, keras.Layer] = {}
    with tf.device("CPU:0"):
        for name in config.augment:
            layers.update(build_layers(config, name, source))

    # In a range smaller than that of a byte, such as 0 to 16, steps of 1 would be coarse.
    keeps_integers = source.value_range() == BYTES or inputs.dtype.is_integer
    target_kind = _target_kind(source, task, targets, has_weights=bool(weights))
    shape = tuple(inputs.shape)
    source.augmentation = Augmentation(
        layers,
        shape,
        target_kind,
        keeps_integers,
        in_step and not is_resized,
    )
    source.raw_batches = True  # Layers take images as they are in the files; the step normalizes.


def _target_kind(
    source: Source,
    task: Task,
    spec: tf.TensorSpec,
    has_weights: bool,
) -> Labels | Masks:
    """Chooses how layers see targets: masks move with images, labels are mixed as numbers."""
    if task.targets_are_masks:
        ignored_label = getattr(task, "ignored_label", None)
        return Masks(0 if ignored_label is None else ignored_label)

    # Weights of examples would have to be mixed too, and layers do not get them.
    soften = None if has_weights else task.softener(source)
    if soften is None:
        return Labels(None, 1)
    softened = soften(tf.zeros([1, *spec.shape], spec.dtype))
    return Labels(soften, math.prod(softened.shape[1:]))


def build_layers(config: RunConfig, name: str, source: Source) -> dict[str, keras.Layer]:
    """Builds one entry of augment; returns its layers by their settings.

    Raises ConfigError for a layer whose value_range is not that of the images, and was not set.
    """
    height, width, _ = source.element_spec[0].shape
    facts: dict[str, Any] = {"height": height, "width": width}
    limits = source.value_range()
    if limits:
        facts["value_range"] = limits

    setting = f"augment.{name}"
    layer = build(config, setting, keras.Layer, facts, source.name)
    # With another range, such as a default of 0 to 255, a layer would clip images wrongly.
    if "value_range" not in str(config.augment[name]):
        for inner in layer._flatten_layers():
            own_range = getattr(inner, "value_range", None)
            if own_range is None or (limits and tuple(own_range) == limits):
                continue
            known = f"gives images from {limits[0]:g} to {limits[1]:g}" if limits else "does not say its own"
            raise ConfigError(
                f"{setting} ({type(inner).__name__}) is for values from {own_range[0]} to {own_range[1]}, and "
                f"{source.name} {known}; set value_range in {setting}"
            )

    return dict(_in_turn(setting, layer))


def _in_turn(setting: str, layer: keras.Layer) -> Iterator[tuple[str, keras.Layer]]:
    """The layer, or those that it only calls one after the other."""
    if type(layer) not in (keras.layers.Pipeline, keras.Sequential):
        yield setting, layer
        return
    for number, inner in enumerate(layer.layers):
        yield from _in_turn(f"{setting}.layers[{number}]", inner)
