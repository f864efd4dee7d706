"""How streams are made: seeds, epoch orders, batches, augmentation, options.

A resumed stream skips rows of indices, before any pixel is read, so resuming at step 100,000 costs nothing.
"""

import atexit
import gc
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.transform import Transform, Unchanged
from hvtrain.data.source import Preprocessing, Source, StreamRequest
from hvtrain.system import cores

Read = Callable[..., tuple[Any, ...]]
"""A batch as the source has it -> raw inputs, targets and, if the source has them, weights.

File sources mark an unusable example by the label -1."""
Then = Callable[..., tuple[Any, ...]]
"""Step (or number of the batch), and what Read gives -> what the model sees."""

# Purposes of random numbers. No two purposes share a sequence.
ORDER, AUGMENT, BLOCK, LAYERS = range(4)

FOREVER = 2**62

# For functions without conditions on tensors: AutoGraph would spend up to 0.1 s on each.
unconverted = tf.autograph.experimental.do_not_convert


def derive_seed(seed: int, purpose: int, *parts: int | tf.Tensor) -> tf.Tensor:
    """Seed int64 [2] for TensorFlow's stateless random ops, a function of all arguments."""
    derived = tf.constant([seed, purpose], tf.int64)
    for part in parts:
        derived = tf.random.experimental.stateless_fold_in(derived, tf.cast(part, tf.int64))
    return derived


def finish(batches: tf.data.Dataset, topology: Topology) -> tf.data.Dataset:
    """Adds prefetching, and options that keep the order, shard nothing, and share the cores among local ranks."""
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.threading.private_threadpool_size = cores.each(topology.local_size)
    options.threading.max_intra_op_parallelism = 1
    # Autotuning adds nothing with fixed threads, and it can delay shutdown by 10 s: a race in TensorFlow, which one
    # shutdown of five met.
    options.autotune.enabled = False
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def end_with_python() -> None:
    """Ends open streams before Python ends. Call it before a stream gets a Python function."""
    atexit.unregister(_end_streams)
    atexit.register(_end_streams)


def _end_streams() -> None:
    """Drops all iterators: TensorFlow's threads would wait forever for a Python call that the exit has cut off."""
    for found in gc.get_objects():
        if isinstance(found, OwnedIterator):
            found._iterator_resource = None


def regrouped(
    stream_of: Callable[[int], tf.data.Dataset], plan: StepPlan, topology: Topology, start_step: int
) -> tf.data.Dataset:
    """A rank's part of the joint batches of a plan that was made for another number of ranks.

    stream_of(share) gives the batches of a share, from start_step of the plan on. These streams are joined and cut, so
    each example comes as the plan's own ranks would have read it, order and augmentation included. Two ranks that need
    parts of one stream both read and decode it.
    """
    shares = plan.shares_of(topology.rank)
    steps = tf.data.Dataset.range(start_step % plan.steps_per_epoch, FOREVER)

    def part_of(step: tf.Tensor, batches: tuple[Any, ...]) -> Any:
        # If all steps are alike, plain numbers keep the batch's static shape.
        at, minimum = (0, min) if plan.is_full else (step % plan.steps_per_epoch, tf.minimum)
        begin, end = plan.parts(at, minimum)[topology.rank]
        first = plan.share_offsets(at, minimum)[shares[0]]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0)[begin - first : end - first], *batches)

    streams = tuple(stream_of(share) for share in shares)
    parts = tf.data.Dataset.zip((steps, streams)).map(part_of, num_parallel_calls=tf.data.AUTOTUNE)
    return finish(parts, topology)


class StreamedSource(Source):
    """A source whose streams are read in batches, then augmented (in training) and normalized by `transform`."""

    transform: Transform = Transform()

    @abstractmethod
    def reader(self, split: str, topology: Topology) -> Read:
        """Opens this rank's shard of a split and returns the function that reads its batches."""

    @abstractmethod
    def training_batches(self, request: StreamRequest) -> tf.data.Dataset:
        """Endless stream of (step, batch) from request.start_step on."""

    @abstractmethod
    def evaluation_batches(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        """(number, batch) for all examples of the shard, in order."""

    def load(
        self, batches: tf.data.Dataset, split: str, topology: Topology, then: Then, batch_size: int | None = None
    ) -> tf.data.Dataset:
        """(step, batch) -> then(step, inputs, targets, ...). batch_size is given for evaluation, None for training.

        The reader comes first, since it may fit the transform that `then` uses.
        """
        read = self.reader(split, topology)
        return batches.map(lambda step, batch: then(step, *read(batch)), num_parallel_calls=tf.data.AUTOTUNE)

    def training(self, request: StreamRequest) -> tf.data.Dataset:
        @unconverted
        def augment(step: tf.Tensor, *elements: Any) -> tuple[Any, ...]:
            inputs, *rest = self.augment(elements, derive_seed(request.seed, AUGMENT, request.topology.rank, step))
            return inputs if self.raw_batches else self.transform.normalize(inputs), *rest

        batches = self.training_batches(request)
        return finish(self.load(batches, "train", request.topology, augment), request.topology)

    def augment(self, elements: tuple[Any, ...], seed: tf.Tensor) -> tuple[Any, ...]:
        """Raw elements of a training batch after augmentation. Pure function of them and seed int64 [2]."""
        inputs, *rest = elements
        return self.transform.augment(inputs, seed), *rest

    def finish(self, inputs: Any) -> Any:
        return self.transform.normalize(inputs)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        @unconverted
        def normalize(_: tf.Tensor, inputs: Any, *rest: Any) -> tuple[Any, ...]:
            return self.transform.normalize(inputs), *rest

        batches = self.evaluation_batches(split, topology, batch_size)
        return finish(self.load(batches, split, topology, normalize, batch_size), topology)

    def numbered_evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        """As evaluation(), each batch with the places of its examples in the shard: (int64 [batch], inputs, ...).

        What on_error="skip" leaves out takes its place with it. Examples are read one by one.
        """

        @unconverted
        def normalize(place: tf.Tensor, inputs: Any, *rest: Any) -> tuple[Any, ...]:
            number = tf.shape(tf.nest.flatten(inputs)[0])[:1]  # One, or none if it cannot be read.
            return tf.fill(number, place), self.transform.normalize(inputs), *rest

        found = self.load(self.evaluation_batches(split, topology, 1), split, topology, normalize, 1)
        return finish(found.unbatch().batch(batch_size), topology)


class IndexedSource(StreamedSource):
    """A source whose batches are indices [batch] within this rank's shard."""

    def training_batches(self, request: StreamRequest) -> tf.data.Dataset:
        num_local = request.topology.share_size(self.num_examples("train"))
        share = request.share_of(num_local)
        first_epoch, steps_done = request.position

        @unconverted
        def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
            order = tf.random.experimental.stateless_shuffle(
                tf.range(num_local, dtype=tf.int64), seed=derive_seed(request.seed, ORDER, request.topology.rank, epoch)
            )
            if share.is_full:
                rows = tf.reshape(order[: share.num_examples], [share.steps, share.batch_size])
                return tf.data.Dataset.from_tensor_slices(rows)
            steps = tf.data.Dataset.range(share.steps)
            return steps.map(lambda step: order[share.begin(step, tf.minimum) : share.begin(step + 1, tf.minimum)])

        epochs = tf.data.Dataset.range(first_epoch, FOREVER)
        return epochs.flat_map(epoch_batches).skip(steps_done).enumerate(start=request.start_step)

    def evaluation_batches(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.range(topology.share_size(self.num_examples(split))).batch(batch_size).enumerate()

    def preprocessing(self) -> Preprocessing:
        if isinstance(self.transform, Unchanged):
            return super().preprocessing()
        return self.transform.preprocessing(self.image_shape, self.image_shape, "as the reader gives them")

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        if isinstance(self.transform, Unchanged):
            return []  # The model takes what the streams give.
        number = min(number, topology.share_size(self.num_examples(split)))
        images, *_ = self.reader(split, topology)(tf.range(number, dtype=tf.int64))
        return list(images.numpy().reshape(-1, *self.preprocessing().shape))
