"""Batches examples of similar length, in buckets, so that in each step all ranks have similar lengths.

A rank sorts its shuffled examples by bucket, cuts them into steps, and shuffles the steps in the same
way as all other ranks. The padded length of a batch follows from the lengths of all examples, which
every rank knows, so nothing is communicated.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf
from tensorflow.data import Dataset

from hvtrain.core.step_plan import Share
from hvtrain.data.pipeline.streams import BUCKETS, derive_seed, step_sizes, unconverted
from hvtrain.data.source import StreamRequest
from hvtrain.errors import ConfigError


def choose_boundaries(chosen: int | Sequence[int], longest: int) -> list[int]:
    """Returns the ascending lengths to which batches are padded; the last one is `longest`.

    Args:
        chosen: data.bucket_by_length: the boundaries, or their number, each half the next; 0 means one boundary.
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
            f"data.bucket_by_length={list(chosen)} does not rise from at least 1; give [64,128,256]"
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
