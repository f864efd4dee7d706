"""Streams over anything that is read by index: seeds, epoch orders, batches, options. The shard comes in.

Skipping happens on rows of indices, before a pixel is touched, so resuming at step 100,000 costs nothing.
"""

from __future__ import annotations

import atexit
import gc
from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from hvtrain.core.step_plan import Share
from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.transform import Transform
from hvtrain.data.preprocessing import Preprocessing
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.system import cores

Read = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""Indices [batch] within this rank's shard -> raw images [batch, h, w, c], labels int32 [batch]."""
Then = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""Step (or number of the batch), raw images, labels -> what the model sees."""

# What a random number is for: two purposes never share a stream of numbers.
ORDER, AUGMENT, BLOCK = range(3)

FOREVER = 2**62


def derive_seed(seed: int, purpose: int, *parts: int | tf.Tensor) -> tf.Tensor:
    """Seed int64 [2] for TensorFlow's stateless random ops, a function of all that is given."""
    derived = tf.constant([seed, purpose], tf.int64)
    for part in parts:
        derived = tf.random.experimental.stateless_fold_in(derived, tf.cast(part, tf.int64))
    return derived


def finish(batches: tf.data.Dataset, topology: Topology) -> tf.data.Dataset:
    """Prefetch, and options that keep order, leave sharding to us, and share the cores between local ranks."""
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.threading.private_threadpool_size = cores.each(topology.local_size)
    options.threading.max_intra_op_parallelism = 1
    # It would go on to choose what the threads above choose already; and an iterator whose end it does not notice waits
    # for its next round, after 20 s for 10 s more: a race in TensorFlow, met in one of five ends.
    options.autotune.enabled = False
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def parallel_map(dataset: tf.data.Dataset, function: Callable) -> tf.data.Dataset:
    return dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def numbered(batches: tf.data.Dataset, start: int = 0) -> tf.data.Dataset:
    """(batch...) as (step, batch...)."""
    return batches.enumerate(start).map(lambda step, batch: (step, *batch))


def end_with_python() -> None:
    """To be called before a stream has a Python generator in it."""
    atexit.register(_end_streams)


def _end_streams() -> None:
    """Ends open streams while Python is alive: TensorFlow's threads call these generators, and wait for ever for a
    call that the end of the interpreter has cut off."""
    for found in gc.get_objects():
        if isinstance(found, OwnedIterator):
            found._iterator_resource = None


def share_of_epoch(
    num_local: int, batch_size: int, steps_per_epoch: int, num_examples: int | None, topology: Topology
) -> Share:
    """This rank's share; refuses an epoch that its shard cannot fill."""
    wanted = num_examples or steps_per_epoch * batch_size
    if steps_per_epoch < 1 or wanted > num_local:
        raise ConfigError(
            f"{steps_per_epoch} steps of {batch_size} examples do not fit the {num_local} training examples "
            f"of rank {topology.rank} of {topology.size}; lower the steps per epoch or the batch size"
        )
    return Share(batch_size, steps_per_epoch, wanted)


def index_batches(num_local: int, topology: Topology, share: Share, seed: int, start_step: int) -> tf.data.Dataset:
    """Infinite stream of (step, indices int64 [batch]) from start_step on."""
    first_epoch, steps_done = divmod(start_step, share.steps)

    def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(num_local, dtype=tf.int64), seed=derive_seed(seed, ORDER, topology.rank, epoch)
        )
        if share.is_full:
            rows = tf.reshape(order[: share.num_examples], [share.steps, share.batch_size])
            return tf.data.Dataset.from_tensor_slices(rows)
        steps = tf.data.Dataset.range(share.steps)
        return steps.map(lambda step: order[share.begin(step, tf.minimum) : share.begin(step + 1, tf.minimum)])

    epochs = tf.data.Dataset.range(first_epoch, FOREVER)
    return epochs.flat_map(epoch_batches).skip(steps_done).enumerate(start=start_step)


class IndexedSource(Source):
    """A source whose examples are read by index: a subclass says how to read its shard."""

    transform: Transform = Transform()

    @abstractmethod
    def reader(self, split: str, topology: Topology) -> Read:
        """Opens this rank's shard of a split and returns the function that reads from it."""

    def load(
        self, steps: tf.data.Dataset, split: str, topology: Topology, then: Then, batch_size: int | None = None
    ) -> tf.data.Dataset:
        """(step, indices) -> then(step, images, labels); batch_size is that of evaluation, None in training.

        The reader is asked for first, since it may fit the transform that `then` leans on.
        """
        read = self.reader(split, topology)
        return parallel_map(steps, lambda step, indices: then(step, *read(indices)))

    def training(
        self,
        topology: Topology,
        batch_size: int,
        seed: int,
        start_step: int,
        steps_per_epoch: int,
        num_examples: int | None = None,
    ) -> tf.data.Dataset:
        num_local = len(topology.share(self.num_examples("train")))
        share = share_of_epoch(num_local, batch_size, steps_per_epoch, num_examples, topology)
        indices = index_batches(num_local, topology, share, seed, start_step)

        def augment(step: tf.Tensor, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images = self.transform.augment(images, derive_seed(seed, AUGMENT, topology.rank, step))
            return self.transform.normalize(images), labels

        return finish(self.load(indices, "train", topology, augment), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        num_local = len(topology.share(self.num_examples(split)))
        indices = tf.data.Dataset.range(num_local).batch(batch_size).enumerate()

        def normalize(_: tf.Tensor, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self.transform.normalize(images), labels

        return finish(self.load(indices, split, topology, normalize, batch_size), topology)

    def preprocessing(self) -> Preprocessing:
        return Preprocessing(self.image_shape, self.transform.layers(self.image_shape), "as the reader gives them")

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        number = min(number, len(topology.share(self.num_examples(split))))
        images, _ = self.reader(split, topology)(tf.range(number, dtype=tf.int64))
        return list(images.numpy().reshape(-1, *self.preprocessing().shape))
