"""Streams over anything that is read by index: seeds, epoch orders, batches, options. The shard comes in.

Skipping happens on rows of indices, before a pixel is touched, so resuming at step 100,000 costs nothing.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable

import tensorflow as tf

from hvtrain.data.source import Source
from hvtrain.data.transform import Transform
from hvtrain.errors import ConfigError
from hvtrain.plan import Share
from hvtrain.topology import Topology

Read = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""Indices [batch] within this rank's shard -> raw images [batch, h, w, c], labels int32 [batch]."""

# What a random number is for: two purposes never share a stream of numbers.
ORDER, AUGMENT, BLOCK = range(3)

FOREVER = 2**62


def derive_seed(seed: int, purpose: int, *parts: int | tf.Tensor) -> tf.Tensor:
    """Seed int64 [2] for TensorFlow's stateless random ops, a function of all that is given."""
    derived = tf.constant([seed, purpose], tf.int64)
    for part in parts:
        derived = tf.random.experimental.stateless_fold_in(derived, tf.cast(part, tf.int64))
    return derived


def local_threads(topology: Topology) -> int:
    """This rank's share of the cores that it may run on, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // topology.local_size)


def finish(batches: tf.data.Dataset, topology: Topology) -> tf.data.Dataset:
    """Prefetch, and options that keep order, leave sharding to us, and share the cores between local ranks."""
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.threading.private_threadpool_size = local_threads(topology)
    options.threading.max_intra_op_parallelism = 1
    options.autotune.cpu_budget = local_threads(topology)
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def parallel_map(dataset: tf.data.Dataset, function: Callable) -> tf.data.Dataset:
    return dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


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

    transform: Transform

    @abstractmethod
    def reader(self, split: str, topology: Topology) -> Read:
        """Opens this rank's shard of a split and returns the function that reads from it."""

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
        read = self.reader("train", topology)
        transform = self.transform  # After reader(), which may fit it.

        def load(step: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images, labels = read(indices)
            images = transform.augment(images, derive_seed(seed, AUGMENT, topology.rank, step))
            return transform.normalize(images), labels

        return finish(parallel_map(indices, load), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        num_local = len(topology.share(self.num_examples(split)))
        read = self.reader(split, topology)
        transform = self.transform

        def load(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images, labels = read(indices)
            return transform.normalize(images), labels

        return finish(parallel_map(tf.data.Dataset.range(num_local).batch(batch_size), load), topology)
