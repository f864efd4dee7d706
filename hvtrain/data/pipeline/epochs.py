"""Streams whose epochs are opened in Python, one after the other, and then read by TensorFlow alone."""

import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from hvtrain.core.step_plan import Share
from hvtrain.data.pipeline.streams import FOREVER, ORDER, end_with_python, unconverted

_seeding = threading.RLock()  # Streams open their epochs in threads of their own.
_OPEN, _CLOSE = "<<", ">>"  # Around a message of ours in an error of TensorFlow's.


def epochs(open_epoch: Callable[[int], tf.data.Dataset], first: int, spec: Any) -> tf.data.Dataset:
    """open_epoch(first), open_epoch(first + 1) and so on, joined. Each is called when the one before has ended.

    open_epoch runs in Python, with an int. Its data set, of that element_spec, is handed to TensorFlow.
    """
    end_with_python()
    kept: deque[tf.data.Dataset] = deque(maxlen=2)  # A data set's functions go with its Python object.

    def opened(epoch: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:0"):
            kept.append(open_epoch(int(epoch)))
            return tf.data.experimental.to_variant(kept[-1])

    @unconverted
    def handed_over(epoch: tf.Tensor) -> tf.data.Dataset:
        return tf.data.experimental.from_variant(tf.py_function(opened, [epoch], tf.variant), spec)

    return tf.data.Dataset.range(first, FOREVER).flat_map(handed_over)


@contextmanager
def seeded(seed: int, epoch: int) -> Iterator[None]:
    """Sets TensorFlow's seed to a function of both, then sets it back.

    A shuffle that is made meanwhile has another order in each epoch, and the same one again when the run is resumed,
    whether it has a seed of its own or not. The seed is equal on all ranks: their shards differ already, and ranks that
    read the same data by mistake then read it in the same order, which is noticed.
    tf.random.set_seed would also reset the random operations of others.
    """
    made = int(np.random.default_rng((seed, ORDER, epoch)).integers(2**31))
    own: Any = context.context()
    with _seeding:
        before = own._seed, getattr(own, "_rng", None)
        own._seed, own._rng = made, random.Random(made)
        try:
            yield
        finally:
            own._seed, own._rng = before


def cut(batches: tf.data.Dataset, share: Share, first_step: int, name: str, ends: bool = False) -> tf.data.Dataset:
    """The batches of an epoch's steps from first_step on, out of batches of up to share.batch_size examples.

    The stream fails, see said(), if examples of that name end before the share does, or with `ends` if they do not end
    with it.
    """
    if not share.is_full:
        sizes = [share.begin(step + 1) - share.begin(step) for step in range(first_step, share.steps)]
        batches = batches.rebatch(sizes) if sizes else batches
    blank = tf.nest.map_structure(lambda one: tf.zeros([0, *one.shape[1:]], one.dtype), batches.element_spec)
    endless = batches.concatenate(tf.data.Dataset.from_tensors(blank).repeat())

    @unconverted
    def checked(step: tf.Tensor, *batch: Any) -> Any:
        found = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]
        begin = share.begin(step, tf.minimum)
        wanted = tf.where(step < share.steps, share.begin(step + 1, tf.minimum) - begin, 0)
        text = tf.strings.format(
            f"{_OPEN}{name}: {{}} examples were read and {share.num_examples:,} are needed{_CLOSE}",
            tf.minimum(begin, share.num_examples) + found,
        )
        with tf.control_dependencies([tf.debugging.Assert(found == wanted, [text])]):
            return tf.nest.map_structure(tf.identity, batch)

    steps = tf.data.Dataset.range(first_step, share.steps + ends)
    checked_batches = tf.data.Dataset.zip(steps, endless).map(lambda step, batch: checked(step, *batch))
    if ends:
        return checked_batches.filter(lambda *batch: tf.size(tf.nest.flatten(batch)[0], tf.int64) > 0)
    fixed = share.batch_size if share.is_full else None
    return checked_batches.map(
        lambda *batch: tf.nest.map_structure(lambda one: tf.ensure_shape(one, [fixed, *one.shape[1:]]), batch)
    )


def said(error: Exception) -> str:
    """The message of a stream that cut() made fail; empty if the error is another."""
    found = re.search(f"{_OPEN}(.*?){_CLOSE}", str(error), re.DOTALL)
    return found[1] if found else ""
