"""Makes a Keras layer a pure function of a batch and a seed, or says why that cannot be.

Keras's layers draw random numbers from generators with state, in variables: what a layer gives depends on how often it
was called before. Here the layer is traced once, with generators that make each number from the seed. Its graph is then
searched for any other state, so that a layer is not trusted but checked.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.random import seed_generator
from tensorflow.python.framework import op_def_registry

from hvtrain.errors import ConfigError, in_one_line, place_of

IMAGES, LABELS, MASKS = "images", "labels", "segmentation_masks"
"""Parts of a batch, as Keras's layers of augmentation name them."""
Batch = Mapping[str, Any]

fold_in = tf.random.experimental.stateless_fold_in
# TensorFlow marks them as if they had state; the parts of what they call are searched too.
_HARMLESS = {"Assert", "Case", "If", "While", "StatefulPartitionedCall", "VarHandleOp", "ReadVariableOp"}


class PureLayer:
    """A layer that gives a batch of images, with labels or masks, from such a batch and a seed int64 [2].

    A layer in the manner of Keras's, which has a method transform_labels or transform_segmentation_masks, takes the
    batch as a dict; any other one the images alone. Raises ConfigError for a layer that fails or is not pure.

    Args:
        place: its name in the configuration, for messages.
        spec: float32 tensors by part, of batches of any size.
    """

    def __init__(self, place: str, layer: keras.Layer, spec: Mapping[str, tf.TensorSpec]) -> None:
        self.place = f"{place} ({type(layer).__name__})"
        self.unchanged: set[str] = set()
        """Parts that it gives as it got them, whatever the seed."""
        takes_dict = takes_batches(layer)
        if MASKS in spec and not (takes_dict or isinstance(layer, keras.layers.RandomGrayscale)):
            raise ConfigError(
                f"{self.place} takes images alone, so masks would not move with them; give it a method "
                "transform_segmentation_masks and a call that takes a dict, as keras.layers.RandomFlip has"
            )

        def apply(batch: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
            training = {"training": True} if layer._call_has_training_arg else {}
            with drawing_from(seed):
                found = layer(dict(batch), **training) if takes_dict else {IMAGES: layer(batch[IMAGES], **training)}
            found = {name: tf.cast(found.get(name, part), tf.float32) for name, part in batch.items()}
            if MASKS in found:
                found[MASKS] = found[MASKS][..., :1]  # CutMix gives masks as many channels as images have.
            self.unchanged |= {name for name, part in batch.items() if _origin(found[name]) is _origin(part)}
            return found

        self.taken, self._traced = spec, self._trace(apply, spec)
        if layer.trainable_variables:
            raise ConfigError(f"{self.place} has weights, which nothing here would train; make it a part of the model")
        self.spec = {
            name: tf.TensorSpec(part.shape, part.dtype) for name, part in self._traced.structured_outputs.items()
        }

    def __call__(self, batch: Batch, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._traced(dict(batch), seed)

    def _trace(self, apply: Callable[..., Any], spec: Mapping[str, tf.TensorSpec]) -> Any:
        drawn = random.getstate(), repr(np.random.get_state())
        try:
            traced = tf.function(apply, autograph=False).get_concrete_function(dict(spec), tf.TensorSpec([2], tf.int64))
        except Exception as error:
            place, of = place_of(error), f"of shape {tuple(spec[IMAGES].shape[1:])}{' with masks' * (MASKS in spec)}"
            raise ConfigError(
                f"{self.place} fails on images {of}: {in_one_line(error).rstrip('.')}"
                f"{f' ({place})' if place else ''}; change its settings, or leave it out"
            ) from error
        if drawn != (random.getstate(), repr(np.random.get_state())):
            raise ConfigError(
                f"{self.place} draws from Python's or NumPy's random numbers, once and for all steps alike, so that a "
                "resumed run would differ; use keras.random, or choose another layer"
            )
        if found := _stateful(traced):
            raise ConfigError(
                f"{self.place} uses TensorFlow's {', '.join(found)}, which keeps state, so that a resumed run would "
                "differ; use keras.random and keras.ops, or choose another layer"
            )
        return traced


def takes_batches(layer: keras.Layer) -> bool:
    """True if the layer takes a dict of images, labels and masks."""
    if isinstance(layer, keras.layers.RandomGrayscale):
        return False  # It has the methods, and fails on a dict (Keras 3.15).
    return hasattr(layer, "transform_labels") or hasattr(layer, "transform_segmentation_masks")


@contextmanager
def drawing_from(seed: tf.Tensor) -> Iterator[None]:
    """While it lasts, all of Keras's seed generators make seeds from this one and the number of the draw."""
    numbers, generator = itertools.count(), keras.random.SeedGenerator
    following, first = generator.next, seed_generator.make_default_seed

    def next_seed(_: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
        return fold_in(seed, tf.constant(next(numbers), tf.int64))

    generator.next, seed_generator.make_default_seed = next_seed, lambda: 0
    try:
        yield
    finally:
        generator.next, seed_generator.make_default_seed = following, first


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that this one is a plain copy of."""
    while tensor.op.type in ("Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    return tensor


def _stateful(traced: Any) -> list[str]:
    """Kinds of operations in a function, and in what it calls, that keep state."""
    graph = traced.graph.as_graph_def()
    kinds = {node.op for node in graph.node} | {node.op for part in graph.library.function for node in part.node_def}
    known = {kind: op_def_registry.get(kind) for kind in kinds - _HARMLESS}
    return sorted(kind for kind, definition in known.items() if definition is not None and definition.is_stateful)
