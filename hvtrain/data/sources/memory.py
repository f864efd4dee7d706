"""Data sets that fit in memory as arrays of any shapes, types and structure. Each rank keeps its shard only."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.manifest import of_arrays
from hvtrain.data.pipeline.streams import IndexedSource, Read
from hvtrain.data.pipeline.transform import Transform, Unchanged
from hvtrain.errors import ConfigError, DataError

Elements = Mapping[str, tuple[Any, ...]]
"""Split name -> (inputs, targets) or (inputs, targets, weights), nested structures of arrays [n, ...] of equal lengths.
"train" must be there."""

SPLIT_SEED = 0  # The validation part is the same in every run, whatever its seed.
PARTS = ("inputs", "targets", "weights")
_ATTRIBUTES = {"num_classes", "class_names"}


class Part(NamedTuple):
    """One split, as rows of arrays: splitting copies nothing."""

    elements: tuple[Any, ...]
    rows: np.ndarray


class MemorySource(IndexedSource):
    """A data set from a function that returns whole arrays.

    `load` runs when counts, the kind of the elements or a stream are first needed. The first stream cuts the arrays
    down to this rank's shards, and drops the rest. Models get float32 for other floats, and int32 for int64.

    load: returns {"train": (inputs, targets), "test": ..., "validation": ...}; the last two are optional.
    num_validation: number of examples taken out of the training part at random, with a fixed seed.
    more_facts: for the model's builder and the task, such as num_classes, class_names or vocabulary_size.
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
        self.name, self.origin = name, origin
        self._load, self._num_validation, self._more_facts = load, num_validation, dict(more_facts or {})
        vars(self).update({name: self._more_facts[name] for name in _ATTRIBUTES & self._more_facts.keys()})
        self._counts: dict[str, int] = {}
        self._spec: tuple[Any, ...] = ()
        self._parts: dict[str, Part] | None = None  # Whole arrays, only between counting and cutting.
        self._shards: dict[Topology, dict[str, tuple[Any, ...]]] = {}  # Of several ranks: see regrouped().

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

    def manifest(self) -> dict[str, Any]:
        found = super().manifest()
        whole: dict[int, str] = {}  # Validation and training are rows of the same arrays.
        for split, part in self.parts().items():
            digest = whole.get(id(part.elements)) or of_arrays(tf.nest.flatten(part.elements))
            whole[id(part.elements)] = digest
            if split in found["splits"]:
                found["splits"][split]["digest"] = of_arrays([np.frombuffer(digest.encode(), np.uint8), part.rows])
        return found

    def whole_targets(self) -> dict[str, Any]:
        return {
            split: tf.nest.map_structure(lambda array: array[part.rows], part.elements[1])  # noqa: B023, called at once
            for split, part in self.parts().items()
        }

    def class_counts(self) -> np.ndarray | None:
        num_classes = self.facts().get("num_classes", 2)
        classes = np.asarray(self.whole_targets()["train"]).ravel().astype(np.int64)
        return np.bincount(classes[(classes >= 0) & (classes < num_classes)], minlength=num_classes)

    def reader(self, split: str, topology: Topology) -> Read:
        if topology not in self._shards:  # Each rank's are cut once; then the whole arrays are dropped.
            parts, self._parts = self.parts(), None
            self.fit(parts["train"])
            shards = self._shards[topology] = {}
            with tf.device("CPU:0"):  # The input pipeline runs on the CPU, so no shard belongs on a GPU.
                for name, part in parts.items():
                    rows = part.rows[np.asarray(topology.share(len(part.rows)), np.int64)]
                    own = tf.nest.map_structure(lambda array: array[rows], part.elements)  # noqa: B023
                    shards[name] = tf.nest.map_structure(tf.constant, self.in_model_type(own))
        empty = tf.nest.map_structure(lambda one: tf.zeros([0, *one.shape], one.dtype), self._spec)
        elements = self._shards[topology].get(split, empty)
        return lambda indices: tf.nest.map_structure(lambda array: tf.gather(array, indices), elements)

    def fit(self, train: Part) -> None:
        """Fits what is to be the same on every rank on the whole training part, before shards are cut."""

    def parts(self) -> dict[str, Part]:
        """The whole arrays by split, loaded again if they were dropped."""
        return self._parts or self._open()

    def _open(self) -> dict[str, Part]:
        try:
            arrays = self._load()
            whole = {split: tf.nest.map_structure(np.asarray, tuple(part)) for split, part in arrays.items()}
            whole = {split: self.check(split, *elements) for split, elements in whole.items()}
        except OSError as error:
            raise DataError(f"{self.name} ({self.origin}) cannot be read: {error}; fix the file") from error
        except DataError as error:
            if self.on_error == "skip":
                raise DataError(f"{error} (arrays are read as a whole, so data.on_error=skip does not help)") from error
            raise
        parts = {split: Part(elements, np.arange(_length(elements))) for split, elements in whole.items()}
        none = self.in_model_type(tf.nest.map_structure(lambda array: array[:0], whole["train"]))
        self._spec = tf.nest.map_structure(lambda array: tf.TensorSpec(array.shape[1:], tf.as_dtype(array.dtype)), none)

        train, wanted = parts["train"], self._num_validation
        if wanted and "validation" not in parts:
            if wanted >= len(train.rows):
                found = f"dataset.num_validation={wanted} leaves nothing of {len(train.rows)} training examples"
                raise ConfigError(f"{found}; choose 0 ... {len(train.rows) - 1}")
            order = np.random.default_rng(SPLIT_SEED).permutation(len(train.rows))
            parts["validation"] = train._replace(rows=np.sort(order[:wanted]))
            parts["train"] = train._replace(rows=np.sort(order[wanted:]))
        return parts

    def check(self, split: str, *elements: Any) -> tuple[Any, ...]:
        """A split's elements. Raises DataError for unequal lengths and for numbers that are not finite."""
        where = f"{self.name}, {split} ({self.origin})"
        lengths = {name: len(array) for name, array in _named(elements).items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise DataError(f"{where}: {found}; each example needs one of each")
        for name, array in _named(elements).items():
            if np.issubdtype(array.dtype, np.floating) and not (finite := np.isfinite(array)).all():
                row = int(np.argmin(finite.reshape(len(array), -1).all(axis=1)))
                raise DataError(f"{where}: the {name} of example {row} hold NaN or infinite values; fix or drop it")
        return elements

    def in_model_type(self, elements: Any) -> Any:
        """Arrays of the types that models take, from some rows of a split."""
        return tf.nest.map_structure(as_models_take, elements)


def _named(elements: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """All arrays by inputs, targets or weights, and by their names within these."""
    found = {}
    for part, element in zip(PARTS, elements):
        for path, array in keras.tree.flatten_with_path(element):
            found[".".join(map(str, (part, *path)))] = array
    return found


OWN_NUMBERS = "number what they name from 0 on, as numpy.unique(..., return_inverse=True) does"


def as_models_take(array: np.ndarray) -> np.ndarray:
    """The array in the type that models take: float32 for float64, int32 for int64.

    Raises DataError for integers that 32 bits do not hold.
    """
    taken_as = {"float64": "float32", "int64": "int32"}.get(array.dtype.name)
    if taken_as is None:
        return array
    taken = array.astype(taken_as)
    if taken_as == "int32" and (wrapped := taken != array).any():
        raise DataError(f"{array[wrapped][0]} is among the integers, and models take those of 32 bits; {OWN_NUMBERS}")
    return taken


def _length(elements: tuple[Any, ...]) -> int:
    return len(tf.nest.flatten(elements)[0])
