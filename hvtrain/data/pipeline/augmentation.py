"""Changes training images, and their targets with them, by Keras layers: a pure function of a batch and a seed.

It takes raw images, in the type and the range of the data set, before they are normalized. So a stream stays a function
of (seed, rank, size, step), and resuming and regrouping need nothing of it.
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

from hvtrain.data.pipeline.streams import FOREVER, LAYERS, derive_seed, finish, unconverted
from hvtrain.data.source import StreamRequest
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


class Labels:
    """Targets that stay with their image, and are mixed where a layer mixes images, as MixUp does.

    Args:
        soften: targets as floats that may be mixed; None: they may not.
        width: numbers in the targets of an example, once they are soft.
    """

    part = LABELS

    def __init__(self, soften: Callable[[Any], tf.Tensor] | None = None, width: int = 1) -> None:
        self.soften, self.width, self.are_mixed = soften, width, False

    def spec(self, image_shape: tuple[int, int, int]) -> tf.TensorSpec:
        return tf.TensorSpec([None, self.width], tf.float32)

    def check(self, layer: PureLayer) -> None:
        if LABELS in layer.unchanged:
            return
        if self.soften is None:
            raise ConfigError(
                f"{layer.place} mixes the targets of examples, and those of this run cannot be mixed; leave it out, or "
                "choose task=classification, binary, multilabel or regression, without weights of examples"
            )
        self.are_mixed = True

    def encode(self, targets: Any, images: tf.Tensor) -> tf.Tensor:
        rows = self.soften(targets) if self.are_mixed and self.soften else tf.zeros([tf.shape(images)[0], self.width])
        return tf.reshape(rows, [-1, self.width])

    def decode(self, rows: tf.Tensor, targets: Any) -> Any:
        if not (self.are_mixed and self.soften):
            return targets
        soft = self.soften(targets)
        return tf.ensure_shape(tf.reshape(rows, tf.shape(soft)), soft.shape)


class Masks:
    """Targets with a class for each pixel, which moves with its image.

    Args:
        filling: the label of pixels that come in at a border.
    """

    part = MASKS
    are_mixed = False
    OFFSET = 2**20
    """Added to labels, so that whatever a layer fills in is none: that is how borders are found."""

    def __init__(self, filling: int) -> None:
        self.filling = filling

    def spec(self, image_shape: tuple[int, int, int]) -> tf.TensorSpec:
        return tf.TensorSpec([None, *image_shape[:2], 1], tf.float32)

    def check(self, layer: PureLayer) -> None:
        """Raises ConfigError if the layer blends labels, or leaves none."""
        shapes = {part: [4, *spec.shape[1:]] for part, spec in layer.taken.items()}
        labels = np.random.default_rng(0).integers(2, size=shapes[MASKS]) * 100
        batch = {IMAGES: tf.zeros(shapes[IMAGES]), MASKS: tf.constant(labels + self.OFFSET, tf.float32)}
        for number in range(4):
            found = layer(batch, tf.constant([0, number], tf.int64))[MASKS].numpy() - self.OFFSET
            found = found[np.abs(found) < self.OFFSET / 2]
            if not found.size or not np.isin(found, (0, 100)).all():
                raise ConfigError(f"{layer.place} blends or loses the labels of masks; leave it out")

    def encode(self, targets: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
        return tf.cast(targets, tf.float32)[..., None] + float(self.OFFSET)

    def decode(self, masks: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        labels = masks[..., 0] - float(self.OFFSET)
        is_label = tf.abs(labels) < self.OFFSET / 2
        labels = tf.where(is_label, tf.round(labels), float(self.filling))
        return tf.ensure_shape(tf.cast(labels, targets.dtype), targets.shape)


class Augmentation:
    """Layers in order, for batches of raw images and their targets. Raises ConfigError for layers that do not fit.

    Args:
        layers: by their place in the configuration.
        image_shape: of the data set, which images have at the end too.
        keeps_integers: images of whole numbers come back as such; otherwise as float32.
        in_step: batches get a seed, with which the step calls this; otherwise the input pipeline does.
    """

    def __init__(
        self,
        layers: Mapping[str, keras.Layer],
        image_shape: tuple[int, int, int],
        targets: Labels | Masks,
        keeps_integers: bool = True,
        in_step: bool = False,
    ) -> None:
        self.in_step, self._targets, self._keeps_integers = in_step, targets, keeps_integers
        self._layers: list[PureLayer] = []
        spec = {IMAGES: tf.TensorSpec([None, *image_shape], tf.float32), targets.part: targets.spec(image_shape)}
        for place, layer in layers.items():
            pure = PureLayer(place, layer, spec)
            targets.check(pure)
            self._layers.append(pure)
            spec = pure.spec
        if (came := tuple(spec[IMAGES].shape)) != (None, *image_shape):
            raise ConfigError(
                f"{self._layers[-1].place} gives images of shape {came[1:]} at the end of augment, and the model takes "
                f"{image_shape}; pad images before a crop, or end with keras.layers.Resizing"
            )

    @property
    def mixes(self) -> bool:
        """True if targets come back as floats, of several examples each."""
        return self._targets.are_mixed

    def __call__(self, images: tf.Tensor, targets: Any, seed: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Images and targets after all layers. Pure function of the arguments; seed is int64 [2]."""
        floats = tf.cast(images, tf.float32)
        batch: Batch = {IMAGES: floats, self._targets.part: self._targets.encode(targets, images)}
        for number, layer in enumerate(self._layers):
            batch = layer(batch, fold_in(seed, tf.constant(number, tf.int64)))
        found = tf.ensure_shape(batch[IMAGES], images.shape)
        if self._keeps_integers and images.dtype.is_integer:
            found = tf.saturate_cast(tf.round(found), images.dtype)
        return found, self._targets.decode(batch[self._targets.part], targets)

    def of_stream(self, batches: tf.data.Dataset, request: StreamRequest) -> tf.data.Dataset:
        """The batches of a source's training stream, augmented, or with their seeds: ((images, seed), targets, ...)."""

        @unconverted
        def augment(step: tf.Tensor, batch: tuple[Any, ...]) -> tuple[Any, ...]:
            images, targets, *weights = batch
            seed = derive_seed(request.seed, LAYERS, request.topology.rank, step)
            if self.in_step:
                return (images, seed), targets, *weights
            return *self(images, targets, seed), *weights

        steps = tf.data.Dataset.range(request.start_step, FOREVER)
        augmented = tf.data.Dataset.zip(steps, batches).map(augment, num_parallel_calls=tf.data.AUTOTUNE)
        return finish(augmented, request.topology)
