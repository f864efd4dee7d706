"""The two forms of a shard from a user's function: a tf.data pipeline and a keras.utils.PyDataset.

Both are checked, and give single examples in the types that models take.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.data.pipeline.streams import ORDER, end_with_python
from hvtrain.data.sources.memory import RENUMBER, as_models_take
from hvtrain.errors import DataError, UserError

log = logging.getLogger(__name__)

# The same types as in as_models_take().
NARROW_TYPES = {tf.float64: tf.float32, tf.int64: tf.int32}
PARTS_NEEDED = "(inputs, targets) or (inputs, targets, weights) is needed"


class PipelineExamples:
    """A shard as a tf.data pipeline of single examples.

    Args:
        dataset: the user's.
        name: begins messages.

    Raises:
        DataError: for elements other than (inputs, targets) or (inputs, targets, weights), and for
            tensors without a known shape.
    """

    def __init__(self, dataset: tf.data.Dataset, name: str) -> None:
        self._name = name
        _check_example(dataset.element_spec, name)
        specs = tf.nest.flatten(dataset.element_spec)
        if any(spec.dtype in NARROW_TYPES for spec in specs):
            dataset = dataset.map(lambda *parts: tf.nest.map_structure(_narrowed, parts))
        self._dataset = dataset
        self.element_spec = dataset.element_spec

    def count(self) -> int | None:
        """Returns the number of examples.

        None if it is not known before they are read, or if they never end.
        """
        # tf.data returns -1 for examples that never end, and -2 for an unknown number.
        number = int(self._dataset.cardinality())
        return number if number >= 0 else None

    def read_all(self) -> int:
        """Returns the number of examples, by reading them.

        Raises:
            DataError: if they never end.
        """
        if self._dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise DataError(f"{self._name} gives examples without end; say by num_examples how many make an epoch")
        return int(self._dataset.reduce(np.int64(0), lambda number, _: number + 1))

    def examples(self, start: int) -> tf.data.Dataset:
        """Returns the examples from `start` on; those before are read and dropped."""
        return self._dataset.skip(start) if start else self._dataset

    @property
    def shuffles(self) -> bool:
        """True if the pipeline shuffles, as far as tf.data shows its operations."""
        names = {type(operation).__name__ for operation in self._operations()}
        return "_ShuffleDataset" in names

    @property
    def is_deterministic(self) -> bool:
        """False if an operation may change the order of examples from run to run."""
        flags = [getattr(operation, "_deterministic", None) for operation in self._operations()]
        return "false" not in flags

    def _operations(self) -> Iterator[tf.data.Dataset]:
        """Yields the data sets that the pipeline is made of, the last operation first."""
        # tf.data offers no public way to them.
        pending = [self._dataset]
        while pending:
            operation = pending.pop()
            yield operation
            pending += operation._inputs()


class PyDatasetExamples:
    """A shard as a keras.utils.PyDataset, read by as many threads as it has workers.

    Args:
        dataset: the user's. All batches have one size; the last may be smaller.
        name: begins messages.
        fail: notes an error for the run, which only sees TensorFlow's, and returns it.

    Raises:
        DataError: for batches of other parts, types or sizes than the first.
    """

    def __init__(
        self,
        dataset: keras.utils.PyDataset,
        name: str,
        fail: Callable[[UserError], UserError],
    ) -> None:
        self._dataset = dataset
        self._name = name
        self._report = fail
        self.epoch = -1
        """The epoch that was begun last."""

        # It raises TypeError, from len(), if the class has no __len__.
        try:
            self._num_batches = dataset.num_batches or 0
        except (NotImplementedError, TypeError):
            self._num_batches = 0

        if self._num_batches < 1:
            raise self._fail("__len__ gives no number of batches; at least one is needed")

        first = self._batch(0)
        self.element_spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape[1:], array.dtype),
            first,
        )
        self._specs = tf.nest.flatten(self.element_spec)

        # Only the first and the last batch are read to know all sizes; _read() checks the others.
        self._sizes = np.full(self._num_batches, self._batch_size(first, 0))
        last = self._num_batches - 1
        last_size = self._batch_size(self._batch(last), last)
        if not 0 < last_size <= self._sizes[0]:
            raise self._wrong_size(last_size, last)
        self._sizes[last] = last_size

        # tf.data's threads read the batches, not Keras's pool of threads or processes.
        if dataset.use_multiprocessing:
            log.warning(
                "%s: use_multiprocessing is left out; %d threads read its batches",
                name,
                dataset.workers,
            )

    def count(self) -> int:
        """Returns the number of examples."""
        return int(self._sizes.sum())

    def go_to(self, epoch: int) -> "PyDatasetExamples":
        """Begins an epoch: calls on_epoch_end and on_epoch_begin as Keras would have until then."""
        while self.epoch < epoch:
            if self.epoch >= 0:
                self._dataset.on_epoch_end()
            self._dataset.on_epoch_begin()
            self.epoch += 1

        return self

    def examples(self, start: int, seed: tuple[int, int] | None) -> tf.data.Dataset:
        """Returns the examples from `start` on, batch by batch.

        Args:
            start: examples of the epoch that are left out.
            seed: (seed of the run, epoch) for an order of the batches; None: as they are.
        """
        end_with_python()
        numbers = np.arange(self._num_batches)
        if seed is not None:
            # Equal on all ranks: those that read the same data by mistake then read it in the same
            # order, which is noticed.
            run_seed, epoch = seed
            numbers = np.random.default_rng((run_seed, ORDER, epoch)).permutation(numbers)

        # Batches that end before the start are not read; of the next one some examples are skipped.
        ends = np.cumsum(self._sizes[numbers])
        num_over = int(np.searchsorted(ends, start, side="right"))
        within = start - int(ends[num_over - 1]) if num_over else start

        def read(number):
            types = [spec.dtype for spec in self._specs]
            arrays = tf.numpy_function(self._read, [number], types)
            # A Python function hides the shapes from the graph.
            pairs = zip(arrays, self._specs)
            tensors = [tf.ensure_shape(array, [None, *spec.shape]) for array, spec in pairs]
            return tf.nest.pack_sequence_as(self.element_spec, tensors)

        batches = tf.data.Dataset.from_tensor_slices(numbers[num_over:]).map(
            read,
            num_parallel_calls=max(1, self._dataset.workers),
            deterministic=True,
        )
        return batches.unbatch().skip(within)

    def _read(self, number: np.int64) -> list[np.ndarray]:
        """Returns the arrays of a batch that is like the first."""
        batch = self._batch(int(number))
        try:
            tf.nest.assert_same_structure(batch, self.element_spec)
        except (TypeError, ValueError) as error:
            raise self._fail(f"batch {number} has other parts than batch 0") from error

        arrays = tf.nest.flatten(batch)
        for array, spec in zip(arrays, self._specs):
            kind = f"{array.dtype.name} {array.shape[1:]}"
            needed = f"{spec.dtype.name} {tuple(spec.shape)}"
            if kind != needed:
                raise self._fail(
                    f"batch {number} holds examples of {kind} and batch 0 of {needed}; give all one type and shape"
                )

        size = self._batch_size(batch, int(number))
        if size != self._sizes[number]:
            raise self._wrong_size(size, int(number))
        return arrays

    def _batch(self, number: int) -> tuple[Any, ...]:
        """Reads a batch, in the types that models take. Raises DataError for other parts."""
        batch = self._dataset[number]
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            raise self._fail(f"batch {number} is {_parts_in_words(batch)}; {PARTS_NEEDED}")
        return tf.nest.map_structure(
            lambda value: as_models_take(np.asarray(value)),
            tuple(batch),
        )

    def _batch_size(self, batch: tuple[Any, ...], number: int) -> int:
        """Returns the number of rows. Raises DataError if the arrays of a batch differ in it."""
        # A scalar has no rows.
        sizes = {array.shape[0] if array.ndim else 0 for array in tf.nest.flatten(batch)}
        if len(sizes) > 1:
            raise self._fail(
                f"the arrays of batch {number} have {' and '.join(map(str, sorted(sizes)))} "
                "rows; each example needs one in each"
            )

        return sizes.pop()

    def _wrong_size(self, size: int, number: int) -> UserError:
        return self._fail(
            f"batch {number} of {self._num_batches} holds {size} examples and batch 0 "
            f"{self._sizes[0]}; give all batches one size, except that the last may be smaller"
        )

    def _fail(self, problem: str) -> UserError:
        return self._report(DataError(f"{self._name}: {problem}"))


def _check_example(element_spec: Any, name: str) -> None:
    """Raises DataError unless the elements of a pipeline are single examples of dense tensors."""
    if not isinstance(element_spec, tuple) or len(element_spec) not in (2, 3):
        raise DataError(f"{name} gives elements of {_parts_in_words(element_spec)}; {PARTS_NEEDED}")

    for spec in tf.nest.flatten(element_spec):
        # Ragged and sparse tensors have specs of their own.
        if not isinstance(spec, tf.TensorSpec):
            kind = type(spec).__name__.removesuffix("Spec")
            raise DataError(f"{name} gives a {kind}; make it dense (to_tensor)")

        if not spec.shape.is_fully_defined():
            raise DataError(
                f"{name} gives tensors of shape {spec.shape}; single examples of a known shape "
                "are needed: leave out .batch(), since the run makes batches, or set the shape "
                "with tf.ensure_shape"
            )


def _parts_in_words(element: Any) -> str:
    if isinstance(element, tuple | list):
        return f"{len(element)} parts"
    return f"a {type(element).__name__}"


def _narrowed(tensor: Any) -> tf.Tensor:
    """Returns the tensor in the type that models take; a step fails for integers beyond 32 bits."""
    narrow = tf.cast(tensor, NARROW_TYPES.get(tensor.dtype, tensor.dtype))
    if tensor.dtype != tf.int64:
        return narrow

    message = f"models take integers of 32 bits; {RENUMBER}"
    fits = tf.debugging.assert_equal(tf.cast(narrow, tf.int64), tensor, message)
    with tf.control_dependencies([fits]):
        return tf.identity(narrow)
