"""The source of a data set that fits in memory, as arrays in any nested structure.

Each rank loads the whole arrays, but keeps only its shard. Other sources use the helpers below.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow import nest

from hvtrain.config.validate import check_least
from hvtrain.core.topology import Topology
from hvtrain.data.description import listed
from hvtrain.data.kinds import inputs_of
from hvtrain.data.manifest import digest_arrays
from hvtrain.data.pipeline.streams import IndexedSource, Read
from hvtrain.data.pipeline.transform import Transform, Unchanged
from hvtrain.data.source import Parts
from hvtrain.errors import ConfigError, DataError

# (inputs, targets) or (inputs, targets, weights) by split; "train" is required. Each part is a
# nested structure of arrays [n, ...], with the same n for all arrays of a split.
Elements = Mapping[str, Parts]

# Fixed, so that every run holds out the same examples, whatever the run's seed.
SPLIT_SEED = 0

RENUMBER = "number the ids from 0 on, as numpy.unique(..., return_inverse=True) does"


class Part(NamedTuple):
    """A split as row indices into whole arrays, so that splitting off validation copies nothing."""

    elements: Parts
    """The whole arrays, as in Elements."""
    rows: np.ndarray
    """The indices of the split's rows."""


class MemorySource(IndexedSource):
    """A source of examples from a function that returns whole arrays.

    The function is called when counts, types or a stream are first needed. Opening the first stream
    cuts this rank's shards and drops the whole arrays. In the shards, float64 becomes float32, and
    64-bit integers become int32.

    Args:
        name: Name of the data set, for messages and the manifest.
        load: Returns {"train": (inputs, targets), "test": ..., "validation": ...}; the last two
            are optional.
        origin: Where the arrays come from, for the run's header.
        num_validation: Number of examples that are moved from train to validation, at random with a
            fixed seed; ignored if load() returns a validation part.
        more_facts: Facts for the model's builder and the task, such as num_classes, class_names or
            vocabulary_size.

    Raises:
        ConfigError: If num_validation is negative or leaves nothing to train on.
        DataError: When loading, if a file cannot be read, lengths differ, examples differ in size
            between splits, or numbers are not finite or too large for 32 bits.
    """

    transform: Transform = Unchanged()
    _spec: Parts = ()
    # The whole arrays, kept from the first count until the shards are cut.
    _parts: dict[str, Part] | None = None

    def __init__(
        self,
        name: str,
        load: Callable[[], Elements],
        origin: str = "arrays in memory",
        num_validation: int = 0,
        more_facts: Mapping[str, Any] | None = None,
    ) -> None:
        check_counts(num_validation=num_validation)
        self.name = name
        self.origin = origin
        self._load = load
        self._num_validation = num_validation
        self.take_facts(more_facts or {})

        self._counts: dict[str, int] = {}
        # Number of values in a training example, by the names that check() uses.
        self._sizes: dict[str, int] = {}
        # Shards are kept by topology: a run resumed on another number of ranks reads the shards of
        # several of the plan's ranks; see regroup() in streams.py.
        self._shards: dict[Topology, dict[str, Parts]] = {}

    def num_examples(self, split: str) -> int:
        if not self._counts:
            self._parts = self._open()
            self._counts = {name: len(part.rows) for name, part in self._parts.items()}

        return self._counts.get(split, 0)

    @property
    def element_spec(self) -> Parts:
        # Counting loads the arrays, which sets the spec.
        self.num_examples("train")
        return self._spec

    def manifest(self) -> dict[str, Any]:
        manifest = super().manifest()
        # Hashing is slow, so arrays that training and validation share are hashed only once.
        digests = {}
        parts = self.parts()
        for split, entry in manifest["splits"].items():
            elements, rows = parts[split]
            key = id(elements)
            if key not in digests:
                digests[key] = digest_arrays(nest.flatten(elements))
            content = np.frombuffer(digests[key].encode(), np.uint8)
            entry["digest"] = digest_arrays([content, rows])

        return manifest

    def whole_targets(self) -> dict[str, Any]:
        return {split: take(part.elements[1], part.rows) for split, part in self.parts().items()}

    def reader(self, split: str, topology: Topology) -> Read:
        if topology not in self._shards:
            parts = self.parts()
            # From here on, only `parts` refers to the whole arrays; they can be freed on return.
            self._parts = None
            self.fit(parts["train"])
            shards = {}
            for split_name, part in parts.items():
                rows = part.rows[self.shard_rows(split_name, topology)]
                shard = self.cast_elements(take(part.elements, rows))
                shards[split_name] = on_cpu(shard)
            self._shards[topology] = shards

        # A missing split has no examples.
        elements = self._shards[topology].get(split, empty_batch(self._spec))

        def read(indices):
            return nest.map_structure(lambda array: tf.gather(array, indices), elements)

        return read

    def fit(self, train: Part) -> None:
        """Fits the transform to the training examples of all ranks, so that it is the same on each.

        Called before the shards are cut. The default fits nothing.
        """

    def parts(self) -> dict[str, Part]:
        """Returns the whole arrays by split, loading them again if they were dropped."""
        return self._parts or self._open()

    def _open(self) -> dict[str, Part]:
        """Loads and checks the whole arrays, sets the spec, and splits validation off train."""
        try:
            loaded = self._load()
            parts = {}
            # Training comes first, since check() compares the other splits with it.
            for split in sorted(loaded, key=lambda split: split != "train"):
                arrays = nest.map_structure(np.asarray, tuple(loaded[split]))
                elements = self.check(split, *arrays)
                parts[split] = Part(elements, np.arange(len(nest.flatten(elements)[0])))
        except OSError as error:
            raise DataError(
                f"{self.name} ({self.origin}) cannot be read: {error}; fix the file"
            ) from error
        train = parts["train"]
        self._spec = spec_of(self.cast_elements(take(train.elements, slice(0))))

        # If the arrays include a validation part, nothing is taken out of training.
        if self._num_validation and "validation" not in parts:
            num_train = len(train.rows)
            if self._num_validation >= num_train:
                raise ConfigError(
                    f"dataset.num_validation={self._num_validation} leaves none of the {num_train} "
                    f"training examples; choose 0 ... {num_train - 1}"
                )
            validation, rest = random_parts(self._num_validation, num_train - self._num_validation)
            parts["validation"] = train._replace(rows=validation)
            parts["train"] = train._replace(rows=rest)
        return parts

    def check(self, split: str, *elements: Any) -> Parts:
        """Checks a split's elements and returns them; a subclass may reshape them.

        The elements of train are checked first.

        Raises:
            DataError: If the arrays differ in length, an example differs in size from those of
                train, or a floating-point number is not finite as float32.
        """
        location = f"{self.name}, {split} ({self.origin})"
        # Arrays by the part and the path within it, such as "inputs.age".
        arrays = inputs_of(dict(zip(("inputs", "targets", "weights"), elements)))
        if len({len(array) for array in arrays.values()}) > 1:
            lengths = listed([f"{len(array)} {name}" for name, array in arrays.items()])
            raise DataError(f"{location}: {lengths}; each example needs one of each")

        for name, array in arrays.items():
            # Sizes are compared, not shapes, since Keras itself adds and drops axes of size 1.
            size = math.prod(array.shape[1:])
            if size != self._sizes.setdefault(name, size):
                raise DataError(
                    f"{location}: {name} have size {size} per example, but {self._sizes[name]} in train; make the "
                    "sizes equal"
                )
            if array.dtype.kind != "f":
                continue
            # Models take float32, in which a large float64 is infinite.
            with np.errstate(over="ignore"):
                is_finite = np.isfinite(narrow_dtype(array))
            if not is_finite.all():
                row = np.argmin(is_finite.reshape(len(array), -1).all(axis=1))
                raise DataError(
                    f"{location}: the {name} of example {row} hold NaN or infinite values (as float32); fix or drop it"
                )

        return elements

    def cast_elements(self, elements: Any) -> Any:
        """Converts some rows of a split to the types that models take."""
        return nest.map_structure(narrow_dtype, elements)


def narrow_dtype(array: np.ndarray) -> np.ndarray:
    """Converts float64 to float32, and int64 and uint64 to int32; returns arrays of other types unchanged.

    Raises:
        DataError: An integer does not fit into 32 bits. Users' ids are often 64-bit hashes, which
            would silently become other ids.
    """
    # Types are compared by name, which is the same for both byte orders.
    if array.dtype.name == "float64":
        return array.astype(np.float32)
    if array.dtype.name not in ("int64", "uint64"):
        return array

    narrow = array.astype(np.int32)
    wrapped = narrow != array
    if wrapped.any():
        raise DataError(
            f"the integer {array[wrapped][0]} does not fit in the 32 bits that models take; {RENUMBER}"
        )
    return narrow


def check_counts(low: int = 0, **counts: int) -> None:
    """Raises ConfigError unless these settings of the data set are at least `low`."""
    for name, count in counts.items():
        check_least(f"dataset.{name}", count, low)


def check_shares(**shares: float) -> None:
    """Raises ConfigError unless these settings can be shares of the data set that are taken out of train."""
    # Written so that NaN, for which every comparison is false, is refused too.
    if not (min(shares.values()) >= 0 and sum(shares.values()) < 1):
        settings = " and ".join(f"dataset.{name}={share}" for name, share in shares.items())
        raise ConfigError(f"{settings}: each must be 0 or more, and their sum less than 1")


def check_files(**settings: Any) -> None:
    """Raises ConfigError for a setting without a file, such as that of a shell variable that is not set."""
    for name, value in settings.items():
        names = [value] if value is None or isinstance(value, str) else list(value)
        if not names or "" in names:
            raise ConfigError(f"dataset.{name} is empty; give a file or a folder")


def names_as_text(setting: Any) -> Any:
    """Returns a setting with the names of columns in it as text, since Hydra takes the name 60 for a number."""
    if setting is None:
        return None
    if isinstance(setting, Mapping):
        return {str(name): value for name, value in setting.items()}
    if isinstance(setting, Sequence) and not isinstance(setting, str):
        return list(map(str, setting))
    return str(setting)


def spec_of(batch: Any) -> Any:
    """Returns the spec of one example in a batch of nested arrays or symbolic tensors."""
    return nest.map_structure(lambda array: tf.TensorSpec(array.shape[1:], array.dtype), batch)


def empty_batch(element_spec: Any) -> Any:
    """Returns tensors for zero examples of this spec."""
    return nest.map_structure(lambda spec: tf.zeros([0, *spec.shape], spec.dtype), element_spec)


def take(arrays: Any, rows: Any) -> Any:
    """Returns some rows, by indices or a slice, of nested arrays."""
    return nest.map_structure(lambda array: array[rows], arrays)


def on_cpu(arrays: Any) -> Any:
    """Turns nested arrays into tensors in main memory, where the input pipeline runs."""
    with tf.device("CPU:0"):
        return nest.map_structure(tf.constant, arrays)


def random_parts(*sizes: int) -> list[np.ndarray]:
    """Divides row indices into sorted parts of these sizes, at random with a fixed seed."""
    rows = np.random.default_rng(SPLIT_SEED).permutation(sum(sizes))
    return [np.sort(part) for part in np.split(rows, np.cumsum(sizes)[:-1])]
