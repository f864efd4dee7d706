"""The contract between a data set and the runner: counts first, then one stream for each rank."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.step_plan import Share
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError

LEAVE_OUT = "or leave out what cannot be read with data.on_error=skip"


@dataclass(frozen=True)
class StreamRequest:
    """The training batches that a rank asks a source for: those of one step of the run and of all steps after it."""

    topology: Topology
    """The rank that asks, among how many."""
    batch_size: int
    """Examples of a full batch on this rank."""
    seed: int
    start_step: int
    """The first step wanted, counted from the beginning of the run."""
    steps_per_epoch: int
    num_examples: int = 0
    """This rank's examples in an epoch; 0 means full batches in all steps. Share says how others are cut."""

    @property
    def position(self) -> tuple[int, int]:
        """The epoch of start_step, and the steps of that epoch before it."""
        return divmod(self.start_step, self.steps_per_epoch)

    def share_of(self, num_local: int) -> Share:
        """How an epoch is cut into steps. Raises ConfigError if the rank's num_local examples cannot fill it."""
        wanted = self.num_examples or self.steps_per_epoch * self.batch_size
        if self.steps_per_epoch < 1 or wanted > num_local:
            raise ConfigError(
                f"{self.steps_per_epoch} steps of {self.batch_size} examples do not fit the {num_local} training "
                f"examples of rank {self.topology.rank} of {self.topology.size}; lower the steps per epoch or the "
                "batch size"
            )
        return Share(self.batch_size, self.steps_per_epoch, wanted)


class Unreadable(NamedTuple):
    """Something that data.on_error=skip left out."""

    place: str
    why: str
    num_examples: int | None = 1
    """None if it cannot be known, as for the rest of a damaged file."""


@dataclass(frozen=True)
class Preprocessing:
    """Turns one raw example into what the model trains on.

    It goes into the saved model, before the trained one. So it may hold only what plain Keras loads without hvtrain,
    and it must give the same bits as the input pipeline.
    """

    shape: Any
    """Shape of a raw example, an array of any numeric type; None for a side of any size. Or, for raw examples that are
    no single array of numbers, a nested structure of tf.TensorSpec, which the model takes as it is."""
    layers: Sequence[Callable[[Any], Any]] = ()
    """Keras layers or functions of keras.ops, in order."""
    values: str = "as the data set's streams give them"
    """The values in a raw example, described for the user of the saved model."""
    range: tuple[float, float] | None = None
    """The smallest and the largest value, if known."""

    def inputs(self) -> Any:
        """The inputs of a saved model; an array's is float32, to which Keras converts all other numeric types."""
        if isinstance(self.shape, tuple):
            return keras.Input(self.shape, dtype="float32", name="raw")
        return symbolic(self.shape)

    def __call__(self, raw: Any) -> Any:
        for layer in self.layers:
            raw = layer(raw)
        return raw


def symbolic(spec: Any) -> Any:
    """Keras inputs for a nested structure of tf.TensorSpec of one example, under their names in a dict."""
    inputs = []
    for path, one in keras.tree.flatten_with_path(spec):
        name = one.name or (path[-1] if path and isinstance(path[-1], str) else None)
        inputs.append(keras.Input(tuple(one.shape), dtype=one.dtype.name, name=name))
    return keras.tree.pack_sequence_as(spec, inputs)


class Source(ABC):
    """An opened data set. Opening finds the files, the first count checks them, and streams read the pixels.

    Every source keeps these laws:
    - A rank's shard is fixed by (rank, size). Shards are disjoint and together complete.
    - A training stream is a pure function of (seed, rank, size, step). The order of epoch e depends on
      (seed, e, rank). Step s is batch s % steps_per_epoch of epoch s // steps_per_epoch. Examples beyond
      that many batches are dropped for that epoch.
    - So the stream that starts at step k is the tail of the one that starts at 0, augmentation included.
    """

    SPLITS: ClassVar[tuple[str, ...]] = ("train", "validation", "test")

    name: str
    origin: str
    """Origin of the data, shown in the run's header."""
    image_shape: tuple[int, int, int]
    """Height, width, channels. Unset if the inputs are no images."""
    num_classes: int
    """Unset if the targets are no classes."""
    class_names: Sequence[str] | None = None
    """By class, if the source knows them."""
    on_error: str = "stop"
    """Reaction to an example that cannot be read: "stop", or "skip" it and count. Set before streams are opened."""
    same_on_all_ranks: bool = False
    """Set it if ranks are meant to read the same data; otherwise equal first batches are an error."""
    equal_batches_advice: str = (
        "give each rank its own part (topology.share), or set same_on_all_ranks on the data set if that is intended"
    )
    """What to do then, for the message."""

    raw_batches: bool = False
    """Training streams may leave the last part of their work, `finish`, to the step, where a GPU does it: images on the
    way there are then a quarter as large. Set before streams are opened."""
    end_token: int | None = None
    """The token that ends a text, if there is one."""
    augmentation: Any = None
    """Set by the runner, with raw_batches, if layers are to change training images; see pipeline/augmentation.py."""

    @property
    def element_spec(self) -> tuple[Any, ...]:
        """One example as streams give it, without the axis of the batch: (inputs, targets) or (inputs, targets,
        weights), each a nested structure of tf.TensorSpec. The default is an image and the index of its class.
        """
        return tf.TensorSpec(self.image_shape, tf.float32), tf.TensorSpec((), tf.int32)

    def facts(self) -> dict[str, Any]:
        """What the data set knows of itself, by name; a model's builder gets those that it declares as arguments."""
        facts = {name: getattr(self, name, None) for name in ("image_shape", "num_classes", "class_names")}
        if isinstance(inputs := self.element_spec[0], tf.TensorSpec):
            facts["input_shape"] = tuple(inputs.shape)
        return {name: value for name, value in facts.items() if value is not None}

    def fact(self, name: str, wanted_by: str) -> Any:
        """The fact of that name. Raises ConfigError if the data set lacks it; wanted_by begins the message."""
        if name not in (facts := self.facts()):
            raise ConfigError(
                f"{wanted_by} needs {name}, which the data set {self.name} does not give (it gives "
                f"{', '.join(facts)}); choose another data set or add it to the data set's facts()"
            )
        return facts[name]

    @abstractmethod
    def num_examples(self, split: str) -> int:
        """Number of examples in "train", "validation" or "test" over all ranks; 0 if there is no such split."""

    def own_counts(self, topology: Topology) -> dict[Any, int]:
        """What this rank has to read to know how many examples its shards hold. Here they are known."""
        return {}

    def take_counts(self, counts: Iterable[Mapping[Any, int]]) -> None:  # noqa: B027
        """Takes what own_counts() gave on each rank, so that shard_sizes() reads nothing."""

    def shard_sizes(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[int]:
        """Examples that each of num_shards ranks holds, in proportion to weights. Every rank computes the same list."""
        num_examples = self.num_examples(split)
        places = [Topology(rank, num_shards, weights=tuple(weights)) for rank in range(num_shards)]
        return [place.share_size(num_examples) for place in places]

    @abstractmethod
    def training(self, request: StreamRequest) -> tf.data.Dataset:
        """Endless stream of batches of element_spec, such as images float32 [batch, h, w, c], labels int32 [batch].

        Batches are full, unless request.num_examples is less: they are then as request.share_of() cuts them.
        """

    def finish(self, inputs: Any) -> Any:
        """Inputs of a training stream with raw_batches as the model sees them. In the graph of the step."""
        return inputs

    @abstractmethod
    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        """Finite stream of this rank's shard, each example once; the last batch may be short."""

    def whole_targets(self) -> dict[str, Any]:
        """All targets by split, as arrays, to be checked before the first step; empty if that is not cheap."""
        return {}

    def class_counts(self) -> np.ndarray | None:
        """Training targets of each class over all ranks, for balanced weights; None if counting them is not cheap."""
        return None

    def preprocessing(self) -> Preprocessing:
        """How an example in the user's arrays or files becomes what the streams give, for the saved model.

        The default is for streams that change nothing. A source that normalizes or resizes declares it here, with
        Keras's own layers: its saved model then takes what the user has, and loads without hvtrain.
        """
        return Preprocessing(getattr(self, "image_shape", None) or self.element_spec[0])

    def value_range(self) -> tuple[float, float] | None:
        """The smallest and the largest value that images have before they are normalized, if known."""
        inputs = self.element_spec[0]
        is_bytes = isinstance(inputs, tf.TensorSpec) and inputs.dtype == tf.uint8
        return self.preprocessing().range or ((0.0, 255.0) if is_bytes else None)

    def fitted(self) -> dict[str, bytes]:
        """What is fitted to the training data, as files by name, such as a mean; empty if nothing is.

        A run keeps them, and gives them back to fit_as() when it is resumed, evaluated or exported.
        """
        return {}

    def fit_as(self, files: Mapping[str, bytes]) -> None:  # noqa: B027  (most sources fit nothing)
        """Takes what fitted() gave when the run began, in place of fitting. Called before anything is read."""

    def assets(self) -> dict[str, bytes]:
        """Files that users of the saved model need, by name, such as a tokenizer; the run folder keeps them."""
        return {}

    def text_of(self, tokens: Sequence[int]) -> str | None:
        """Tokens of an example as text; None, the default, for data that are no text or lack a tokenizer."""
        return None

    def tokens_of(self, text: str) -> list[int] | None:
        """The reverse of text_of; None, the default, for data that are no text or lack a tokenizer."""
        return None

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        """The first examples of this rank's shard as preprocessing() takes them, to check it against evaluation().

        An empty list, the default, leaves preprocessing() unchecked.
        """
        return []

    def unreadable(self) -> list[Unreadable]:
        """Items left out by this process since the last call, if on_error is "skip" and the source supports it."""
        return []

    def manifest(self) -> dict[str, Any]:
        """Identity of the data set, as JSON: it tells another data set under the same settings apart. See manifest.py.

        Every rank computes it before the first stream. A source adds what it knows beyond counts.
        """
        splits = {split: {"examples": self.num_examples(split)} for split in self.SPLITS if self.num_examples(split)}
        facts = self.facts()
        if {"image_shape", "num_classes"} <= facts.keys():
            elements = {"image_shape": list(facts["image_shape"]), "num_classes": facts["num_classes"]}
        else:
            elements = {"elements": [f"{one.dtype.name} {one.shape}" for one in tf.nest.flatten(self.element_spec)]}
        return {"name": self.name, **elements, "splits": splits}

    def explain(self, error: Exception) -> Exception:
        """A DataError that names the file or row if TensorFlow's error came from reading data, else `error` itself.

        TensorFlow does not say which file its input pipeline could not read, so the runner passes each
        tf.errors.OpError of fit and evaluate here.
        """
        return error


def reason(error: tf.errors.OpError) -> str:
    """TensorFlow's message without the names of nodes and devices around it.

    >>> reason(tf.errors.DataLossError(None, None, "{{function_node f}} corrupted record at 9 [Op:Next] name: "))
    'corrupted record at 9'
    """
    return re.sub(r"\{\{.*?\}\}|\[Op:.*", "", error.message, flags=re.DOTALL).strip().rstrip(".")
