"""Batches read whole, and one example at a time where that fails: the culprit is named, or left out and counted.

Inside an input pipeline TensorFlow does not say which file it could not read, and a search through all files
afterwards takes hours on a large data set. So a batch that fails is read again at once, each example alone.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import Then, numbered
from hvtrain.system import cores

Read = Callable[..., tuple[tf.Tensor, tf.Tensor]]
"""A batch -> raw images [batch, h, w, c], labels int32 [batch]; a label of -1 stands for no example."""
Keys = Callable[..., tf.Tensor]
"""A batch -> strings [batch], by which the source finds an example again. Asked only where reading failed."""
Settle = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]

_ONE, _ALL = "unreadable example", "no readable example"  # Signs in TensorFlow's message.


class Careful:
    """Reads batches so that an example that cannot be read is known by its key.

    skip=False: it ends the stream, with an error that failed_key understands.
    skip=True: it is noted; in training a good example of its batch takes its place, so that all batches stay full
    and a stream stays a function of what the files hold; in evaluation it is left out.
    """

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        with tf.device("CPU:0"):
            self._noted = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, default_value=-1)
        self._told: set[bytes] = set()

    def training(
        self, steps: tf.data.Dataset, read: Read, keys: Keys, then: Then, topology: Topology
    ) -> tf.data.Dataset:
        """(step, batch...) -> then(step, images, labels), in order."""
        return _read(steps, read, keys, then, topology, self._replace if self._skip else _refuse)

    def evaluation(
        self, steps: tf.data.Dataset, read: Read, keys: Keys, then: Then, topology: Topology, batch_size: int
    ) -> tf.data.Dataset:
        """The same for a shard that is not empty, each example once; batches are full but for the last."""
        if not self._skip:
            return _read(steps, read, keys, then, topology, _refuse)
        batches = _read(steps, read, keys, then, topology, self._drop)
        return _some(batches.unbatch().batch(batch_size))

    def new_keys(self) -> list[str]:
        """Keys of examples that were left out since the last call."""
        new = set(self._noted.export()[0].numpy().tolist()) - self._told
        self._told |= new
        return sorted(key.decode() for key in new)

    def _note(self, labels: tf.Tensor, keys: tf.Tensor) -> tf.Operation:
        bad = tf.boolean_mask(keys, (labels < 0) & (keys != ""))
        return self._noted.insert(bad, tf.ones_like(bad, tf.int64))

    def _replace(self, images: tf.Tensor, labels: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        good = tf.where(labels >= 0)[:, 0]
        with tf.control_dependencies([self._note(labels, keys)]):
            some = tf.debugging.Assert(tf.size(good) > 0, [_ALL, _spelt(keys)])
        with tf.control_dependencies([some]):
            own = tf.range(tf.size(labels, tf.int64))
            place = tf.where(labels >= 0, own, tf.gather(good, own % tf.size(good, tf.int64)))
            return tf.gather(images, place), tf.gather(labels, place)

    def _drop(self, images: tf.Tensor, labels: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([self._note(labels, keys)]):
            good = labels >= 0
        return tf.boolean_mask(images, good), tf.boolean_mask(labels, good)


def mark_unreadable(batches: tf.data.Dataset, read: Read, topology: Topology) -> tf.data.Dataset:
    """(images, labels) of all batches; what cannot be read is blank, with the label -1."""

    def no_keys(*batch: Any) -> tf.Tensor:
        return tf.zeros([0], tf.string)

    def as_it_is(_: tf.Tensor, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return images, labels

    return _read(numbered(batches), read, no_keys, as_it_is, topology, lambda images, labels, keys: (images, labels))


def failed_key(error: Exception) -> tuple[str | None, bool]:
    """The key of the example that ended a stream, or None; and whether all of its batch were as bad."""
    found = re.search(rf"\[({_ONE}|{_ALL})\] \[([\w-]*)\]", str(error))
    if not found:
        return None, False
    coded = found[2]
    return base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)).decode(), found[1] == _ALL


def _refuse(images: tf.Tensor, labels: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    bad = tf.boolean_mask(keys, labels < 0)
    with tf.control_dependencies([tf.debugging.Assert(tf.size(bad) == 0, [_ONE, _spelt(bad)])]):
        return tf.identity(images), tf.identity(labels)


def _spelt(keys: tf.Tensor) -> tf.Tensor:
    """The first key so that it passes through an error message unharmed."""
    return tf.io.encode_base64(tf.strings.reduce_join(keys[:1]))


def _read(
    steps: tf.data.Dataset, read: Read, keys: Keys, then: Then, topology: Topology, settle: Settle
) -> tf.data.Dataset:
    def checked(*batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        images, labels = read(*batch)
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(labels >= 0), ["one by one"])]):
            return tf.identity(images), tf.identity(labels)

    def carefully(step: tf.Tensor, *batch: Any) -> tf.data.Dataset:
        this = tf.data.Dataset.from_tensors(batch)
        image_spec, label_spec = this.map(read).element_spec

        def whole(*batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
            return then(step, *checked(*batch))

        def one(*example: Any) -> tf.data.Dataset:
            nothing = tf.zeros([1, *image_spec.shape[1:]], image_spec.dtype), tf.fill([1], -1)
            tried = tf.data.Dataset.from_tensors(example).map(read).ignore_errors()
            return tried.concatenate(tf.data.Dataset.from_tensors(nothing)).take(1)

        def settled(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images, labels = settle(images, labels, keys(*batch))
            if label_spec.shape[0]:  # Full batches of a known size stay so, though settling forgets the size.
                images, labels = tf.ensure_shape(images, image_spec.shape), tf.ensure_shape(labels, label_spec.shape)
            return then(step, images, labels)

        def one_by_one(*batch: Any) -> tf.data.Dataset:
            size = tf.maximum(tf.shape(batch[0], tf.int64)[0], 1)
            return tf.data.Dataset.from_tensor_slices(batch).batch(1).flat_map(one).unbatch().batch(size).map(settled)

        # The second part is made only where the first failed.
        return this.map(whole).ignore_errors().concatenate(this.flat_map(one_by_one)).take(1)

    threads = cores.each(topology.local_size)
    return steps.interleave(carefully, cycle_length=threads, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _some(batches: tf.data.Dataset) -> tf.data.Dataset:
    """The batches, which must not be none."""
    blank = tf.nest.map_structure(lambda spec: tf.zeros([0, *spec.shape[1:]], spec.dtype), batches.element_spec)
    ended = batches.map(lambda *batch: (True, batch)).concatenate(tf.data.Dataset.from_tensors((False, blank)))

    def count(seen: tf.Tensor, element: Any) -> Any:
        with tf.control_dependencies([tf.debugging.Assert(element[0] | (seen > 0), [_ALL, ""])]):
            return seen + 1, element

    counted = ended.scan(tf.constant(0, tf.int64), count)
    return counted.filter(lambda is_batch, batch: is_batch).map(lambda is_batch, batch: batch)
