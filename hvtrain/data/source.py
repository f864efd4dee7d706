"""The contract between a data set and the runner: counts first, then one stream for each rank."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow import TensorSpec

from hvtrain.core.step_plan import Share
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError

# Height, width and channels.
ImageShape = tuple[int, int, int]
# Parts of an example or a batch: (inputs, targets) or (inputs, targets, weights).
Parts = tuple[Any, ...]
# Phrases by label, such as "features" or "warnings".
Phrases = dict[str, list[str]]
SKIP_ADVICE = "or set data.on_error=skip to leave out what cannot be read"


@dataclass(frozen=True)
class StreamRequest:
    """A rank's request for training batches, from start_step on.

    Example: rank 1 of 4 resumes at step 250 of a run with 100 steps per epoch.

    >>> request = StreamRequest(Topology(1, 4), 32, seed=0, start_step=250, steps_per_epoch=100)
    >>> request.position
    (2, 50)
    """

    topology: Topology
    batch_size: int
    """Number of examples in a full batch on this rank."""
    seed: int
    start_step: int
    """The first step, counted from the beginning of the run."""
    steps_per_epoch: int
    num_examples: int = 0
    """This rank's examples per epoch, which Share cuts into steps; 0 means that every step has a full batch."""
    shares: tuple[Share, ...] = ()
    """The shares of all ranks; empty if all are equal to this rank's."""

    @property
    def position(self) -> tuple[int, int]:
        """The epoch of start_step, and the number of steps before it in that epoch."""
        return divmod(self.start_step, self.steps_per_epoch)

    def share_of(self, num_local: int) -> Share:
        """Returns the Share that cuts an epoch of this rank into steps.

        Args:
            num_local: Number of examples that this rank holds.

        Raises:
            ConfigError: The rank has too few examples for the epoch.
        """
        num_needed = self.num_examples or self.steps_per_epoch * self.batch_size
        if self.steps_per_epoch < 1 or num_needed > num_local:
            raise ConfigError(
                f"{self.steps_per_epoch} step(s) of {self.batch_size} examples do not fit the {num_local} training "
                f"examples of rank {self.topology.rank} of {self.topology.size}; lower the steps per epoch or the "
                "batch size"
            )
        return Share(self.batch_size, self.steps_per_epoch, num_needed)


class Unreadable(NamedTuple):
    """An example, or a part of a file, that cannot be used."""

    location: str
    problem: str
    num_examples: int | None = 1
    """None if it is unknown, as for the rest of a damaged file."""


@dataclass(frozen=True)
class Preprocessing:
    """Turns one raw example, as the user has it, into what the model trains on.

    It becomes the first part of the saved model. So it may hold only what plain Keras can load
    without hvtrain, and it must give the same bits as the input pipeline.
    """

    shape: Any
    """The shape of a raw example that is an array of numbers, with None for a side of any size. For
    other raw examples, which the model takes unchanged, a nested structure of tf.TensorSpec."""
    layers: Sequence[Callable[[Any], Any]] = ()
    """Keras layers or functions of keras.ops, in order."""
    values: str = "as the data set's streams give them"
    """Description of a raw example's values, for the user of the saved model."""
    range: tuple[float, float] | None = None
    """The smallest and the largest value, if known."""

    def inputs(self) -> Any:
        """Makes the inputs of a saved model; arrays are float32, to which Keras converts other numbers."""
        if isinstance(self.shape, tuple):
            return keras.Input(self.shape, dtype="float32", name="raw")
        return symbolic(self.shape)

    def __call__(self, raw: Any) -> Any:
        for layer in self.layers:
            raw = layer(raw)
        return raw


def symbolic(spec: Any) -> Any:
    """Makes Keras inputs for the nested tf.TensorSpec of one example, named by the keys of its dict."""
    inputs = []
    for path, part in keras.tree.flatten_with_path(spec):
        # Saved models show these names, so that users recognize the keys of their dict.
        name = part.name or None
        if name is None and path and isinstance(path[-1], str):
            name = path[-1]
        inputs.append(keras.Input(tuple(part.shape), dtype=part.dtype.name, name=name))
    return keras.tree.pack_sequence_as(spec, inputs)


class Source(ABC):
    """An opened data set: opening it finds the files, counting checks them, and streams read them.

    Every source obeys these laws:

    - A rank's shard is fixed by (rank, size). Shards are disjoint and together complete.
    - A training stream is a pure function of (seed, rank, size, step). The order of epoch e depends
      on (seed, e, rank). Step s is batch s % steps_per_epoch of epoch s // steps_per_epoch.
      Examples beyond steps_per_epoch batches are dropped for that epoch.
    - So the stream that starts at step k is the tail of the one that starts at 0, including
      augmentation. Every resume relies on that.
    """

    SPLITS: ClassVar[tuple[str, ...]] = ("train", "validation", "test")

    name: str
    origin: str
    """Origin of the data, shown in the run's header."""
    image_shape: ImageShape
    """Height, width, channels. Unset if the inputs are not images."""
    num_classes: int
    """Unset if the targets are not classes."""
    class_names: Sequence[str] | None = None
    """The name of each class, if the source knows them."""
    more_facts: Mapping[str, Any] = MappingProxyType({})
    """Facts that are not attributes, for the model's builder and the task."""
    on_error: str = "stop"
    """Treatment of unreadable examples: "stop" raises an error, "skip" leaves them out. Set before streams open."""
    same_on_all_ranks: bool = False
    """True if ranks are meant to read the same data. Otherwise, equal first batches are an error."""
    raw_batches: bool = False
    """True if the training step calls finish(), on the GPU if there is one, instead of the training
    stream. Images are then sent as bytes, a quarter of the size. Set before streams are opened."""
    sizing: Any = None
    """The Sizing of encoded images, see pipeline/decoding.py; None if the source decodes no images."""
    no_random_crop: str = "gives images that are decoded already"
    """The reason why augment=random_resized_crop is impossible, or empty if it is possible."""
    bucket_by_length: int | Sequence[int] = 0
    """Number of length buckets, or their boundaries; see lengths(). Set before streams are opened."""
    end_token: int | None = None
    """The token that ends a text, if there is one."""
    target_setting: str = "data set"
    """The setting that determines the targets, or "data set"; messages advise users to choose another."""
    augmentation: Any = None
    """The Augmentation of training images, if any; the runner sets it, and raw_batches with it."""

    @property
    def element_spec(self) -> Parts:
        """The spec of one example as streams give it, without the batch axis.

        (inputs, targets) or (inputs, targets, weights), each a nested structure of tf.TensorSpec.
        The default is an image, float32 [h, w, c], and the index of its class, int32.
        """
        return TensorSpec(self.image_shape, tf.float32), TensorSpec((), tf.int32)

    @property
    def skips(self) -> bool:
        """True if unreadable examples are left out."""
        return self.on_error == "skip"

    def facts(self) -> dict[str, Any]:
        """Returns facts of the data set by name. A model's builder gets those it declares as arguments."""
        names = ("image_shape", "num_classes", "class_names")
        facts = {name: getattr(self, name, None) for name in names}
        inputs = self.element_spec[0]
        if isinstance(inputs, TensorSpec):
            facts["input_shape"] = tuple(inputs.shape)
        known = {name: value for name, value in facts.items() if value is not None}
        return {**known, **self.more_facts}

    def take_facts(self, facts: Mapping[str, Any]) -> None:
        """Stores facts that are not None; class_names and num_classes (by default, their number) become attributes."""
        known = {name: value for name, value in facts.items() if value is not None}
        names = known.get("class_names")
        if names is not None:
            self.class_names = check_class_names(names, known.setdefault("num_classes", len(names)))
        if "num_classes" in known:
            self.num_classes = known["num_classes"]
        self.more_facts = known

    def fact(self, name: str, needed_by: str) -> Any:
        """Returns a fact by name.

        Args:
            needed_by: The setting that needs it, for the message.

        Raises:
            ConfigError: The data set lacks it.
        """
        facts = self.facts()
        if name not in facts:
            raise ConfigError(
                f"{needed_by} needs {name}, which the data set {self.name} does not give (it gives "
                f"{', '.join(facts) or 'none'}); choose another data set or add it to the data set's facts()"
            )
        return facts[name]

    @abstractmethod
    def num_examples(self, split: str) -> int:
        """Returns the number of examples of a split over all ranks; 0 if there is no such split."""

    def split_sizes(self) -> dict[str, int]:
        """Returns the number of examples of each split that has any."""
        sizes = {split: self.num_examples(split) for split in self.SPLITS}
        return {split: size for split, size in sizes.items() if size}

    def own_counts(self, topology: Topology) -> dict[Any, int]:
        """Returns counts that only this rank can read, such as those of its shards; empty by default."""
        return {}

    def take_counts(self, counts: Iterable[Mapping[Any, int]]) -> None:  # noqa: B027
        """Stores the own_counts() of all ranks, so that shard_sizes() reads nothing."""

    def shard_sizes(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[int]:
        """Returns the number of examples that each of num_shards ranks holds, in proportion to weights.

        Every rank computes the same list.
        """
        num_examples = self.num_examples(split)
        # The sizes come from Topology, which also cuts the shards, so the two cannot disagree.
        ranks = [Topology(rank, num_shards, weights=tuple(weights)) for rank in range(num_shards)]
        return [rank.share_size(num_examples) for rank in ranks]

    def shard_size(self, split: str, topology: Topology) -> int:
        """Returns the number of examples that this rank holds."""
        return self.shard_sizes(split, topology.size, topology.weights)[topology.rank]

    @abstractmethod
    def training(self, request: StreamRequest) -> tf.data.Dataset:
        """Returns an endless stream of batches of element_spec.

        For images with classes, these are float32 [batch, h, w, c] and int32 [batch]. Batches are full
        unless request.num_examples is smaller; then request.share_of() sets their sizes.
        """

    def finish(self, inputs: Any) -> Any:
        """Turns the raw inputs of a stream with raw_batches into the model's inputs, in the step's graph."""
        return inputs

    @abstractmethod
    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        """Returns a finite stream of batches of this rank's shard, each example once; the last batch may be short."""

    def lengths(self, split: str) -> np.ndarray | None:
        """Returns the length of each example of a split, int [n]; None, the default, if all are equal or unknown.

        A source with lengths pads each batch, with weight 0 or a mask on the padding, and obeys bucket_by_length.
        """
        return None

    def whole_targets(self) -> dict[str, Any]:
        """Returns all targets by split, as arrays, to be checked before the first step.

        Empty, the default, if they are expensive to read.
        """
        return {}

    def preprocessing(self) -> Preprocessing:
        """Returns the first part of the saved model, which turns a raw example of the user into the model's input.

        The default is for streams that change nothing. A source that normalizes or resizes returns
        Keras layers that do the same, so that its saved model takes raw examples and loads without hvtrain.
        """
        return Preprocessing(getattr(self, "image_shape", None) or self.element_spec[0])

    def description(self) -> Phrases:
        """Describes the data in phrases by label, for the run's header and its record.

        For example {"features": ["age: number (2 gaps, filled with the median 34)"], "target": ["y:
        3 classes (no 61%, yes 38%, maybe 1%)"]}. The label "warnings" holds what a user should check
        before training. Called on every rank, after examples are counted.
        """
        return {"splits": [f"{split} {size:,}" for split, size in self.split_sizes().items()]}

    def value_range(self) -> tuple[float, float] | None:
        """Returns the smallest and the largest value of images before normalization; None if unknown."""
        declared_range = self.preprocessing().range
        if declared_range:
            return declared_range
        inputs = self.element_spec[0]
        is_bytes = isinstance(inputs, TensorSpec) and inputs.dtype == tf.uint8
        return (0.0, 255.0) if is_bytes else None

    def fitted(self) -> dict[str, bytes]:
        """Returns files, by name, that hold values fitted to the training data, such as a mean.

        A run keeps them, and passes them to fit_as() when it is resumed, evaluated or exported.
        """
        return {}

    def fit_as(self, files: Mapping[str, bytes]) -> None:  # noqa: B027  (most sources fit nothing)
        """Uses what fitted() returned when the run began. Called before any data are read."""

    def assets(self) -> dict[str, bytes]:
        """Returns files, by name, that users of the saved model need, such as a tokenizer.

        The run folder keeps them.
        """
        return {}

    def text_of(self, tokens: Sequence[int]) -> str | None:
        """Turns tokens into text. None, the default, if the data are not text or lack a tokenizer."""
        return None

    def tokens_of(self, text: str) -> list[int] | None:
        """Turns text into tokens. None, the default, if the data are not text or lack a tokenizer."""
        return None

    def raw_examples(self, split: str, topology: Topology, count: int) -> list[np.ndarray]:
        """Returns up to `count` raw examples from the start of this rank's shard, as preprocessing() takes them.

        They serve to check preprocessing() against evaluation(). An empty list, the default, skips
        the check.
        """
        return []

    def cells(self, split: str, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Returns texts or numbers by column name, which the report shows for the examples with these indices.

        Empty, the default, if inputs mean nothing to a reader.
        """
        return {}

    def unreadable(self) -> list[Unreadable]:
        """Returns what on_error="skip" has left out in this process since the last call."""
        return []

    def manifest(self) -> dict[str, Any]:
        """Returns the data set's identity, by which a resumed run notices changed data; see manifest.py.

        It holds only JSON types. Every rank computes it before the first stream. Sources add more than
        counts, such as digests.
        """
        splits = {split: {"examples": size} for split, size in self.split_sizes().items()}
        # For images with classes, two facts are easier to read than a spec.
        facts = self.facts()
        if {"image_shape", "num_classes"} <= facts.keys():
            elements = {
                "image_shape": list(facts["image_shape"]),
                "num_classes": facts["num_classes"],
            }
        else:
            specs = tf.nest.flatten(self.element_spec)
            elements = {"elements": [f"{spec.dtype.name} {spec.shape}" for spec in specs]}
        return {"name": self.name, **elements, "splits": splits}

    def explain(self, error: Exception) -> Exception:
        """Turns TensorFlow's error about unreadable data into a DataError that names the file or row.

        The runner passes each tf.errors.OpError of fit and evaluate to this method, since TensorFlow
        does not say which file its input pipeline could not read. Other errors are returned unchanged.
        """
        return error


def check_class_names(names: Sequence[str] | None, num_classes: int | None) -> Sequence[str] | None:
    """Returns the names as text. Raises ConfigError if there is not one for each class."""
    if names is not None and len(names) != num_classes:
        raise ConfigError(
            f"class_names has length {len(names)}, but num_classes is {num_classes}; give one name for each class"
        )
    # Names such as 10 and 20 come from the command line as numbers.
    return None if names is None else list(map(str, names))


def reason(error: tf.errors.OpError) -> str:
    """Returns TensorFlow's message without the names of nodes and devices around it.

    >>> text = "{{function_node f}} corrupted record at 9 [Op:Next] name: "
    >>> reason(tf.errors.DataLossError(None, None, text))
    'corrupted record at 9'
    """
    # {{node ...}} comes before the message; [Op:...] and the lines of a traceback come after it.
    message = re.sub(r"\{\{.*?\}\}|\[Op:.*|\nTraceback .*", "", error.message, flags=re.DOTALL)
    return re.sub(r"^\w+Error: ", "", message.strip()).rstrip(".")
