"""A shard as a tf.data pipeline of single examples, checked and in the types that models take."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.data.sources.memory import OWN_NUMBERS
from hvtrain.errors import DataError

_NARROW = {tf.float64: tf.float32, tf.int64: tf.int32}  # As as_models_take() has it for arrays.


class Examples:
    """Raises DataError for elements other than (inputs, targets) or (inputs, targets, weights) of known shapes.

    dataset: the user's. name begins messages.
    """

    def __init__(self, dataset: tf.data.Dataset, name: str) -> None:
        self._name, spec = name, dataset.element_spec
        if not isinstance(spec, tuple) or len(spec) not in (2, 3):
            came = f"{len(spec)} parts" if isinstance(spec, tuple) else f"a {type(spec).__name__}"
            needed = "(inputs, targets) or (inputs, targets, weights) is needed"
            raise DataError(f"{name} gives elements of {came}; {needed}")
        for one in tf.nest.flatten(spec):
            if not isinstance(one, tf.TensorSpec):
                raise DataError(f"{name} gives a {type(one).__name__.removesuffix('Spec')}; make it dense (to_tensor)")
            if not one.shape.is_fully_defined():
                raise DataError(
                    f"{name} gives tensors of shape {one.shape}; single examples of a known shape are needed: leave "
                    "out .batch(), since the run makes batches, or set the shape with tf.ensure_shape"
                )
        if any(one.dtype in _NARROW for one in tf.nest.flatten(spec)):
            dataset = dataset.map(lambda *parts: tf.nest.map_structure(_narrowed, parts))
        self._dataset, self.element_spec = dataset, dataset.element_spec

    def count(self) -> int | None:
        """Number of examples; None if it is not known before they are read, or if they never end."""
        number = int(self._dataset.cardinality())
        return number if number >= 0 else None

    def read_all(self) -> int:
        """Number of examples, by reading them. Raises DataError if they never end."""
        if self._dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise DataError(f"{self._name} gives examples without end; say by num_examples how many make an epoch")
        return int(self._dataset.reduce(np.int64(0), lambda number, _: number + 1))

    def examples(self, start: int) -> tf.data.Dataset:
        """The examples from that one on; those before are read and dropped."""
        return self._dataset.skip(start) if start else self._dataset

    @property
    def shuffles(self) -> bool:
        """True if the pipeline shuffles, as far as tf.data shows its operations."""
        return any(type(one).__name__ == "_ShuffleDataset" for one in self._operations())

    @property
    def is_deterministic(self) -> bool:
        """False if an operation may change the order of examples from run to run."""
        return all(getattr(one, "_deterministic", None) != "false" for one in self._operations())

    def _operations(self) -> Iterator[tf.data.Dataset]:
        left = [self._dataset]
        while left:
            yield (one := left.pop())
            left += one._inputs()


def _narrowed(tensor: Any) -> tf.Tensor:
    narrow = tf.cast(tensor, _NARROW.get(tensor.dtype, tensor.dtype))
    if tensor.dtype != tf.int64:
        return narrow
    message = f"models take integers of 32 bits; {OWN_NUMBERS}"
    with tf.control_dependencies([tf.debugging.assert_equal(tf.cast(narrow, tf.int64), tensor, message)]):
        return tf.identity(narrow)
