"""Data sets that fit in memory as arrays of any structure.

Each rank loads the whole arrays, and keeps only its shard of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.description import count_classes
from hvtrain.data.manifest import digest_arrays
from hvtrain.data.pipeline.streams import IndexedSource, Read
from hvtrain.data.pipeline.transform import Transform, Unchanged
from hvtrain.errors import ConfigError, DataError

Elements = Mapping[str, tuple[Any, ...]]
"""Split name -> (inputs, targets) or (inputs, targets, weights).

Each is a nested structure of arrays [n, ...]. All arrays of a split have the same length. "train"
is required.
"""

# Fixed, so that every run holds out the same examples, whatever its own seed.
SPLIT_SEED = 0
PART_NAMES = ("inputs", "targets", "weights")

RENUMBER = "number what they name from 0 on, as numpy.unique(..., return_inverse=True) does"


class Part(NamedTuple):
    """One split, as rows of whole arrays: to take validation out of training copies nothing."""

    elements: tuple[Any, ...]
    """The whole arrays, as in Elements."""
    rows: np.ndarray
    """The numbers of the split's rows."""


class MemorySource(IndexedSource):
    """A data set from a function that returns whole arrays.

    The function runs when counts, types or a stream are first needed. The first stream cuts the
    arrays down to this rank's shards and drops the rest. Models get float32 for float64, and int32
    for int64.

    Args:
        name: of the data set, for messages and the manifest.
        load: returns {"train": (inputs, targets), "test": ..., "validation": ...}; the last two
            are optional.
        origin: where the arrays come from, for the run's header.
        num_validation: number of examples taken out of the training part at random, with a fixed
            seed.
        more_facts: for the model's builder and the task, such as num_classes, class_names or
            vocabulary_size.

    Raises:
        ConfigError: if num_validation is negative or leaves nothing to train on.
        DataError: once loaded, if lengths differ, or numbers are not finite or too large.
    """

    transform: Transform = Unchanged()

    def __init__(
        self,
        name: str,
        load: Callable[[], Elements],
        origin: str = "arrays in memory",
        num_validation: int = 0,
        more_facts: Mapping[str, Any] | None = None,
    ) -> None:
        if num_validation < 0:
            raise ConfigError(f"dataset.num_validation={num_validation} is negative; 0 means none")

        self.name = name
        self.origin = origin
        self._load = load
        self._num_validation = num_validation
        self._more_facts = dict(more_facts or {})
        set_class_attributes(self, self._more_facts)

        self._counts: dict[str, int] = {}
        self._spec: tuple[Any, ...] = ()
        # The whole arrays, between counting and cutting only.
        self._parts: dict[str, Part] | None = None
        # By rank: a run that resumes on another number of ranks reads the shards of several; see
        # regrouped() in streams.py.
        self._shards: dict[Topology, dict[str, tuple[Any, ...]]] = {}

    def num_examples(self, split: str) -> int:
        if not self._counts:
            self._parts = self._open()
            self._counts = {name: len(part.rows) for name, part in self._parts.items()}

        return self._counts.get(split, 0)

    @property
    def element_spec(self) -> tuple[Any, ...]:
        self.num_examples("train")
        return self._spec

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), **self._more_facts}

    def description(self) -> dict[str, list[str]]:
        description = super().description()
        if "num_classes" not in self.facts():
            return description
        targets = self.whole_targets()["train"]
        is_classes = isinstance(targets, np.ndarray) and targets.ndim == 1 and targets.dtype.kind in "iu"
        if is_classes and targets.size and targets.min() > 0:
            description["warnings"] = [
                f"classes begin at {targets.min()}, and a model has an output for 0 too; give y - {targets.min()}"
            ]
        return description

    def manifest(self) -> dict[str, Any]:
        manifest = super().manifest()
        # By the identity of the arrays: validation and training may share them, and hashing takes
        # time.
        digests: dict[int, str] = {}
        for split, part in self.parts().items():
            key = id(part.elements)
            if key not in digests:
                digests[key] = digest_arrays(tf.nest.flatten(part.elements))
            if split in manifest["splits"]:
                content = np.frombuffer(digests[key].encode(), np.uint8)
                manifest["splits"][split]["digest"] = digest_arrays([content, part.rows])

        return manifest

    def whole_targets(self) -> dict[str, Any]:
        return {split: _take(part.elements[1], part.rows) for split, part in self.parts().items()}

    def class_counts(self) -> np.ndarray | None:
        num_classes = self.facts().get("num_classes", 2)
        # Masks also hold 255, the label of pixels that do not count.
        return count_classes(np.asarray(self.whole_targets()["train"]), num_classes)

    def reader(self, split: str, topology: Topology) -> Read:
        if topology not in self._shards:
            self._shards[topology] = self._cut_shards(topology)

        # A split that does not exist has no examples.
        elements = self._shards[topology].get(split, no_examples(self._spec))

        def read(indices):
            return tf.nest.map_structure(lambda array: tf.gather(array, indices), elements)

        return read

    def _cut_shards(self, topology: Topology) -> dict[str, tuple[Any, ...]]:
        """Returns a rank's rows by split, as tensors, and drops the whole arrays."""
        parts = self.parts()
        self._parts = None
        self.fit(parts["train"])

        shards = {}
        for split, part in parts.items():
            local = np.asarray(topology.share(len(part.rows)), np.int64)
            elements = self.in_model_type(_take(part.elements, part.rows[local]))
            # The input pipeline runs on the CPU, so no shard belongs on a GPU.
            with tf.device("CPU:0"):
                shards[split] = tf.nest.map_structure(tf.constant, elements)

        return shards

    def fit(self, train: Part) -> None:
        """Fits the transform to the whole training part, so that it is equal on all ranks.

        Called before shards are cut. By default there is nothing to fit.
        """

    def parts(self) -> dict[str, Part]:
        """Returns the whole arrays by split, and loads them again if they were dropped."""
        return self._parts or self._open()

    def _open(self) -> dict[str, Part]:
        """Loads the whole arrays, notes the spec of an example, and takes the validation part out."""
        whole = self._load_checked()
        empty = self.in_model_type(_take(whole["train"], np.arange(0)))
        self._spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape[1:], tf.as_dtype(array.dtype)),
            empty,
        )

        parts = {}
        for split, elements in whole.items():
            num_rows = len(tf.nest.flatten(elements)[0])
            parts[split] = Part(elements, np.arange(num_rows))

        # If the user gives a validation part, none is taken out of training.
        if self._num_validation and "validation" not in parts:
            self._hold_out_validation(parts)
        return parts

    def _load_checked(self) -> dict[str, tuple[Any, ...]]:
        """Returns the whole arrays by split. Raises DataError if they cannot be used."""
        try:
            arrays = {}
            for split, elements in self._load().items():
                arrays[split] = tf.nest.map_structure(np.asarray, tuple(elements))
            return {split: self.check(split, *elements) for split, elements in arrays.items()}
        except OSError as error:
            raise DataError(f"{self.name} ({self.origin}) cannot be read: {error}; fix the file") from error
        except DataError as error:
            if self.on_error != "skip":
                raise
            raise DataError(f"{error} (arrays are read as a whole, so data.on_error=skip does not help)") from error

    def _hold_out_validation(self, parts: dict[str, Part]) -> None:
        """Takes validation out of the training part, at random."""
        train = parts["train"]
        num_train = len(train.rows)
        if self._num_validation >= num_train:
            raise ConfigError(
                f"dataset.num_validation={self._num_validation} leaves nothing of {num_train} "
                f"training examples; choose 0 ... {num_train - 1}"
            )

        # Sorted, so that the examples of a part keep their order.
        order = np.random.default_rng(SPLIT_SEED).permutation(num_train)
        parts["validation"] = train._replace(rows=np.sort(order[: self._num_validation]))
        parts["train"] = train._replace(rows=np.sort(order[self._num_validation :]))

    def check(self, split: str, *elements: Any) -> tuple[Any, ...]:
        """Returns a split's elements, once they are checked.

        Raises:
            DataError: for unequal lengths, and numbers that are not finite.
        """
        where = f"{self.name}, {split} ({self.origin})"
        arrays = _named_arrays(elements)

        if len({len(array) for array in arrays.values()}) > 1:
            lengths = ", ".join(f"{len(array)} {name}" for name, array in arrays.items())
            raise DataError(f"{where}: {lengths}; each example needs one of each")

        for name, array in arrays.items():
            if not np.issubdtype(array.dtype, np.floating):
                continue
            is_finite = np.isfinite(array)
            if not is_finite.all():
                row = int(np.argmin(is_finite.reshape(len(array), -1).all(axis=1)))
                raise DataError(f"{where}: the {name} of example {row} hold NaN or infinite values; fix or drop it")

        return elements

    def in_model_type(self, elements: Any) -> Any:
        """Returns some rows of a split in the types that models take."""
        return tf.nest.map_structure(as_models_take, elements)


def as_models_take(array: np.ndarray) -> np.ndarray:
    """Converts float64 to float32 and int64 to int32; leaves other types alone.

    Raises:
        DataError: for integers that 32 bits do not hold. Users' ids are often 64-bit hashes, which
            would silently become other ids.
    """
    # The name is the same for both byte orders.
    if array.dtype.name == "float64":
        return array.astype(np.float32)
    if array.dtype.name != "int64":
        return array

    narrow = array.astype(np.int32)
    wrapped = narrow != array
    if wrapped.any():
        raise DataError(f"{array[wrapped][0]} is among the integers, and models take those of 32 bits; {RENUMBER}")
    return narrow


def no_examples(element_spec: Any) -> Any:
    """Returns tensors of no examples of that kind."""
    return tf.nest.map_structure(
        lambda spec: tf.zeros([0, *spec.shape], spec.dtype),
        element_spec,
    )


def known_facts(
    num_classes: int | None,
    class_names: Sequence[str] | None,
    others: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns the facts that a user gave, without those that are None."""
    facts = {
        "num_classes": num_classes,
        "class_names": class_names,
        **(others or {}),
    }
    return {name: value for name, value in facts.items() if value is not None}


def set_class_attributes(source: Any, facts: Mapping[str, Any]) -> None:
    """Sets num_classes and class_names of a source, if they are among the facts."""
    for name in ("num_classes", "class_names"):
        if name in facts:
            setattr(source, name, facts[name])


def _take(arrays: Any, rows: np.ndarray) -> Any:
    return tf.nest.map_structure(lambda array: array[rows], arrays)


def _named_arrays(elements: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Returns all arrays by part and by their path in it, such as "inputs.age"."""
    arrays = {}
    for part, structure in zip(PART_NAMES, elements):
        for path, array in keras.tree.flatten_with_path(structure):
            arrays[".".join(map(str, (part, *path)))] = array

    return arrays
