"""Builds streams of epochs, each opened in Python when the one before it has ended.

Also batches examples of similar length, in buckets, so that in each step all ranks have similar
lengths. A rank sorts its shuffled examples by bucket, cuts them into steps, and shuffles the steps in
the same way as all other ranks. The padded length of a batch follows from the lengths of all examples,
which every rank knows, so nothing is communicated.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import TensorSpec, nest
from tensorflow.data import Dataset
from tensorflow.python.eager import context

from hvtrain.core.step_plan import Share
from hvtrain.data.pipeline.streams import (
    BUCKETS,
    FOREVER,
    ORDER,
    derive_seed,
    end_streams_at_exit,
    step_sizes,
    unconverted,
)
from hvtrain.data.source import StreamRequest
from hvtrain.errors import ConfigError

# TensorFlow's seed is global, and the threads of tf.data may open epochs of several streams at the
# same time.
_seed_lock = threading.RLock()


def call_python(
    function: Callable[..., Any], arguments: Sequence[Any], specs: Sequence[TensorSpec]
) -> list[Any]:
    """Calls a Python function within a stream, and returns its results as tensors.

    Args:
        function: Gets and returns NumPy arrays.
        arguments: Tensors to call it with.
        specs: Types and shapes of its results.
    """
    end_streams_at_exit()
    # In eager mode, numpy_function returns a single tensor without a list around it.
    tensors = nest.flatten(tf.numpy_function(function, arguments, [spec.dtype for spec in specs]))
    # The graph cannot know the shapes of a Python function's results.
    return [tf.ensure_shape(tensor, spec.shape) for tensor, spec in zip(tensors, specs)]


def join_epochs(open_epoch: Callable[[int], Dataset], first: int) -> Dataset:
    """Chains the data sets of all epochs from `first` on, opening each when the one before it has ended.

    Args:
        open_epoch: Called in Python with an epoch's number; returns its data set. All data sets must
            have the same element_spec.
        first: The first epoch's number.
    """
    end_streams_at_exit()
    # The first epoch is opened here, so that its errors are raised unchanged, not wrapped by
    # TensorFlow.
    ready = [open_epoch(first)]
    spec = ready[0].element_spec
    # A data set's functions die with its Python object, so the last two data sets are kept alive.
    alive: deque[Dataset] = deque(maxlen=2)

    def open_as_variant(epoch):
        with tf.device("CPU:0"):
            alive.append(ready.pop() if ready else open_epoch(int(epoch)))
            return tf.data.experimental.to_variant(alive[-1])

    # Python is called once per epoch; TensorFlow itself reads the data set.
    @unconverted
    def epoch_batches(epoch):
        variant = tf.py_function(open_as_variant, [epoch], tf.variant)
        return tf.data.experimental.from_variant(variant, spec)

    return Dataset.range(first, FOREVER).flat_map(epoch_batches)


@contextmanager
def global_seed(seed: int, epoch: int) -> Iterator[None]:
    """Sets TensorFlow's global seed to a function of seed and epoch, and restores the old one at the end.

    A shuffle created inside the context, with or without its own seed, gets a different order in each
    epoch, and the same order again when the run is resumed.

    All ranks use the same seed. Their shards differ anyway. Ranks that read the same data by mistake
    read it in the same order, so their equal batches are noticed.
    """
    order_seed = int(np.random.default_rng((seed, ORDER, epoch)).integers(2**31))
    # Not tf.random.set_seed(), which would also reset random operations elsewhere.
    eager = context.context()
    with _seed_lock:
        old_state = (eager._seed, getattr(eager, "_rng", None))
        eager._seed = order_seed
        eager._rng = random.Random(order_seed)
        try:
            yield
        finally:
            eager._seed, eager._rng = old_state


def cut_epoch(
    batches: Dataset,
    share: Share,
    first_step: int,
    count_error: Callable[[int], Exception],
    must_end: bool,
) -> Dataset:
    """Cuts batches into the steps of an epoch, from first_step on, and checks that the examples suffice.

    The stream fails if the examples end before the share does.

    Args:
        batches: Batches of up to share.batch_size examples.
        share: This rank's examples of the epoch, and their division into steps.
        first_step: The step at which the stream starts, counted within the epoch.
        count_error: Returns the exception to raise, given the number of examples that were read.
        must_end: True if the examples must end with the share; the stream then also fails if there
            are more.
    """
    end_streams_at_exit()

    def fail(num_read):
        raise count_error(int(num_read))

    if not share.is_full:
        sizes = step_sizes(share, first_step)
        # A run resumed at the end of an epoch has no steps left in it.
        batches = batches.rebatch(sizes) if sizes else batches

    # Empty batches follow, so that the check also runs if the examples end too early.
    empty = nest.map_structure(
        lambda spec: tf.zeros([0, *spec.shape[1:]], spec.dtype), batches.element_spec
    )
    endless = batches.concatenate(Dataset.from_tensors(empty).repeat())
    # The empty batches have hidden the batch size from the static shapes. It is put back if all
    # of the stream's batches are full.
    static_size = share.batch_size if share.is_full and not must_end else None

    def ensure_size(part):
        return tf.ensure_shape(part, [static_size, *part.shape[1:]])

    @unconverted
    def check(step, batch):
        size = tf.shape(nest.flatten(batch)[0], tf.int64)[0]
        begin = share.begin(step)
        # A step after the share must be empty; see `must_end`.
        needed_size = tf.where(step < share.steps, share.begin(step + 1) - begin, 0)

        num_read = tf.minimum(begin, share.num_examples) + size
        is_right = tf.cond(
            size == needed_size, lambda: True, lambda: tf.numpy_function(fail, [num_read], tf.bool)
        )
        with tf.control_dependencies([is_right]):
            return nest.map_structure(ensure_size, batch)

    # With `must_end`, one more step is read, to check that it is empty; then it is dropped.
    steps = Dataset.range(first_step, share.steps + must_end)
    checked = Dataset.zip(steps, endless).map(check)
    if must_end:
        return checked.filter(lambda *batch: tf.size(nest.flatten(batch)[0], tf.int64) > 0)
    return checked


def choose_boundaries(chosen: int | Sequence[int], longest: int) -> list[int]:
    """Returns the ascending lengths to which batches are padded; the last one is `longest`.

    Args:
        chosen: The setting data.bucket_by_length: the boundaries, or their number (0 counts as 1). In the
            latter case, each boundary is half the next.
        longest: The length that no example exceeds.

    Raises:
        ConfigError: Boundaries do not ascend, or begin below 1.

    >>> choose_boundaries(3, 100), choose_boundaries([16, 32], 60)
    ([25, 50, 100], [16, 32, 60])
    """
    if isinstance(chosen, int):
        return sorted({-(-longest // 2**halvings) for halvings in range(max(chosen, 1))})
    if list(chosen) != sorted(set(chosen)) or min(chosen, default=0) < 1:
        raise ConfigError(
            f"data.bucket_by_length={list(chosen)} must ascend from at least 1; give, for example, [64,128,256]"
        )
    return [*(boundary for boundary in chosen if boundary < longest), longest]


def bucketed_batches(
    boundaries: Sequence[int],
    example_lengths: np.ndarray,
    order: tf.Tensor,
    epoch: tf.Tensor,
    request: StreamRequest,
    share: Share,
) -> Dataset:
    """Returns an epoch's batches: (indices within the rank's shard, length to which the batch is padded).

    Args:
        boundaries: Ascending lengths to which batches are padded.
        example_lengths: The length of each training example, in the order that Topology.share divides among ranks.
        order: This rank's examples of the epoch, shuffled.
        epoch: The number of the epoch, a tensor.
        request: The stream's request.
        share: This rank's steps.
    """
    topology = request.topology
    shares = request.shares or (share,) * topology.size
    buckets = np.searchsorted(boundaries, example_lengths)
    shards = []
    for rank in range(topology.size):
        rows = replace(topology, rank=rank).share(len(buckets))
        shards.append(buckets[np.asarray(rows, np.int64)])
    counts = [np.bincount(shard, minlength=len(boundaries)) for shard in shards]
    # Each epoch leaves out different examples, which shifts the sorted
    # ones by at most this many places.
    left_out = [[len(shard) - rank_share.num_examples] for shard, rank_share in zip(shards, shares)]

    # The permutation is the same on all ranks. Part k of the sorted examples goes to step
    # steps[k], and has that step's size.
    steps = tf.random.experimental.stateless_shuffle(
        tf.range(share.steps), derive_seed(request.seed, BUCKETS, epoch)
    )
    part_of_step = tf.math.invert_permutation(steps)
    sizes = tf.gather(np.stack(list(map(step_sizes, shares))), steps, axis=1)
    ends = tf.cumsum(sizes, axis=1)
    # The bucket of each part's longest example, [ranks, steps]; a step
    # takes the largest over the ranks.
    last_buckets = tf.searchsorted(
        np.cumsum(counts, axis=1), ends - 1 + np.array(left_out), side="right"
    )
    lengths = tf.gather(boundaries, tf.reduce_max(last_buckets, axis=0))

    own_buckets = tf.gather(shards[topology.rank], order)
    order = tf.gather(order, tf.argsort(own_buckets, stable=True))
    ends = ends[topology.rank]
    begins = ends - sizes[topology.rank]

    @unconverted
    def batch_of(step):
        part = part_of_step[step]
        rows = order[begins[part] : ends[part]]
        if share.is_full:
            rows = tf.ensure_shape(rows, [share.batch_size])
        return rows, lengths[part]

    return Dataset.range(share.steps).map(batch_of)
