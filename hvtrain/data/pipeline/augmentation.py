"""Augments training images and their targets with Keras layers, turned into pure functions.

Keras's layers draw random numbers from generators that keep their state in variables, so the output
of a layer depends on how often it was called before. Here a layer is traced once, with generators
that derive each number from a seed. Its graph is then searched for any other state.

So a stream stays a function of (seed, rank, size, step), and can be resumed and regrouped without
saved state. Layers get raw images, in the range of the data set, before they are normalized.
"""

import itertools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.random import seed_generator
from tensorflow import Tensor, TensorSpec
from tensorflow.data import Dataset
from tensorflow.python.framework import op_def_registry

from hvtrain.data.pipeline.streams import LAYERS, derive_seed, finish, unconverted
from hvtrain.data.pipeline.transform import fold_in
from hvtrain.data.source import ImageShape, StreamRequest
from hvtrain.errors import ConfigError, cause_of

# Parts of a batch, as Keras's augmentation layers name them.
IMAGES = "images"
LABELS = "labels"
MASKS = "segmentation_masks"

Batch = dict[str, Any]

# TensorFlow marks these operations as stateful, but they keep no state of their own. Some call
# functions, which are searched as well.
_HARMLESS = {
    "Assert",
    "Case",
    "If",
    "While",
    "StatefulPartitionedCall",
    "VarHandleOp",
    "ReadVariableOp",
}


class PureLayer:
    """A layer as a pure function of a batch and a seed int64 [2].

    A layer that, like Keras's, has a method transform_labels or transform_segmentation_masks gets
    the batch as a dict; any other gets the images alone.

    Args:
        setting: The layer's name in the configuration, for messages.
        spec: Specs of the float32 tensors in a batch of any size, by part.

    Raises:
        ConfigError: The layer fails, has weights, or is not pure.
    """

    def __init__(self, setting: str, layer: keras.Layer, spec: Mapping[str, TensorSpec]) -> None:
        self.name = f"{setting} ({type(layer).__name__})"
        self.input_spec = spec
        self.unchanged: set[str] = set()
        """Parts that are returned unchanged, whatever the seed."""

        self._layer = layer
        # RandomGrayscale has the methods too, but fails on a dict (Keras 3.15). It moves no pixels,
        # so masks need not change with the images.
        is_grayscale = isinstance(layer, keras.layers.RandomGrayscale)
        self._takes_dict = not is_grayscale and (
            hasattr(layer, "transform_labels") or hasattr(layer, "transform_segmentation_masks")
        )
        if MASKS in spec and not (self._takes_dict or is_grayscale):
            raise ConfigError(
                f"{self.name} takes images alone, so masks would not move with them; give it a "
                "method transform_segmentation_masks and a call that takes a dict, as "
                "keras.layers.RandomFlip has"
            )

        self._traced = self._trace()
        # Checked after tracing, which creates the weights.
        if layer.trainable_variables:
            raise ConfigError(
                f"{self.name} has weights, which would stay untrained; make it a part of the model"
            )
        outputs = self._traced.structured_outputs
        self.output_spec = {
            name: TensorSpec(part.shape, part.dtype) for name, part in outputs.items()
        }

    def __call__(self, batch: Batch, seed: Tensor) -> dict[str, Tensor]:
        return self._traced(batch, seed)

    def _apply(self, batch: Batch, seed: Tensor) -> dict[str, Tensor]:
        """Calls the layer with random numbers from the seed, and notes which parts it leaves unchanged."""
        # Augmentation layers change images only in training mode.
        training = {"training": True} if self._layer._call_has_training_arg else {}
        with drawing_from(seed):
            changed = self._layer(dict(batch) if self._takes_dict else batch[IMAGES], **training)
        if not self._takes_dict:
            changed = {IMAGES: changed}

        # A layer may leave parts out, and may compute in another type.
        outputs = {}
        for name, part in batch.items():
            output = tf.cast(changed.get(name, part), tf.float32)
            if name == MASKS:
                # CutMix returns masks with as many channels as the images.
                output = output[..., :1]
            # Decided from the graph, since values could be equal by chance.
            if _origin(output) is _origin(part):
                self.unchanged.add(name)
            outputs[name] = output
        return outputs

    def _trace(self) -> Any:
        """Traces the layer. Raises ConfigError if that fails or its graph is not pure."""
        python_state = random.getstate()
        numpy_state = repr(np.random.get_state())
        try:
            traced = tf.function(self._apply, autograph=False).get_concrete_function(
                dict(self.input_spec), TensorSpec([2], tf.int64)
            )
        except Exception as error:
            images = f"images of shape {tuple(self.input_spec[IMAGES].shape[1:])}"
            if MASKS in self.input_spec:
                images += " with masks"
            raise ConfigError(
                f"{self.name} fails on {images}: {cause_of(error)}; change its settings, or leave it out"
            ) from error

        # A number that Python or NumPy draws during tracing becomes a constant in the graph.
        if python_state != random.getstate() or numpy_state != repr(np.random.get_state()):
            raise ConfigError(
                f"{self.name} draws random numbers from Python or NumPy, which would be the same in all steps and "
                "would change after a resume; use keras.random, or choose another layer"
            )
        operations = _stateful_operations(traced)
        if operations:
            raise ConfigError(
                f"{self.name} uses TensorFlow's {', '.join(operations)}, which keeps state, so that "
                "a resumed run would differ; use keras.random and keras.ops, or choose another layer"
            )
        return traced


@contextmanager
def drawing_from(seed: Tensor) -> Iterator[None]:
    """Makes all of Keras's seed generators derive the n-th draw from this seed and n."""
    draws = itertools.count()
    generator = keras.random.SeedGenerator
    original_next = generator.next
    original_default = seed_generator.make_default_seed

    generator.next = lambda _, ordered=True: fold_in(seed, next(draws))
    # A generator that the layer creates during tracing would draw its seed from Python's random.
    seed_generator.make_default_seed = lambda: 0
    try:
        yield
    finally:
        generator.next = original_next
        seed_generator.make_default_seed = original_default


def _origin(tensor: Tensor) -> Tensor:
    """Follows copies and casts back to the tensor that they came from."""
    while tensor.op.type in ("Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    return tensor


def _stateful_operations(traced: Any) -> list[str]:
    """Returns the types of operations that keep state, in a traced function and all functions that it calls."""
    graph = traced.graph.as_graph_def()
    types = {node.op for node in graph.node}
    types |= {node.op for function in graph.library.function for node in function.node_def}
    # Unregistered names are those of functions in the graph's library.
    definitions = [op_def_registry.get(name) for name in types - _HARMLESS]
    return sorted(op.name for op in definitions if op is not None and op.is_stateful)


@dataclass
class Labels:
    """Targets that belong to whole images; they are mixed if a layer mixes images, as MixUp does.

    Args:
        soften: Turns targets into floats that can be mixed. None if the targets cannot be mixed.
        width: Number of floats per example in the softened targets.
    """

    part = LABELS
    are_mixed = False
    """True once a layer mixes targets; until then targets bypass all layers."""

    soften: Any
    width: int

    def spec(self, image_shape: ImageShape) -> TensorSpec:
        return TensorSpec([None, self.width], tf.float32)

    def check(self, layer: PureLayer) -> None:
        """Raises ConfigError if the layer mixes targets that cannot be mixed."""
        if LABELS in layer.unchanged:
            return
        if self.soften is None:
            raise ConfigError(
                f"{layer.name} mixes the targets of examples, and this run's targets cannot be "
                "mixed; leave it out, or choose task=classification, binary, multilabel or "
                "regression, without sample weights"
            )
        self.are_mixed = True

    def encode(self, targets: Any, images: Tensor) -> Tensor:
        if not self.are_mixed:
            # No layer changes the targets, so zeros stand in for them.
            return tf.zeros([tf.shape(images)[0], self.width])
        return tf.reshape(self.soften(targets), [-1, self.width])

    def decode(self, rows: Tensor, targets: Any) -> Any:
        if not self.are_mixed:
            return targets
        soft = self.soften(targets)
        return tf.ensure_shape(tf.reshape(rows, tf.shape(soft)), soft.shape)


@dataclass
class Masks:
    """Targets with a class for each pixel, which move with their image.

    Args:
        fill_label: The label for pixels that a layer fills in at a border.
    """

    part = MASKS
    are_mixed = False
    OFFSET = 2.0**20
    """Added to labels, so that values that a layer fills in at a border, such as 0, cannot be taken for
    labels. The sums are exact, since float32 holds all integers up to 2**24."""

    fill_label: int

    def spec(self, image_shape: ImageShape) -> TensorSpec:
        return TensorSpec([None, *image_shape[:2], 1], tf.float32)

    def check(self, layer: PureLayer) -> None:
        """Raises ConfigError if the layer blends labels, or loses all of them."""
        shapes = {part: [4, *spec.shape[1:]] for part, spec in layer.input_spec.items()}
        # A blend of the labels 0 and 100 equals neither of them.
        labels = np.random.default_rng(0).integers(2, size=shapes[MASKS]) * 100
        batch = {
            IMAGES: tf.zeros(shapes[IMAGES]),
            MASKS: tf.constant(labels + self.OFFSET, tf.float32),
        }
        # A random layer may leave a batch unchanged, so four seeds are tried.
        for number in range(4):
            masks = layer(batch, tf.constant([0, number], tf.int64))[MASKS].numpy()
            remaining = masks - self.OFFSET
            remaining = remaining[np.abs(remaining) < self.OFFSET / 2]
            if not remaining.size or not np.isin(remaining, (0, 100)).all():
                raise ConfigError(f"{layer.name} blends or loses the labels of masks; leave it out")

    def encode(self, targets: Tensor, images: Tensor) -> Tensor:
        return tf.cast(targets, tf.float32)[..., None] + self.OFFSET

    def decode(self, masks: Tensor, targets: Tensor) -> Tensor:
        # Values that a layer filled in at a border are far from OFFSET.
        labels = masks[..., 0] - self.OFFSET
        is_label = tf.abs(labels) < self.OFFSET / 2
        labels = tf.where(is_label, tf.round(labels), float(self.fill_label))
        return tf.ensure_shape(tf.cast(labels, targets.dtype), targets.shape)


class Augmentation:
    """Applies layers in order to batches of raw images and their targets.

    Args:
        layers: The layers by their names in the configuration.
        image_shape: Shape of the data set's images, which the last layer has to return as well.
        targets: Labels or Masks, which determine how targets follow their images.
        keeps_integers: If True, integer images keep their type; else all images become float32.
        in_step: If True, the training step augments, with a seed from the batch; else the input pipeline does.

    Raises:
        ConfigError: A layer is not pure, or does not fit the images or the targets.
    """

    def __init__(
        self,
        layers: Mapping[str, keras.Layer],
        image_shape: ImageShape,
        targets: Labels | Masks,
        keeps_integers: bool = True,
        in_step: bool = False,
    ) -> None:
        self.in_step = in_step
        self._targets = targets
        self._keeps_integers = keeps_integers

        self._layers: list[PureLayer] = []
        spec = {
            IMAGES: TensorSpec([None, *image_shape], tf.float32),
            targets.part: targets.spec(image_shape),
        }
        for setting, layer in layers.items():
            pure = PureLayer(setting, layer, spec)
            targets.check(pure)
            self._layers.append(pure)
            spec = pure.output_spec

        self.mixes = targets.are_mixed
        """True if targets are returned as floats, mixed from several examples."""

        last_shape = tuple(spec[IMAGES].shape)
        if last_shape != (None, *image_shape):
            raise ConfigError(
                f"{self._layers[-1].name} gives images of shape {last_shape[1:]} at the end of "
                f"augment, and the model takes {image_shape}; pad images before a crop, or end "
                "with keras.layers.Resizing"
            )

    def __call__(self, images: Tensor, targets: Any, seed: Tensor) -> tuple[Tensor, Any]:
        """Applies all layers to images and targets. A pure function; the seed is int64 [2]."""
        batch = {
            IMAGES: tf.cast(images, tf.float32),
            self._targets.part: self._targets.encode(targets, images),
        }
        # Each layer gets a different seed, so that two equal layers act differently.
        for index, layer in enumerate(self._layers):
            batch = layer(batch, fold_in(seed, index))

        augmented = tf.ensure_shape(batch[IMAGES], images.shape)
        # Rounded, since a cast alone would truncate 254.9 to 254.
        if self._keeps_integers and images.dtype.is_integer:
            augmented = tf.saturate_cast(tf.round(augmented), images.dtype)
        return augmented, self._targets.decode(batch[self._targets.part], targets)

    def augment_stream(self, batches: Dataset, request: StreamRequest) -> Dataset:
        """Augments a source's training stream or, with in_step, adds the seeds with which the step augments.

        Returns:
            Augmented batches; with in_step, unchanged batches as ((images, seed), targets, ...).
        """

        @unconverted
        def augment(step, batch):
            images, targets, *weights = batch
            seed = derive_seed(request.seed, LAYERS, request.topology.rank, step)
            if self.in_step:
                return (images, seed), targets, *weights
            return *self(images, targets, seed), *weights

        numbered = batches.enumerate(request.start_step)
        return finish(numbered.map(augment, num_parallel_calls=tf.data.AUTOTUNE), request.topology)
