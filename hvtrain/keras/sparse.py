"""Sums gradients of rows (IndexedSlices, as of an Embedding) over the ranks, to the same bits on each.

GPUs add values of one row in any order, so ranks that each add up the same gathered values would differ by rounding.
Here a rank adds up its own values before it sends them, and those of different ranks are added one rank after the
other, so that each addition is of different rows and its order does not matter.
"""

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf


def sum_rows(slices: tf.IndexedSlices, name: str, device: str, process_set: Any) -> tf.IndexedSlices:
    """The sum over the ranks of the process set, with each row once (every rank of the set)."""
    own, rows = tf.unique(slices.indices)
    own_values = tf.math.unsorted_segment_sum(slices.values, rows, tf.size(own))
    with tf.device(device):
        options = {"process_set": process_set, "ignore_name_scope": True}
        values = hvd.allgather(own_values, name=f"{name}_values", **options)
        indices = hvd.allgather(own, name=f"{name}_indices", **options)
        counts = hvd.allgather(tf.size(own)[tf.newaxis], name=f"{name}_counts", **options)
    indices, rows = tf.unique(indices)
    ends = tf.cumsum(counts)

    def add(rank: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        part = slice(ends[rank] - counts[rank], ends[rank])
        return rank + 1, tf.tensor_scatter_nd_add(total, rows[part, tf.newaxis], values[part])

    total = tf.zeros(tf.concat([[tf.size(indices)], tf.shape(values)[1:]], 0), values.dtype)
    shapes = tf.TensorShape([]), tf.TensorShape([None, *values.shape[1:]])
    _, total = tf.while_loop(lambda rank, _: rank < tf.size(counts), add, (tf.constant(0), total), shapes)
    return tf.IndexedSlices(total, indices, slices.dense_shape)
