"""One random batch, again and again, to measure the speed of everything but the data."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import FOREVER, finish
from hvtrain.data.pipeline.transform import check_image_shape
from hvtrain.data.source import Source, StreamRequest
from hvtrain.errors import ConfigError


class Synthetic(Source):
    """Normal noise and random labels, one batch per rank in memory. There is nothing to learn."""

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
        self.image_shape, self.num_classes = check_image_shape(image_shape), num_classes
        self._counts = {"train": num_train, "validation": num_validation, "test": num_test}
        for key, count in {"num_classes": num_classes, **{f"num_{k}": n for k, n in self._counts.items()}}.items():
            if count < 0:
                raise ConfigError(f"dataset.{key}={count} is negative")

    def num_examples(self, split: str) -> int:
        return self._counts.get(split, 0)

    def training(self, request: StreamRequest) -> tf.data.Dataset:
        topology = request.topology
        batch = self._batch(topology, request.batch_size, request.seed)
        share = request.share_of(topology.share_size(self.num_examples("train")))
        if share.is_full:
            return finish(tf.data.Dataset.from_tensors(batch).repeat(), topology)

        def cut(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            size = share.begin(step + 1, tf.minimum) - share.begin(step, tf.minimum)
            return batch[0][:size], batch[1][:size]

        steps = tf.data.Dataset.range(request.start_step, FOREVER).map(lambda step: step % share.steps)
        return finish(steps.map(cut), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        full, rest = divmod(topology.share_size(self.num_examples(split)), batch_size)
        images, labels = self._batch(topology, batch_size, seed=0)
        batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size).repeat(full)
        short = tf.data.Dataset.from_tensor_slices((images[:rest], labels[:rest])).batch(batch_size)
        return finish(batches.concatenate(short), topology)

    def _batch(self, topology: Topology, batch_size: int, seed: int) -> tuple[tf.Tensor, tf.Tensor]:
        random = np.random.default_rng([abs(seed), topology.rank])
        images = random.standard_normal((batch_size, *self.image_shape), np.float32)
        labels = random.integers(self.num_classes, size=batch_size, dtype=np.int32)
        with tf.device("CPU:0"):
            return tf.constant(images), tf.constant(labels)
