"""Batches by number, as a keras.utils.PyDataset has them, read by as many threads as it has workers."""

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.data.pipeline.streams import ORDER, end_with_python
from hvtrain.data.sources.memory import as_models_take
from hvtrain.errors import DataError, UserError

log = logging.getLogger(__name__)


class PyBatches:
    """A shard's examples, in batches of one size, of which the last may be smaller.

    dataset: the user's. name begins messages. fail(error) notes an error for the run, which only sees TensorFlow's, and
    returns it.
    """

    def __init__(self, dataset: keras.utils.PyDataset, name: str, fail: Callable[[UserError], UserError]) -> None:
        self._dataset, self._name, self._fail = dataset, name, fail
        try:
            number = dataset.num_batches or 0
        except (NotImplementedError, TypeError):  # TypeError: len() of what has none.
            number = 0
        if number < 1:
            raise fail(DataError(f"{name}: __len__ gives no number of batches; at least one is needed"))
        first = self._batch(0)
        self.element_spec = tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape[1:], one.dtype), first)
        self._specs = tf.nest.flatten(self.element_spec)
        self._sizes = np.full(number, self._rows(first, 0))
        last = self._rows(self._batch(number - 1), number - 1)
        if not 0 < last <= self._sizes[0]:
            raise fail(self._wrong_size(last, number - 1))
        self._sizes[-1] = last
        self.epoch = -1  # Begun last.
        if dataset.use_multiprocessing:
            log.warning("%s: use_multiprocessing is left out; %d threads read its batches", name, dataset.workers)

    def count(self) -> int:
        """Number of examples."""
        return int(self._sizes.sum())

    def go_to(self, epoch: int) -> "PyBatches":
        """Calls on_epoch_end and on_epoch_begin as Keras would have, up to the beginning of that epoch."""
        while self.epoch < epoch:
            if self.epoch >= 0:
                self._dataset.on_epoch_end()
            self._dataset.on_epoch_begin()
            self.epoch += 1
        return self

    def examples(self, start: int, order: tuple[int, int] | None) -> tf.data.Dataset:
        """The examples from that one on, batch by batch, in an order made from (seed, epoch) or as they are."""
        end_with_python()
        numbers = np.arange(len(self._sizes))
        if order is not None:  # Equal on all ranks; see seeded() in epochs.py.
            seed, epoch = order
            numbers = np.random.default_rng((seed, ORDER, epoch)).permutation(numbers)
        ends = np.cumsum(self._sizes[numbers])
        first = int(np.searchsorted(ends, start, side="right"))  # Of the batches that are not over at the start.
        within = start - int(ends[first - 1]) if first else start

        def read(number: tf.Tensor) -> Any:
            found = tf.numpy_function(self._read, [number], [one.dtype for one in self._specs])
            found = [tf.ensure_shape(array, [None, *one.shape]) for array, one in zip(found, self._specs)]
            return tf.nest.pack_sequence_as(self.element_spec, found)

        batches = tf.data.Dataset.from_tensor_slices(numbers[first:])
        batches = batches.map(read, num_parallel_calls=max(1, self._dataset.workers), deterministic=True)
        return batches.unbatch().skip(within)

    def _read(self, number: np.int64) -> list[np.ndarray]:
        batch = self._batch(int(number))
        try:
            tf.nest.assert_same_structure(batch, self.element_spec)
        except (TypeError, ValueError) as error:
            raise self._fail(DataError(f"{self._name}: batch {number} has other parts than batch 0")) from error
        arrays = tf.nest.flatten(batch)
        for array, spec in zip(arrays, self._specs):
            came, needed = (array.dtype.name, array.shape[1:]), (spec.dtype.name, tuple(spec.shape))
            if came != needed:
                found = f"batch {number} holds examples of {came[0]} {came[1]} and batch 0 of {needed[0]} {needed[1]}"
                raise self._fail(DataError(f"{self._name}: {found}; give all one type and shape"))
        if (rows := self._rows(batch, int(number))) != self._sizes[number]:
            raise self._fail(self._wrong_size(rows, int(number)))
        return arrays

    def _batch(self, number: int) -> tuple[Any, ...]:
        batch = self._dataset[number]
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            came = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
            needed = "(inputs, targets) or (inputs, targets, weights) is needed"
            raise self._fail(DataError(f"{self._name}: batch {number} is {came}; {needed}"))
        return tf.nest.map_structure(lambda value: as_models_take(np.asarray(value)), tuple(batch))

    def _rows(self, batch: tuple[Any, ...], number: int) -> int:
        rows = {array.shape[0] if array.ndim else 0 for array in tf.nest.flatten(batch)}
        if len(rows) > 1:
            found = f"the arrays of batch {number} have {' and '.join(map(str, sorted(rows)))} rows"
            raise self._fail(DataError(f"{self._name}: {found}; each example needs one in each"))
        return rows.pop()

    def _wrong_size(self, rows: int, number: int) -> DataError:
        return DataError(
            f"{self._name}: batch {number} of {len(self._sizes)} holds {rows} examples and batch 0 {self._sizes[0]}; "
            "give all batches one size, except that the last may be smaller"
        )
