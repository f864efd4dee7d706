"""The contract between a data set and the runner: counts first, then one stream per rank."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.preprocessing import Preprocessing


class Unreadable(NamedTuple):
    """What data.on_error=skip left out."""

    place: str
    why: str
    num_examples: int | None
    """None where nobody can know: what follows the damage in a file."""


class Source(ABC):
    """An opened data set. Opening finds the files, the first count checks them; pixels are read by streams.

    The laws that every source keeps:
    - A rank's shard is fixed by (rank, size): shards are disjoint and together complete.
    - A training stream is a pure function of (seed, rank, size, step). The order of epoch e depends on
      (seed, e, rank). Step s is batch s % steps_per_epoch of epoch s // steps_per_epoch; what an epoch's
      order holds beyond that many full batches is dropped for that epoch.
    - So the stream that starts at step k is the tail of the one that starts at 0, augmentation included.
    """

    SPLITS: ClassVar[tuple[str, ...]] = ("train", "validation", "test")

    name: str
    origin: str
    """Where the data came from, for people: the run's header shows it."""
    image_shape: tuple[int, int, int]
    """Height, width, channels."""
    num_classes: int
    class_names: Sequence[str] | None = None
    """By label, where the source knows them."""
    on_error: str = "stop"
    """What an example that cannot be read does: "stop", or "skip" it and count. Set before a stream is asked for."""
    same_on_all_ranks: bool = False
    """Set it where ranks are meant to read the same data; otherwise equal first batches are an error."""

    @abstractmethod
    def num_examples(self, split: str) -> int:
        """Examples in "train", "validation" or "test" over all ranks; 0 when there is no such split."""

    def shard_sizes(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[int]:
        """Examples that each of num_shards ranks holds, in proportion to weights; every rank computes the same list."""
        num_examples = self.num_examples(split)
        places = [Topology(rank, num_shards, weights=tuple(weights)) for rank in range(num_shards)]
        return [len(place.share(num_examples)) for place in places]

    @abstractmethod
    def training(
        self,
        topology: Topology,
        batch_size: int,
        seed: int,
        start_step: int,
        steps_per_epoch: int,
        num_examples: int | None = None,
    ) -> tf.data.Dataset:
        """Infinite stream of batches: images float32 [batch, h, w, c], labels int32 [batch].

        Batches are full; with num_examples, this rank's examples of an epoch, they are as plan.Share cuts them.
        """

    @abstractmethod
    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        """Finite stream of this rank's shard, each example once; the last batch may be short, or all empty."""

    def preprocessing(self) -> Preprocessing:
        """The way from an example in the user's arrays or files to what the streams give, for the saved model.

        The default is a source whose streams change nothing. A source that normalizes or resizes says so here, with
        layers of Keras's own: its saved model then takes what the user has, and loads without hvtrain.
        """
        return Preprocessing(self.image_shape)

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        """The first examples of this rank's shard as preprocessing() takes them, to check it against evaluation().

        None of them where a source cannot say; nothing is checked then.
        """
        return []

    def unreadable(self) -> list[Unreadable]:
        """What this process has left out since the last call, where on_error is "skip" and the source can do that."""
        return []

    def manifest(self) -> dict[str, Any]:
        """What the data set is, for JSON: it differs where another one lies under the same settings. See manifest.py.

        Every rank computes it, before the first stream; a source that can say more than counts does.
        """
        splits = {split: {"examples": self.num_examples(split)} for split in self.SPLITS if self.num_examples(split)}
        return {
            "name": self.name,
            "image_shape": list(self.image_shape),
            "num_classes": self.num_classes,
            "splits": splits,
        }

    def explain(self, error: Exception) -> Exception:
        """A DataError that names the culprit when TensorFlow's error came from reading data, else `error`.

        Inside a compiled input pipeline TensorFlow does not say which file it could not read. A runner
        that catches tf.errors.OpError around fit or evaluate passes it here, after the fact.
        """
        return error


def reason(error: tf.errors.OpError) -> str:
    """TensorFlow's message without the names of nodes and devices around it.

    >>> reason(tf.errors.DataLossError(None, None, "{{function_node f}} corrupted record at 9 [Op:Next] name: "))
    'corrupted record at 9'
    """
    return re.sub(r"\{\{.*?\}\}|\[Op:.*", "", error.message, flags=re.DOTALL).strip().rstrip(".")
