"""Changes training images, and their targets with them, by Keras layers: a pure function of a batch and a seed.

It takes raw images, in the type and the range of the data set, before they are normalized. So a stream stays a function
of (seed, rank, size, step), and resuming and regrouping need nothing of it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.data.pipeline.pure_layer import IMAGES, LABELS, MASKS, Batch, PureLayer, fold_in
from hvtrain.data.pipeline.streams import FOREVER, LAYERS, derive_seed, finish, unconverted
from hvtrain.data.source import StreamRequest
from hvtrain.errors import ConfigError


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
