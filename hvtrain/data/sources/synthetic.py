"""One random batch, repeated, to measure the speed of everything but the data."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import FOREVER, finish
from hvtrain.data.pipeline.transform import check_image_shape
from hvtrain.data.source import Source, StreamRequest
from hvtrain.errors import ConfigError


class Synthetic(Source):
    """Normal noise and random labels, one batch per rank in memory. There is nothing to learn.

    The defaults are those of ImageNet.
    """

    name = "synthetic"
    origin = "random numbers"

    def __init__(
        self,
        image_shape: Sequence[int] = (224, 224, 3),
        num_classes: int = 1000,
        num_train: int = 1_281_167,
        num_validation: int = 0,
        num_test: int = 0,
    ) -> None:
        self.image_shape = check_image_shape(image_shape)
        self.num_classes = num_classes
        self._counts = {"train": num_train, "validation": num_validation, "test": num_test}

        counts = {f"num_{split}": count for split, count in self._counts.items()}
        for name, count in {"num_classes": num_classes, **counts}.items():
            if count < 0:
                raise ConfigError(f"dataset.{name}={count} is negative")

    def num_examples(self, split: str) -> int:
        return self._counts.get(split, 0)

    def training(self, request: StreamRequest) -> tf.data.Dataset:
        topology = request.topology
        images, labels = self._batch(topology, request.batch_size, request.seed)
        share = request.share_of(topology.share_size(self.num_examples("train")))
        if share.is_full:
            batch = tf.data.Dataset.from_tensors((images, labels))
            return finish(batch.repeat(), topology)

        def cut(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            size = share.begin(step + 1, tf.minimum) - share.begin(step, tf.minimum)
            return images[:size], labels[:size]

        steps = tf.data.Dataset.range(request.start_step, FOREVER).map(lambda step: step % share.steps)
        return finish(steps.map(cut), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        num_full, num_last = divmod(topology.share_size(self.num_examples(split)), batch_size)
        images, labels = self._batch(topology, batch_size, seed=0)
        full = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size)
        last = tf.data.Dataset.from_tensor_slices((images[:num_last], labels[:num_last])).batch(batch_size)
        return finish(full.repeat(num_full).concatenate(last), topology)

    def _batch(self, topology: Topology, batch_size: int, seed: int) -> tuple[tf.Tensor, tf.Tensor]:
        random = np.random.default_rng([abs(seed), topology.rank])
        images = random.standard_normal((batch_size, *self.image_shape), np.float32)
        labels = random.integers(self.num_classes, size=batch_size, dtype=np.int32)
        with tf.device("CPU:0"):
            return tf.constant(images), tf.constant(labels)
