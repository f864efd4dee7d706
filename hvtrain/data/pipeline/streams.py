"""Builds streams: seeds, the order of an epoch, batches, augmentation and tf.data options.

A resumed stream skips indices, before any example is read, so even a start at step 100,000 reads no
earlier example.
"""

import atexit
import gc
from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import Tensor, TensorSpec, nest
from tensorflow.data import Dataset
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from hvtrain.core.step_plan import Share, StepPlan
from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.transform import Transform, Unchanged, fold_in
from hvtrain.data.source import Parts, Preprocessing, Source, StreamRequest
from hvtrain.errors import ConfigError
from hvtrain.system import resources

# Turns a batch of the source, such as indices, into raw inputs, targets and, if any, weights.
# File sources mark an unusable example with the label -1.
Read = Callable[..., Parts]
# Turns a step (or the number of a batch) and the outputs of Read into the
# model's inputs, targets and weights.
Postprocess = Callable[..., Parts]

# Purposes of random numbers. Each has a separate sequence.
ORDER = 0
AUGMENT = 1
BLOCK = 2
LAYERS = 3
CROP = 4
BUCKETS = 5

# An end that no stream reaches.
FOREVER = 2**62

# For functions without control flow on tensors: AutoGraph would spend up to 0.1 s on each.
unconverted = tf.autograph.experimental.do_not_convert


def derive_seed(seed: int, purpose: int, *parts: int | Tensor) -> Tensor:
    """Returns a seed int64 [2] for TensorFlow's stateless random ops, a function of all arguments."""
    # Each part is folded in on its own, so that (1, 23) and (12, 3) give different seeds.
    derived = tf.constant([seed, purpose], tf.int64)
    for part in parts:
        derived = fold_in(derived, part)
    return derived


def step_sizes(share: Share, first_step: int = 0) -> list[int]:
    """Returns the number of examples in each step of an epoch, from first_step on."""
    begins = [share.begin(step) for step in range(first_step, share.steps + 1)]
    return [end - begin for begin, end in pairwise(begins)]


def finish(batches: Dataset, topology: Topology) -> Dataset:
    """Adds prefetching and options: a deterministic order, no sharding by tf.data, and the rank's share of cores."""
    options = tf.data.Options()
    options.deterministic = True
    # The source has already sharded the data by rank.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # All ranks of a host read at the same time, and tf.data would take every core for each of them.
    options.threading.private_threadpool_size = resources.cores_of_each(topology.local_size)
    options.threading.max_intra_op_parallelism = 1
    # Autotuning gains nothing with fixed threads, and it can delay shutdown by 10 s: a race in
    # TensorFlow, seen in one of five shutdowns.
    options.autotune.enabled = False
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def end_streams_at_exit() -> None:
    """Makes the interpreter end open streams when it exits. Call this before giving a stream a Python function."""
    # Exit functions run in reverse order. Registered anew, this one runs before
    # all that were registered earlier.
    atexit.unregister(_end_streams)
    atexit.register(_end_streams)


def _end_streams() -> None:
    """Drops all iterators.

    Otherwise, TensorFlow's threads would wait forever for a Python call that the exit prevents.
    """
    for candidate in gc.get_objects():
        if isinstance(candidate, OwnedIterator):
            candidate._iterator_resource = None


def regroup(
    stream_of: Callable[[int], Dataset], plan: StepPlan, topology: Topology, start_step: int
) -> Dataset:
    """Returns this rank's parts of the global batches of a plan made for another number of ranks.

    The streams of all shares that a part overlaps are joined and cut. So each example is the one
    that the plan's own ranks would have read, including order and augmentation. Two ranks that need
    parts of the same stream both read and decode it.

    Args:
        stream_of: Opens the stream of a share of the plan, from start_step on.
        topology: This rank among the current ranks.
        start_step: The first step, counted from the beginning of the run.
    """
    shares = plan.shares_of(topology.rank)

    def part_of(step, batches):
        # Full steps are cut alike, and Python integers keep the batch's static shape.
        step = 0 if plan.is_full else step % plan.steps_per_epoch
        parts = plan.parts(step)
        offsets = plan.share_offsets(step)
        first = offsets[shares[0]]
        begin, end = parts[topology.rank]

        def join_and_cut(*tensors):
            return tf.concat(tensors, axis=0)[begin - first : end - first]

        return nest.map_structure(join_and_cut, *batches)

    # How a batch is cut depends only on the step within the epoch.
    batches_of_shares = Dataset.zip(tuple(map(stream_of, shares)))
    numbered = batches_of_shares.enumerate(start_step % plan.steps_per_epoch)
    return finish(numbered.map(part_of, num_parallel_calls=tf.data.AUTOTUNE), topology)


def are_per_pixel(image: TensorSpec, others: Any) -> bool:
    """True if another part of an example is an image too, or has a value for each pixel of the image."""
    return any(
        part.shape.rank == 3 or part.shape[:2] == image.shape[:2] for part in nest.flatten(others)
    )


class StreamedSource(Source):
    """A source that reads batches, then augments (in training) and normalizes them with its `transform`."""

    transform: Transform = Transform()
    has_masks = False
    """True if targets are masks, which are augmented together with their images."""

    @property
    def fills_masks(self) -> bool:
        """True if masks get the label IGNORED where a shift or padding adds pixels."""
        is_padded = self.sizing is not None and self.sizing.fit == "pad"
        return self.has_masks and (is_padded or self.transform.shift_pixels > 0)

    @abstractmethod
    def reader(self, split: str, topology: Topology) -> Read:
        """Opens this rank's shard of a split and returns the function that reads its batches."""

    @abstractmethod
    def training_batches(self, request: StreamRequest) -> Dataset:
        """Returns an endless stream of (step, batch), from request.start_step on."""

    @abstractmethod
    def evaluation_batches(self, split: str, topology: Topology, batch_size: int) -> Dataset:
        """Returns a finite stream of (batch number, batch), with all examples of the shard in order."""

    def load(
        self,
        batches: Dataset,
        split: str,
        topology: Topology,
        postprocess: Postprocess,
        batch_size: int | None = None,
    ) -> Dataset:
        """Reads batches: maps (step, batch) to postprocess(step, inputs, targets, ...).

        Args:
            batch_size: For evaluation; None for training.
        """
        # The reader is opened first, since it may fit the transform that postprocess uses.
        read = self.reader(split, topology)

        def load_batch(step, batch):
            return postprocess(step, *read(*nest.flatten(batch)))

        return batches.map(load_batch, num_parallel_calls=tf.data.AUTOTUNE)

    def training(self, request: StreamRequest) -> Dataset:
        topology = request.topology

        @unconverted
        def with_crops(step, batch):
            # Crops become a batch's last part, so that examples read one by one keep theirs.
            parts = nest.flatten(batch)
            seed = derive_seed(request.seed, CROP, topology.rank, step)
            return step, (*parts, self.sizing.crop.draw(tf.shape(parts[0])[0], seed))

        @unconverted
        def augment(step, *elements):
            seed = derive_seed(request.seed, AUGMENT, topology.rank, step)
            inputs, *others = self.augment(elements, seed)
            # Raw batches stay bytes: sending them to a GPU takes a quarter of the traffic of float32.
            if not self.raw_batches:
                inputs = self.transform.normalize(inputs)
            return inputs, *others

        batches = self.training_batches(request)
        if self.sizing and self.sizing.crop:
            batches = batches.map(with_crops)
        return finish(self.load(batches, "train", topology, augment), topology)

    def augment(self, elements: Parts, seed: Tensor) -> Parts:
        """Augments the raw elements of a training batch. Pure function of them and seed int64 [2]."""
        moves = self.transform.flip or self.transform.shift_pixels
        if self.sizing and self.sizing.crop:
            moves = True
        image, *others = self.element_spec
        if moves and are_per_pixel(image, others[self.has_masks :]):
            raise ConfigError(
                f"{self.name} has targets or weights that are images, which would not move with the inputs; set "
                "flip=false and shift_pixels=0, and leave random_resized_crop out"
            )
        inputs, *others = elements
        if self.has_masks:
            masks, *weights = others
            return *self.transform.augment_with_masks(inputs, masks, seed), *weights
        return self.transform.augment(inputs, seed), *others

    def finish(self, inputs: Any) -> Any:
        return self.transform.normalize(inputs)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> Dataset:
        batches = self.evaluation_batches(split, topology, batch_size)
        data = self.load(batches, split, topology, self._normalize, batch_size)
        return finish(data, topology)

    @unconverted
    def _normalize(self, _, inputs: Any, *others: Any) -> Parts:
        return self.transform.normalize(inputs), *others

    def numbered_evaluation(self, split: str, topology: Topology, batch_size: int) -> Dataset:
        """Returns evaluation()'s stream with the examples' indices in the shard: (int64 [batch], inputs, ...).

        Examples that on_error="skip" leaves out have no row, and all others keep their indices. To
        make that possible, examples are read one by one.
        """

        @unconverted
        def normalize(index, inputs, *others):
            # [1], or [0] if the example was left out.
            count = tf.shape(nest.flatten(inputs)[0])[:1]
            return tf.fill(count, index), self.transform.normalize(inputs), *others

        singles = self.evaluation_batches(split, topology, 1)
        examples = self.load(singles, split, topology, normalize, 1).unbatch()
        return finish(examples.batch(batch_size), topology)


class IndexedSource(StreamedSource):
    """A source whose batches are indices [batch] within this rank's shard.

    With buckets, training batches are (indices, length to which the reader pads the batch).
    """

    buckets: Any = None
    """A function that makes an epoch's batches, see bucketed_batches(); None if they do not depend on lengths."""

    def shard_rows(self, split: str, topology: Topology) -> np.ndarray:
        """Returns the indices of this rank's examples in the split, int64 [n]."""
        return np.asarray(topology.share(self.num_examples(split)), np.int64)

    def training_batches(self, request: StreamRequest) -> Dataset:
        num_local = request.topology.share_size(self.num_examples("train"))
        share = request.share_of(num_local)
        first_epoch, steps_done = request.position
        buckets = self.buckets

        @unconverted
        def epoch_batches(epoch):
            order = tf.random.experimental.stateless_shuffle(
                tf.range(num_local, dtype=tf.int64),
                seed=derive_seed(request.seed, ORDER, request.topology.rank, epoch),
            )
            if buckets:
                return buckets(order[: share.num_examples], epoch, request, share)
            if share.is_full:
                # Rows of one shape give batches a static size, and are skipped faster than calls of batch_of():
                # a stream from step 19,000 of an epoch began within 0.9 s, not 3 s (2 busy cores, 2026-11-29).
                rows = tf.reshape(order[: share.num_examples], [share.steps, share.batch_size])
                return Dataset.from_tensor_slices(rows)

            def batch_of(step):
                return order[share.begin(step) : share.begin(step + 1)]

            return Dataset.range(share.steps).map(batch_of)

        # Only rows of indices are skipped: nothing has been read yet.
        epochs = Dataset.range(first_epoch, FOREVER)
        return epochs.flat_map(epoch_batches).skip(steps_done).enumerate(request.start_step)

    def evaluation_batches(self, split: str, topology: Topology, batch_size: int) -> Dataset:
        indices = Dataset.range(topology.share_size(self.num_examples(split)))
        return indices.batch(batch_size).enumerate()

    def spread(self, split: str, step: int, batch_size: int) -> Dataset:
        """Returns evaluation()'s stream for a single process, with only every step-th example."""
        indices = Dataset.range(0, self.num_examples(split), step).batch(batch_size)
        data = self.load(indices.enumerate(), split, Topology(), self._normalize, batch_size)
        return finish(data, Topology())

    def preprocessing(self) -> Preprocessing:
        if isinstance(self.transform, Unchanged):
            return super().preprocessing()
        shape = self.image_shape
        return self.transform.preprocessing(shape, shape, "as the reader gives them")

    def raw_examples(self, split: str, topology: Topology, count: int) -> list[np.ndarray]:
        if isinstance(self.transform, Unchanged):
            return []  # The model takes examples as the streams give them, so there is nothing to check.
        count = min(count, topology.share_size(self.num_examples(split)))
        images, *_ = self.reader(split, topology)(tf.range(count, dtype=tf.int64))
        return list(images.numpy().reshape(-1, *self.preprocessing().shape))
