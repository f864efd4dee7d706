"""Data from a user's own function, as a tf.data pipeline or a keras.utils.PyDataset: from_dataset."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import tensorflow as tf

from hvtrain.core.step_plan import Share
from hvtrain.core.topology import Topology, reduced
from hvtrain.data.pipeline.epochs import cut, epochs, said
from hvtrain.data.pipeline.streams import finish
from hvtrain.data.source import Source, StreamRequest
from hvtrain.data.sources.examples import Examples
from hvtrain.data.sources.own_function import OwnFunction, Shard
from hvtrain.errors import ConfigError, DataError

log = logging.getLogger(__name__)

Place = tuple[int, int, str]
"""The number of a shard, how many shards there are, and of which split."""

USE_SHARD = "the function must give each shard a part of its own, such as dataset.shard(num_shards, shard)"
GIVEN = (
    "shards need equal parts of num_examples; correct it, or leave it out to have the examples of each shard counted"
)
COUNTED = "that is what was counted; the function must give as many for every epoch, seed and batch_size"
ATTRIBUTES = ("num_classes", "class_names")


class FunctionSource(Source):
    """A data set from a function that opens a shard; see from_dataset().

    num_examples: by split, of which shards are taken to have equal parts. None: the function is called for each shard,
        and its examples are counted, by reading them if tf.data does not know their number. In a run each rank counts
        its own shards, and rank 0 the whole.
    """

    equal_batches_advice = f"{USE_SHARD}, or set same_on_all_ranks on the data set if that is intended"

    def __init__(
        self,
        function: OwnFunction,
        num_examples: Mapping[str, int] | None = None,
        more_facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.origin, self._function = function.name, function.file, function
        self._given, self._more_facts = num_examples, dict(more_facts or {})
        self._splits = self.SPLITS if "split" in function.declared else ("train",)
        if others := [split for split in num_examples or () if split not in self._splits]:
            why = "" if len(self._splits) > 1 else " alone, since the function declares no split"
            raise ConfigError(
                f"{self.name}: num_examples has {', '.join(others)}; it may have {', '.join(self._splits)}{why}"
            )
        vars(self).update({name: self._more_facts[name] for name in ATTRIBUTES if name in self._more_facts})
        self._counts: dict[Place, int] = {}
        self._element_spec: tuple[Any, ...] = ()

    @property
    def element_spec(self) -> tuple[Any, ...]:
        if not self._element_spec:
            self._open(0, 1, "train")
        return self._element_spec

    def facts(self) -> dict[str, Any]:
        inputs = self.element_spec[0]
        image = {"image_shape": tuple(inputs.shape)} if len(getattr(inputs, "shape", ())) == 3 else {}
        return {**image, **super().facts(), **self._more_facts}

    def num_examples(self, split: str) -> int:
        if self._given is not None:
            return self._given.get(split, 0)
        return self._count(0, 1, split) if split in self._splits else 0

    def own_counts(self, topology: Topology) -> dict[Place, int]:
        if self._given is not None:
            return {}
        shards, num_shards = _shards_of(topology)
        places = [(shard, num_shards, split) for split in self._splits for shard in shards]
        if topology.is_chief:
            places += [(0, 1, split) for split in self._splits]
        return {place: self._count(*place) for place in places}

    def take_counts(self, counts: Iterable[Mapping[Place, int]]) -> None:
        for of_rank in counts:
            self._counts.update(of_rank)

    def shard_sizes(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[int]:
        whole = self.num_examples(split)
        if self._given is not None or not whole:
            return super().shard_sizes(split, num_shards, weights)
        places = [_shards_of(Topology(rank, num_shards, weights=tuple(weights))) for rank in range(num_shards)]
        sizes = [[self._count(shard, total, split) for shard in shards] for shards, total in places]
        each = [size for part in sizes for size in part]
        if len(each) > 1 and min(each) == whole:
            raise DataError(f"{self.name} gives all {whole:,} examples of {split} to every shard; {USE_SHARD}")
        if sum(each) != whole:
            found = f"the {len(each)} shards of {split} hold {' + '.join(map(str, each))} examples"
            raise DataError(f"{self.name}: {found} and the whole {whole:,}; each example must be in one shard")
        return [sum(part) for part in sizes]

    def training(self, request: StreamRequest) -> tf.data.Dataset:
        topology = request.topology
        share = request.share_of(self.shard_sizes("train", topology.size, topology.weights)[topology.rank])
        first_epoch, steps_done = request.position
        values = {"seed": request.seed, "batch_size": share.batch_size}
        shards = self._shards("train", topology, shuffled=True, **values)

        def open_epoch(epoch: int) -> tf.data.Dataset:
            step = steps_done if epoch == first_epoch else 0
            examples = self._examples(shards, share, topology, epoch, share.begin(step))
            return cut(examples.batch(share.batch_size), share, step, shards[0].call)

        ready = [open_epoch(first_epoch)]  # Here, so that what the function raises is no error of TensorFlow's.
        spec = ready[0].element_spec
        stream = epochs(lambda epoch: ready.pop() if ready else open_epoch(epoch), first_epoch, spec)
        return finish(stream, topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        number = self.shard_sizes(split, topology.size, topology.weights)[topology.rank]
        if not number:
            none = tf.nest.map_structure(lambda one: tf.zeros([0, *one.shape], one.dtype), self.element_spec)
            return finish(tf.data.Dataset.from_tensor_slices(none).batch(batch_size), topology)
        share = Share(batch_size, -(-number // batch_size), number)
        shards = self._shards(split, topology, shuffled=False, batch_size=batch_size)
        batches = self._examples(shards, share, topology).batch(batch_size)
        return finish(cut(batches, share, 0, shards[0].call, ends=True), topology)

    def explain(self, error: Exception) -> Exception:
        if found := said(error):
            return self._wrong_number(found)
        failure = self._function.failure
        return failure if failure and f"{type(failure).__name__}: " in str(error) else error

    def _shards(self, split: str, topology: Topology, shuffled: bool, **values: Any) -> list[Shard]:
        """A rank's shards: one, or several if ranks share the data unequally."""
        if self.on_error == "skip":
            fix = "use data.on_error=stop, and dataset.ignore_errors() in the function"
            raise ConfigError(f"{self.name}: hvtrain cannot skip what a function cannot read; {fix}")
        shards, total = _shards_of(topology)
        return [Shard(self._function, (shard, total, split), shuffled, values) for shard in shards]

    def _examples(
        self, shards: list[Shard], share: Share, topology: Topology, epoch: int = 0, start: int = 0
    ) -> tf.data.Dataset:
        """A rank's examples of an epoch from that one on."""
        alone, call = len(shards) == 1, shards[0].call
        parts, counts = zip(*(shard.epoch(epoch, start if alone else 0) for shard in shards))
        if None not in counts:
            found, whole = sum(counts), self._given and self._given[shards[0].split]
            if len(shards) < _shards_of(topology)[1] and found == whole:
                raise DataError(f"{call} gives all {found:,} examples of num_examples; {USE_SHARD}")
            if found < share.num_examples:
                raise self._wrong_number(f"{call} gives {found:,} examples and {share.num_examples:,} are needed")
        if parts[0].element_spec != self.element_spec:
            found, first = in_words(parts[0].element_spec), in_words(self.element_spec)
            raise DataError(f"{call} gives {found} and at first {first}; all parts of the data need one kind")
        return parts[0] if alone else reduce(tf.data.Dataset.concatenate, parts).skip(start)

    def _wrong_number(self, found: str) -> DataError:
        return DataError(f"{found}; {COUNTED if self._given is None else GIVEN}")

    def _count(self, shard: int, num_shards: int, split: str) -> int:
        """The number of a shard's examples; 0 if there are none."""
        place = (shard, num_shards, split)
        if place not in self._counts:
            part = self._open(*place)
            number = part.count() if part else 0
            if number is None and isinstance(part, Examples):
                advice = "num_examples saves that"
                log.info("%s: its examples are read to count them; %s", self._function.call(*place), advice)
                number = part.read_all()
            self._counts[place] = number or 0
        return self._counts[place]

    def _open(self, shard: int, num_shards: int, split: str) -> Any:
        part = self._function.open(shard, num_shards, split)
        if part is None and split == "train":
            raise DataError(f"{self._function.call(shard, num_shards, split)} returned None; training needs examples")
        if part and (shard, num_shards, split) == (0, 1, "train"):
            self._element_spec = part.element_spec
        return part


def _shards_of(topology: Topology) -> tuple[range, int]:
    """A rank's shards, and the number of all shards: one for each unit of the ranks' weights.

    >>> _shards_of(Topology(1, 2, weights=(6, 2)))
    (range(3, 4), 4)
    """
    weights = reduced(topology.weights) or (1,) * topology.size
    first = sum(weights[: topology.rank])
    return range(first, first + weights[topology.rank]), sum(weights)


def in_words(spec: Any) -> str:
    """Types and shapes of an example."""
    return ", ".join(f"{one.dtype.name} {tuple(one.shape)}" for one in tf.nest.flatten(spec))


def from_dataset(
    function: Callable[..., Any],
    *,
    num_examples: Mapping[str, int] | int | None = None,
    name: str | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> FunctionSource:
    """A source from a function(shard, num_shards) that returns one of num_shards equal parts of the data.

    It returns a tf.data.Dataset of single examples, (inputs, targets) or (inputs, targets, weights), or a
    keras.utils.PyDataset of batches of one size. It may declare more arguments:

    - split: "train", "validation" or "test"; it then returns None for one that there is not.
    - seed, epoch: of the run, both whole numbers. Shuffles of tf.data do not need them: they are seeded.
    - start: examples of the epoch that a resumed run has seen. The function then leaves them out, which may be faster
      than to read and drop them.
    - batch_size: for a PyDataset, whose batches need not be of that size. It is 1 where examples are counted.

    Args:
        num_examples: of all shards together, by split, or of training alone; None: they are counted.
        facts: for the model's builder and the task, such as vocabulary_size.
    """
    given = {"train": num_examples} if isinstance(num_examples, int) else num_examples
    found = {"num_classes": num_classes, "class_names": class_names, **(facts or {})}
    more_facts = {key: value for key, value in found.items() if value is not None}
    return FunctionSource(OwnFunction(function, name), given, more_facts)
