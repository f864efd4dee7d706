"""A source that repeats one random batch, to measure the speed of everything but the input."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.data import Dataset

from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import FOREVER, finish
from hvtrain.data.pipeline.transform import check_image_shape
from hvtrain.data.source import Source, StreamRequest
from hvtrain.data.sources.memory import check_counts, on_cpu


class Synthetic(Source):
    """A source of Gaussian noise and random labels; each rank repeats a batch. Nothing can be learned.

    The defaults have the size of ImageNet: 1,281,167 training images in 1000 classes.

    Example:
        python -m hvtrain dataset=synthetic model=resnet50 train.steps=100

    Args:
        image_shape: [height, width, channels].
        num_classes: number of classes; labels are whole numbers from 0 to num_classes - 1.
        num_train, num_validation, num_test: number of examples of each split, all from the same batch.

    Raises:
        ConfigError: if a number is out of range.
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
        check_counts(1, num_classes=num_classes)
        check_counts(num_train=num_train, num_validation=num_validation, num_test=num_test)
        self._counts = {"train": num_train, "validation": num_validation, "test": num_test}

    def num_examples(self, split: str) -> int:
        return self._counts.get(split, 0)

    def training(self, request: StreamRequest) -> Dataset:
        topology = request.topology
        images, labels = self._batch(topology, request.batch_size, request.seed)
        share = request.share_of(topology.share_size(self.num_examples("train")))
        # Full steps repeat the batch that is in memory.
        if share.is_full:
            return finish(Dataset.from_tensors((images, labels)).repeat(), topology)

        # Smaller steps get the first examples of the batch.
        def cut(step):
            step %= share.steps
            size = share.begin(step + 1) - share.begin(step)
            return images[:size], labels[:size]

        steps = Dataset.range(request.start_step, FOREVER)
        return finish(steps.map(cut), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> Dataset:
        batch = self._batch(topology, batch_size, seed=0)
        num_local = topology.share_size(self.num_examples(split))
        examples = Dataset.from_tensor_slices(batch).repeat().take(num_local)
        return finish(examples.batch(batch_size), topology)

    def _batch(self, topology: Topology, batch_size: int, seed: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a rank's only batch, a function of the seed and the rank."""
        random = np.random.default_rng([seed, topology.rank])
        images = random.standard_normal((batch_size, *self.image_shape), np.float32)
        labels = random.integers(self.num_classes, size=batch_size, dtype=np.int32)
        return on_cpu((images, labels))
