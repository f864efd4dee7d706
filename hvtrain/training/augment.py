"""Opens the layers of `augment`: builds them for the images of the data set, and gives them to its training streams."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.data.pipeline.augmentation import Augmentation, Labels, Masks
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.tasks import Task

BYTES = (0.0, 255.0)


def open_augmentation(config: RunConfig, source: Source, task: Task, is_resized: bool = False) -> None:
    """Sets source.augmentation. Raises ConfigError for layers that do not fit the images or the targets.

    Keras's names and random numbers are to be reset afterwards, as they are for a model without augmentation.

    Args:
        is_resized: the run goes on with another number of ranks. Layers on the device then move to the input pipeline,
            where batches are still those of the ranks before.
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
    with tf.device("CPU:0"):
        layers = {place: layer for name in config.augment for place, layer in build_layers(config, name, source)}
    aim: Labels | Masks
    if task.targets_are_masks:
        ignored = getattr(task, "ignored_label", None)
        aim = Masks(0 if ignored is None else ignored)
    else:
        soften = None if weights else task.softener(source)
        aim = Labels(soften, _width(soften(_zeros(targets))) if soften else 1)
    # In a range smaller than that of a byte, such as 0 to 16, steps of 1 would be coarse.
    keeps_integers = source.value_range() == BYTES or inputs.dtype.is_integer
    shape = tuple(inputs.shape)
    source.augmentation = Augmentation(layers, shape, aim, keeps_integers, in_step and not is_resized)
    source.raw_batches = True


def build_layers(config: RunConfig, name: str, source: Source) -> Iterator[tuple[str, keras.Layer]]:
    """The layers of one entry of augment, by their place in the configuration."""
    height, width, _ = source.element_spec[0].shape
    facts: dict[str, Any] = {"height": height, "width": width}
    if limits := source.value_range():
        facts["value_range"] = limits
    place = f"augment.{name}"
    layer = build(config, place, keras.Layer, facts, source.name)
    if "value_range" not in str(config.augment[name]):
        for one in layer._flatten_layers():
            given = getattr(one, "value_range", None)
            if given is not None and (limits is None or tuple(given) != limits):
                known = f"gives images from {limits[0]:g} to {limits[1]:g}" if limits else "does not say its own"
                raise ConfigError(
                    f"{place} ({type(one).__name__}) is for values from {given[0]} to {given[1]}, and {source.name} "
                    f"{known}; set value_range in {place}"
                )
    yield from _in_turn(place, layer)


def _in_turn(place: str, layer: keras.Layer) -> Iterator[tuple[str, keras.Layer]]:
    """The layer, or those that it only calls one after the other."""
    if type(layer) not in (keras.layers.Pipeline, keras.Sequential):
        yield place, layer
        return
    for number, inner in enumerate(layer.layers):
        yield from _in_turn(f"{place}.layers[{number}]", inner)


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([1, *spec.shape], spec.dtype)


def _width(soft: tf.Tensor) -> int:
    return int(np.prod(soft.shape[1:]))
