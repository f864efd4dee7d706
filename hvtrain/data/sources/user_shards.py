"""Calls a user's function that opens shards of a data set, and reads the shards that it returns.

A shard is a tf.data pipeline or a keras.utils.PyDataset. Both kinds are checked, and read as
single examples in the types that models take.
"""

import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow import TensorSpec, nest
from tensorflow.data import Dataset

from hvtrain.data.pipeline.epochs import call_python, global_seed
from hvtrain.data.pipeline.streams import ORDER
from hvtrain.data.source import Parts
from hvtrain.data.sources.file_source import StreamErrors
from hvtrain.data.sources.memory import RENUMBER, narrow_dtype, spec_of
from hvtrain.errors import ConfigError, DataError, UserError, cause_of

log = logging.getLogger(__name__)

REQUIRED = ("shard", "num_shards")
# Arguments that a function may declare, and their values while its examples are counted.
DEFAULTS = {"split": "train", "epoch": 0, "seed": 0, "start": 0, "batch_size": 1}
# The same conversions as in narrow_dtype().
NARROW_TYPES = {tf.float64: tf.float32, tf.int64: tf.int32, tf.uint64: tf.int32}
PARTS_NEEDED = "(inputs, targets) or (inputs, targets, weights) is needed"


class ShardKey(NamedTuple):
    """Identifies a shard."""

    shard: int
    """The shard's number, from 0 to num_shards - 1."""
    num_shards: int
    split: str


def checked_pipeline(dataset: Dataset, name: str) -> Dataset:
    """Returns a user's pipeline of single examples, in the types that models take.

    Args:
        dataset: The pipeline.
        name: The source of the pipeline, with which error messages begin.

    Raises:
        DataError: For elements other than (inputs, targets) or (inputs, targets, weights), and for
            tensors without a known shape.
    """
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise DataError(f"{name} gives {_describe_parts(spec)} per element; {PARTS_NEEDED}")
    for part in nest.flatten(spec):
        # Ragged and sparse tensors have specs of other types.
        if not isinstance(part, TensorSpec) or not part.shape.is_fully_defined():
            raise DataError(
                f"{name} gives {part}; single examples of dense tensors of a known shape are needed: remove .batch(), "
                "since the run makes batches, make tensors dense (to_tensor), or set the shape with tf.ensure_shape"
            )
    # With drop_remainder, batches have a known shape, like examples.
    last = dataset
    while type(last).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        (last,) = last._inputs()
    if "BatchDataset" in type(last).__name__:
        raise DataError(
            f"{name} ends with .batch(), but the run makes batches; remove it or, if each batch is one example, add "
            ".map(lambda *parts: parts)"
        )
    if any(part.dtype in NARROW_TYPES for part in nest.flatten(spec)):
        dataset = dataset.map(lambda *parts: nest.map_structure(_narrow, parts))
    return dataset


class PyDatasetExamples:
    """A shard as a keras.utils.PyDataset, read by as many of tf.data's threads as it has workers.

    Args:
        dataset: The user's PyDataset. All batches have the same size; only the last may be smaller.
        name: The source of the data set, with which error messages begin.
        record_error: Keeps an error for the run, which otherwise sees only TensorFlow's; returns the error.

    Raises:
        DataError: For batches with other parts, types or sizes than the first.
    """

    def __init__(
        self,
        dataset: keras.utils.PyDataset,
        name: str,
        record_error: Callable[[UserError], UserError],
    ) -> None:
        self._dataset = dataset
        self._name = name
        self._record_error = record_error
        self.epoch = -1
        """The last epoch that was begun; -1 before the first."""

        # num_batches calls len(), which raises TypeError if the class has no __len__.
        num_batches = 0
        with suppress(NotImplementedError, TypeError):
            num_batches = dataset.num_batches or 0
        if num_batches < 1:
            raise self._fail(
                "the PyDataset has no batches or no __len__; define __len__ to return at least 1"
            )

        first, size = self._batch(0)
        self.element_spec = spec_of(first)

        # All sizes follow from the first and the last batch; _read() checks the others.
        self._sizes = np.full(num_batches, size)
        last = num_batches - 1
        _, last_size = self._batch(last)
        if not 0 < last_size <= size:
            raise self._size_error(last_size, last)
        self._sizes[last] = last_size

    def cardinality(self) -> int:
        """Returns the number of examples, like the method of tf.data.Dataset."""
        return int(self._sizes.sum())

    def examples(self, epoch: int, start: int, seed: int | None) -> Dataset:
        """Returns the examples of an epoch from `start` on, batch by batch.

        Args:
            epoch: The epoch to begin, not earlier than the last one. The data set's on_epoch_end and
                on_epoch_begin are called for each epoch up to it, as Keras would have done.
            start: Number of examples to leave out at the beginning of the epoch.
            seed: The run's seed, with which the batches are shuffled; None keeps their order.
        """
        while self.epoch < epoch:
            if self.epoch >= 0:
                self._dataset.on_epoch_end()
            self._dataset.on_epoch_begin()
            self.epoch += 1
        numbers = np.arange(len(self._sizes))
        if seed is not None:
            # The order is the same on all ranks. Ranks that read the same data by mistake therefore
            # have equal first batches, which the run notices.
            numbers = np.random.default_rng((seed, ORDER, self.epoch)).permutation(numbers)

        # Batches before the one with the first example are not read; in that one, examples are skipped.
        begins = np.cumsum([0, *self._sizes[numbers]])
        first_batch = np.searchsorted(begins, start, side="right") - 1
        first_row = start - begins[first_batch]
        specs = [
            TensorSpec([None, *spec.shape], spec.dtype) for spec in nest.flatten(self.element_spec)
        ]

        def read(index):
            parts = call_python(self._read, [index], specs)
            return nest.pack_sequence_as(self.element_spec, parts)

        batches = Dataset.from_tensor_slices(numbers[first_batch:]).map(
            read, num_parallel_calls=max(1, self._dataset.workers), deterministic=True
        )
        return batches.unbatch().skip(first_row)

    def _read(self, index: np.int64) -> list[np.ndarray]:
        """Reads a batch, checks that it resembles the first, and returns its arrays."""
        batch, size = self._batch(int(index))
        if spec_of(batch) != self.element_spec:
            raise self._fail(
                f"batch {index} holds {describe_spec(spec_of(batch))}, but batch 0 holds "
                f"{describe_spec(self.element_spec)}; give all batches the same parts, types and shapes"
            )
        if size != self._sizes[index]:
            raise self._size_error(size, int(index))
        return nest.flatten(batch)

    def _batch(self, index: int) -> tuple[Parts, int]:
        """Reads a batch in the types that models take; returns it with its number of rows.

        Raises DataError unless it has two or three parts, all with the same number of rows.
        """
        batch = self._dataset[index]
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            raise self._fail(f"batch {index} holds {_describe_parts(batch)}; {PARTS_NEEDED}")
        # A list of inputs becomes a tuple, since tf.data would stack the arrays of a list.
        batch = keras.tree.lists_to_tuples(tuple(batch))
        parts = nest.map_structure(lambda part: narrow_dtype(np.asarray(part)), batch)
        # A scalar has no rows.
        sizes = {len(array) if array.ndim else 0 for array in nest.flatten(parts)}
        if len(sizes) > 1:
            raise self._fail(
                f"the arrays of batch {index} have {' and '.join(map(str, sorted(sizes)))} "
                "rows; each example needs one row in each array"
            )
        return parts, sizes.pop()

    def _size_error(self, size: int, index: int) -> UserError:
        return self._fail(
            f"batch {index} of {len(self._sizes)} holds {size} example(s), but batch 0 holds "
            f"{self._sizes[0]}; give all batches one size (only the last may be smaller)"
        )

    def _fail(self, problem: str) -> UserError:
        return self._record_error(DataError(f"{self._name}: {problem}"))


class UserFunction(StreamErrors):
    """Calls the user's function with the arguments that it declares.

    Args:
        function: See from_dataset().
        name: Name of the data set; default: the function's.

    Attributes:
        declared: Names of the known arguments that the function takes.

    Raises:
        ConfigError: If the function does not take shard and num_shards, or needs other arguments.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        # functools.partial hides the function's name and file.
        inner = function.func if isinstance(function, partial) else function
        # A callable object has no __qualname__, so the name of its class is used.
        inner_name = getattr(inner, "__qualname__", type(inner).__name__)
        self.name = name or f"{inner.__module__}.{inner_name}"
        self.file = getattr(getattr(inner, "__code__", None), "co_filename", "a function")
        self._function = function
        self._has_checked_order = False

        known = (*REQUIRED, *DEFAULTS)
        self.declared: set[str] = set()
        for argument in inspect.signature(function).parameters.values():
            # **kwargs accepts all arguments, but may ignore them. Neither side would then skip to `start`.
            if argument.kind is argument.VAR_KEYWORD:
                self.declared.update(REQUIRED)
                log.warning(
                    "%s: **%s gets only shard and num_shards; declare other arguments by name",
                    self.name,
                    argument.name,
                )
            elif argument.name in known:
                self.declared.add(argument.name)
            elif (
                argument.default is argument.empty and argument.kind is not argument.VAR_POSITIONAL
            ):
                raise ConfigError(
                    f"{self.name} has the argument {argument.name}, and hvtrain gives only {', '.join(known)}; set it "
                    "with functools.partial"
                )

        missing = [name for name in REQUIRED if name not in self.declared]
        if missing:
            raise ConfigError(
                f"{self.name} takes no {' and no '.join(missing)}; declare shard and num_shards, and return only the "
                "part of the data that they select"
            )

    def describe_call(self, key: ShardKey) -> str:
        """Formats the call for a shard as Python code, to begin a message with."""
        split = f", split={key.split!r}" if "split" in self.declared else ""
        return f"{self.name}(shard={key.shard}, num_shards={key.num_shards}{split})"

    def open(self, key: ShardKey, **values: Any) -> Dataset | PyDatasetExamples | None:
        """Calls the function to open a shard.

        Args:
            key: Key of the shard.
            values: Other arguments by name; those that are missing come from DEFAULTS.

        Returns:
            The shard's examples; None if the function returns None, since there is no such split.

        Raises:
            ConfigError: If the function fails.
            DataError: If the function returns an object that is not a shard, or None for the training split.
        """
        values = {**DEFAULTS, **values, **key._asdict()}
        call = self.describe_call(key)
        try:
            # Seeded, so that a shuffle has the same order whenever this epoch is opened.
            with global_seed(values["seed"], values["epoch"]):
                shard = self._function(**{name: values[name] for name in self.declared})
                if isinstance(shard, Dataset):
                    return checked_pipeline(shard, call)
                if isinstance(shard, keras.utils.PyDataset):
                    return PyDatasetExamples(shard, call, self.record_error)
        except UserError as error:
            # The message already says what is wrong; a line of the user's code would add nothing.
            raise self.record_error(error) from error.__cause__
        except Exception as error:  # The user's code may raise anything.
            message = f"{call} failed: {cause_of(error)}; tracebacks=true shows its traceback"
            raise self.record_error(ConfigError(message)) from error

        if shard is not None or key.split == "train":
            shown = "None" if shard is None else f"an object of type {type(shard).__name__}"
            raise self.fail(
                f"{call} returned {shown}; a tf.data.Dataset or a keras.utils.PyDataset is needed"
            )
        return None

    def warn_about_order(self, pipeline: Dataset) -> None:
        """Warns once if a training pipeline never shuffles, or is not deterministic."""
        if self._has_checked_order:
            return

        self._has_checked_order = True
        # The list grows while it is read, until it holds all operations of the pipeline, which
        # tf.data has no public method to list.
        operations = [pipeline]
        for operation in operations:
            operations += operation._inputs()
        shuffles = any(type(operation).__name__ == "_ShuffleDataset" for operation in operations)
        if "epoch" not in self.declared and not shuffles:
            log.warning(
                "%s neither shuffles nor declares epoch, so all epochs may have the same order; add .shuffle() to its "
                "pipeline",
                self.name,
            )
        if any(getattr(operation, "_deterministic", None) == "false" for operation in operations):
            log.warning(
                "%s sets deterministic=False, so a resumed run will not be bit-for-bit reproducible",
                self.name,
            )


def _describe_parts(element: Any) -> str:
    if isinstance(element, tuple | list):
        return f"{len(element)} part(s)"
    return f"an object of type {type(element).__name__}"


def describe_spec(spec: Any) -> str:
    """Lists the names, types and shapes of an example's parts."""
    return ", ".join(
        " ".join([*map(str, path[1:]), part.dtype.name, str(tuple(part.shape))])
        for path, part in keras.tree.flatten_with_path(spec)
    )


def _narrow(tensor: Any) -> tf.Tensor:
    """Converts a tensor to the type that models take; an integer beyond 32 bits ends the stream."""
    narrow = tf.cast(tensor, NARROW_TYPES.get(tensor.dtype, tensor.dtype))
    if narrow.dtype != tf.int32:
        return narrow

    message = f"models take integers of 32 bits; {RENUMBER}"
    fits = tf.debugging.assert_equal(tf.cast(narrow, tensor.dtype), tensor, message)
    with tf.control_dependencies([fits]):
        return tf.identity(narrow)
