"""Builds the augmentation layers that the setting `augment` names, for the streams of the data set."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.data.pipeline.augmentation import Augmentation, Labels, Masks
from hvtrain.data.pipeline.decoding import RandomResizedCrop
from hvtrain.data.pipeline.streams import are_per_pixel
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.tasks import Task

BYTES = (0.0, 255.0)
# Layers that move no pixels, and so need not move the targets.
COLORS = (
    layers.AutoContrast,
    layers.Equalization,
    layers.GaussianNoise,
    layers.RandomBrightness,
    layers.RandomColorDegeneration,
    layers.RandomColorJitter,
    layers.RandomContrast,
    layers.RandomGaussianBlur,
    layers.RandomGrayscale,
    layers.RandomHue,
    layers.RandomInvert,
    layers.RandomPosterization,
    layers.RandomSaturation,
    layers.RandomSharpness,
    layers.Solarization,
)
# Layers that change the range of images.
SCALING = (layers.Rescaling, layers.Normalization)
CROP_TARGET = f"{RandomResizedCrop.__module__}.{RandomResizedCrop.__name__}"


def open_augmentation(config: RunConfig, source: Source, task: Task) -> None:
    """Builds the layers that `augment` names, and sets source.augmentation and source.raw_batches.

    A random_resized_crop goes to source.sizing instead. The caller must reset Keras's names and random
    numbers afterwards, so that the model is the same as without augmentation.

    Args:
        config: The run's settings.
        source: The data set.
        task: The task, which determines how targets are mixed.

    Raises:
        ConfigError: The data set has no images, or a layer does not fit its images or targets.
    """
    inputs = source.element_spec[0]
    if not isinstance(inputs, tf.TensorSpec) or inputs.shape.rank != 3:
        raise ConfigError(
            f"augment={', '.join(config.augment)} works on images, and {source.name} has none; leave augment out, or "
            "choose another data set"
        )
    with tf.device("CPU:0"):
        names = _take_random_crop(config, source)
    if not names:
        return
    in_step = config.data.augment_on == "device"
    if in_step and config.train.jit_compile:
        raise ConfigError(
            "data.augment_on=device and train.jit_compile=true exclude each other, since XLA cannot compile most "
            "augmentation layers; choose data.augment_on=cpu"
        )

    # Layers work on float32, whatever the model's precision.
    keras.config.set_dtype_policy("float32")
    limits = source.value_range()
    height, width, _ = inputs.shape
    facts: dict[str, Any] = {"height": height, "width": width}
    if limits:
        facts["value_range"] = limits
    chosen: dict[str, keras.Layer] = {}
    for name in names:
        setting = f"augment.{name}"
        with tf.device("CPU:0"):
            layer = build(config, setting, keras.Layer, facts, source.name)
        has_range = "value_range" in str(config.augment[name])
        members = dict(_members(setting, layer))
        _refuse_scaling(setting, list(members.values()), has_range)
        if not has_range:
            _check_range(setting, layer, limits, source.name)
        chosen.update(members)

    # In a smaller range, such as 0 to 16, rounding to integers would be too coarse.
    keeps_integers = limits == BYTES or inputs.dtype.is_integer
    moves_pixels = not all(isinstance(layer, COLORS) for layer in chosen.values())
    targets = _target_kind(source, task, moves_pixels)
    source.augmentation = Augmentation(
        chosen, tuple(inputs.shape), targets, keeps_integers, in_step
    )
    source.raw_batches = True  # Layers take images as the files store them; the step normalizes.


def describe_augmentation(config: RunConfig, source: Source) -> str:
    """Describes the layers: their names, and where they run."""
    names = list(config.augment)
    device = "device" if source.augmentation and source.augmentation.in_step else "cpu"
    if device == "device" and source.sizing and source.sizing.crop:
        # A random crop is taken while images are decoded, wherever the layers after it run.
        names[0] += " (on the cpu)"
    return f"{', '.join(names)} (on the {device})"


def _take_random_crop(config: RunConfig, source: Source) -> list[str]:
    """Moves a leading random crop from the layers to source.sizing; returns the names of the other layers.

    Raises ConfigError if the source cannot crop, or another layer comes first.
    """
    names = list(config.augment)
    crops = [name for name in names if config.augment[name].get("_target_") == CROP_TARGET]
    if not crops:
        return names
    if crops[-1] != names[0]:
        raise ConfigError(
            f"augment=[{','.join(names)}]: {crops[-1]} runs while images are decoded, before any layer; list it "
            "first, and only once"
        )
    if source.no_random_crop:
        raise ConfigError(
            f"augment={crops[0]} is taken while images are decoded, and {source.name} {source.no_random_crop}; use "
            "other layers, such as augment=[random_zoom,random_translation]"
        )
    crop = build(config, f"augment.{crops[0]}", RandomResizedCrop)
    source.sizing = replace(source.sizing, crop=crop)
    return names[1:]


def _target_kind(source: Source, task: Task, moves_pixels: bool) -> Labels | Masks:
    """Returns how layers treat targets: masks move with their images, and labels can only be mixed.

    Raises ConfigError if a layer moves pixels, and other targets or weights have a value for each pixel.
    """
    image, targets, *weights = source.element_spec
    others = weights if task.targets_are_masks else (targets, weights)
    if moves_pixels and are_per_pixel(image, others):
        raise ConfigError(
            "augment has layers that move the pixels of images, but not those of the targets or weights of "
            f"{source.name}; use only layers that change colors"
        )
    if task.targets_are_masks:
        return Masks(getattr(task, "ignored_label", None) or 0)

    # Example weights would have to be mixed with the targets, but layers do not get them.
    soften = None if weights else task.softener(source)
    if soften is None:
        return Labels(None, 1)
    softened = soften(tf.zeros([1, *targets.shape], targets.dtype))
    return Labels(soften, math.prod(softened.shape[1:]))


def _refuse_scaling(setting: str, members: list[keras.Layer], has_range: bool) -> None:
    """Raises ConfigError if layers rescale the training images, since validation images are not augmented.

    Args:
        setting: The setting that the layers belong to.
        members: The layers, in order.
        has_range: True if the setting has value_range: the images are then scaled back to that range, by
            the user's own layer or by a second Rescaling.
    """
    num_scaling = sum(isinstance(member, SCALING) for member in members)
    has_own_layer = any(not type(member).__module__.startswith("keras.") for member in members)
    if has_range and (num_scaling != 1 or has_own_layer):
        return
    for member in members:
        for inner in member._flatten_layers():
            if isinstance(inner, SCALING):
                raise ConfigError(
                    f"{setting} ({type(inner).__name__}) would rescale the training images but not the validation "
                    f"images; leave it out, or scale the images back and set value_range in {setting}"
                )


def _check_range(
    setting: str,
    layer: keras.Layer,
    limits: tuple[float, float] | None,
    source_name: str,
) -> None:
    """Raises ConfigError if a layer's value_range, such as the default 0 to 255, is not the range of the images.

    A layer with another range would clip the images.

    Args:
        setting: The layer's setting, in which value_range is not set.
        layer: The layer, which may hold others.
        limits: The range of the data set's images, if it is known.
        source_name: The name of the data set.
    """
    for inner in layer._flatten_layers():
        own_range = getattr(inner, "value_range", None)
        if own_range is None or tuple(own_range) == limits:
            continue
        source_range = "does not give the range of its images"
        if limits:
            source_range = f"gives images from {limits[0]:g} to {limits[1]:g}"
        raise ConfigError(
            f"{setting} ({type(inner).__name__}) is for values from {own_range[0]} to {own_range[1]}, and "
            f"{source_name} {source_range}; set value_range in {setting}"
        )


def _members(setting: str, layer: keras.Layer) -> Iterator[tuple[str, keras.Layer]]:
    """Yields (setting, layer) for the layer, or for each inner layer of a Pipeline or Sequential."""
    if type(layer) not in (layers.Pipeline, keras.Sequential):
        yield setting, layer
        return
    for index, inner in enumerate(layer.layers):
        yield from _members(f"{setting}.layers[{index}]", inner)
