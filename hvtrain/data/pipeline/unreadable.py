"""Batches read whole, and example by example in Python if that fails, so that the damaged example is known.

TensorFlow does not say which file its input pipeline could not read, and searching all files afterwards takes hours
on a large data set. So a batch that fails is read again at once, each example alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import Read, Then
from hvtrain.system import cores

Repair = Callable[..., tuple[np.ndarray, np.ndarray]]
"""An empty array of images and the parts of a batch -> images and labels of what can be read. Plain Python."""


def read_batches(
    batches: tf.data.Dataset, read: Read, repair: Repair, then: Then, topology: Topology
) -> tf.data.Dataset:
    """(step, batch) -> then(step, *read(batch)), in order. A batch that read() fails on, or of which a label is -1,
    goes through repair() instead."""

    def whole_or_repaired(step: tf.Tensor, batch: Any) -> tf.data.Dataset:
        this = tf.data.Dataset.from_tensors(batch)
        whole = this.map(read)
        images, labels = whole.element_spec
        none = np.zeros([0, *images.shape[1:]], images.dtype.as_numpy_dtype)

        def repaired(*batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            found = tf.numpy_function(partial(repair, none), batch, [images.dtype, labels.dtype])
            return tf.ensure_shape(found[0], images.shape), tf.ensure_shape(found[1], labels.shape)

        whole = whole.filter(lambda images, labels: tf.reduce_all(labels >= 0)).ignore_errors()
        # The second part is made only if the first is empty.
        either = whole.concatenate(this.map(repaired)).take(1)
        return either.map(lambda images, labels: then(step, images, labels))

    threads = cores.each(topology.local_size)
    return batches.interleave(
        whole_or_repaired, cycle_length=threads, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
