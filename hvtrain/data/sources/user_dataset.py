"""Data sets from a user's own function, made by from_dataset().

The function opens a shard of the data, as a tf.data pipeline or a keras.utils.PyDataset. To obey the
laws of all sources (see source.py), each epoch is opened anew, with seeds derived from the run's
seed, and each step's batch must be complete.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.data import Dataset

from hvtrain.core.step_plan import Share
from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.epochs import cut_epoch, join_epochs
from hvtrain.data.pipeline.streams import finish
from hvtrain.data.source import Parts, Source, StreamRequest
from hvtrain.data.sources.memory import empty_batch
from hvtrain.data.sources.user_shards import (
    PyDatasetExamples,
    ShardKey,
    UserFunction,
    describe_spec,
)
from hvtrain.errors import ConfigError, DataError

log = logging.getLogger(__name__)

# Advice at the end of messages.
USE_SHARD = "the function must return a different part for each shard, such as dataset.shard(num_shards, shard)"
FIX_NUM_EXAMPLES = (
    "each shard must hold an equal part of num_examples; correct num_examples, or leave it out to have "
    "the examples of each shard counted"
)
FIX_FUNCTION = (
    "the function must give as many examples as were counted, for every epoch, seed and batch_size"
)


class FunctionSource(Source):
    """A source of examples from a function that opens a shard; see from_dataset().

    Args:
        function: The user's function.
        num_examples: Number of examples by split, of which each shard holds an equal part. The
            examples of other splits are counted shard by shard: by reading them, if tf.data does not
            know their number. In a run, each rank counts its own shards, and rank 0 also the whole split.
        more_facts: Facts for the model's builder and the task.

    Raises:
        ConfigError: If num_examples names a split that the function cannot open.
    """

    def __init__(
        self,
        function: UserFunction,
        num_examples: Mapping[str, int] | None,
        more_facts: Mapping[str, Any],
    ) -> None:
        self.name = function.name
        self.origin = function.file
        self._function = function
        self._num_examples = dict(num_examples or {})
        self.take_facts(more_facts)
        # Number of examples of each shard that this rank or another has counted.
        self._counts: dict[ShardKey, int] = {}
        self._element_spec: Parts = ()
        self._has_batches = False
        """True if the function returned a PyDataset for the whole training part."""

        self._splits = self.SPLITS if "split" in function.declared else ("train",)
        unknown = [split for split in self._num_examples if split not in self._splits]
        if unknown:
            raise ConfigError(
                f"{self.name}: num_examples has {', '.join(unknown)}; it may have {', '.join(self.SPLITS)} if the "
                "function declares split, and otherwise only train"
            )

    @property
    def element_spec(self) -> Parts:
        if not self._element_spec:
            self._open(_whole_split("train"))
        return self._element_spec

    def facts(self) -> dict[str, Any]:
        # Inputs of three dimensions are assumed to be images, unless
        # the user's facts say otherwise.
        shape = tuple(getattr(self.element_spec[0], "shape", ()))
        image_facts = {"image_shape": shape} if len(shape) == 3 else {}
        return image_facts | super().facts()

    def num_examples(self, split: str) -> int:
        if split in self._num_examples:
            return self._num_examples[split]
        if split not in self._splits:
            return 0
        return self._count(_whole_split(split))

    def own_counts(self, topology: Topology) -> dict[ShardKey, int]:
        splits = [split for split in self._splits if split not in self._num_examples]
        keys = [key for split in splits for key in _shard_keys(topology, split)]
        # Rank 0 also counts each whole split, to compare it with the sum of all shards.
        if topology.is_chief:
            keys += map(_whole_split, splits)
        return {key: self._count(key) for key in keys}

    def take_counts(self, counts: Iterable[Mapping[ShardKey, int]]) -> None:
        for rank_counts in counts:
            self._counts.update(rank_counts)

    def shard_sizes(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[int]:
        # Numbers that the user gave are divided among the ranks; otherwise, each shard is counted.
        whole = self.num_examples(split)
        if split in self._num_examples or not whole:
            return super().shard_sizes(split, num_shards, weights)

        ranks = [Topology(rank, num_shards, weights=tuple(weights)) for rank in range(num_shards)]
        sizes_by_rank = [[self._count(key) for key in _shard_keys(rank, split)] for rank in ranks]
        sizes = list(chain(*sizes_by_rank))

        # If the function ignored its shard, all ranks would train on the same examples.
        if sum(sizes) != whole:
            raise DataError(
                f"{self.name}: the {len(sizes)} shards of {split} hold {' + '.join(map(str, sizes))} examples, but "
                f"the whole split holds {whole:,}; {USE_SHARD}"
            )

        return list(map(sum, sizes_by_rank))

    def training(self, request: StreamRequest) -> Dataset:
        topology = request.topology
        share = request.share_of(self.shard_size("train", topology))
        first_epoch, steps_done = request.position
        open_shards: dict[ShardKey, PyDatasetExamples] = {}

        def open_epoch(epoch):
            # Only the first epoch of a resumed run begins in the middle.
            step = steps_done if epoch == first_epoch else 0
            return self._batches("train", topology, share, open_shards, epoch, step, request.seed)

        return finish(join_epochs(open_epoch, first_epoch), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> Dataset:
        num_examples = self.shard_size(split, topology)
        if not num_examples:
            empty = Dataset.from_tensor_slices(empty_batch(self.element_spec))
            return finish(empty.batch(batch_size), topology)

        share = Share(batch_size, -(-num_examples // batch_size), num_examples)
        return finish(self._batches(split, topology, share, {}), topology)

    def explain(self, error: Exception) -> Exception:
        return self._function.explain(error)

    def _batches(
        self,
        split: str,
        topology: Topology,
        share: Share,
        open_shards: dict[ShardKey, PyDatasetExamples],
        epoch: int = 0,
        step: int = 0,
        seed: int | None = None,
    ) -> Dataset:
        """Returns a rank's batches of an epoch from `step` on.

        Args:
            open_shards: See _open_examples().
            seed: The run's seed; None for evaluation, where surplus examples are an error too.

        Raises:
            ConfigError: With on_error="skip".
            DataError: If a shard is the whole data set, too small, or differs in types from the data set.
        """
        if self.skips:
            raise ConfigError(
                f"{self.name}: data.on_error=skip does not apply to a user's function; use "
                "data.on_error=stop, and dataset.ignore_errors() in the function"
            )
        # One shard, or several if ranks have unequal weights.
        keys = _shard_keys(topology, split)
        call = self._function.describe_call(keys[0])
        fix = FIX_NUM_EXAMPLES if split in self._num_examples else FIX_FUNCTION
        values = {"batch_size": share.batch_size}
        if seed is not None:
            values["seed"] = seed

        def count_error(count):
            return self._function.fail(
                f"{call} gives {count:,} example(s), but the run needs {share.num_examples:,}; {fix}"
            )

        # Several shards are joined before examples are skipped, since
        # the start may be in any of them.
        start = share.begin(step)
        first = start if len(keys) == 1 else 0
        element_spec = self.element_spec
        opened = [self._open_examples(key, open_shards, epoch, first, values) for key in keys]
        parts, counts = zip(*opened)

        # Known numbers are checked now; otherwise, cut_epoch() checks them as examples are read.
        if None not in counts:
            number = sum(counts)
            if len(keys) < keys[0].num_shards and number == self._num_examples.get(split):
                raise DataError(
                    f"{call} returns all {number:,} examples of num_examples; {USE_SHARD}"
                )
            if number < share.num_examples:
                raise count_error(number)

        # The model was built for the types of the whole training part.
        if parts[0].element_spec != element_spec:
            raise DataError(
                f"{call} gives {describe_spec(parts[0].element_spec)}, but the whole training part holds "
                f"{describe_spec(element_spec)}; give all shards and splits the same types and shapes"
            )

        examples = reduce(Dataset.concatenate, parts).skip(start - first)
        batches = examples.batch(share.batch_size)
        return cut_epoch(batches, share, step, count_error, must_end=seed is None)

    def _open_examples(
        self,
        key: ShardKey,
        open_shards: dict[ShardKey, PyDatasetExamples],
        epoch: int,
        start: int,
        values: Mapping[str, int],
    ) -> tuple[Dataset, int | None]:
        """Opens a shard's examples of an epoch from `start` on.

        Args:
            open_shards: PyDatasets that are opened once for all epochs, unless the function declares epoch.
            values: Further arguments for the function: batch_size and, in training, seed, which also
                shuffles the batches of a PyDataset.

        Returns:
            The examples, and their number in the whole epoch, or None if it is unknown.
        """
        function = self._function
        # A PyDataset cannot return to an earlier epoch, so a new one is opened.
        shard: Any = open_shards.get(key)
        if shard is None or shard.epoch > epoch:
            # A PyDataset has to be complete, since each epoch reads its batches in a different order.
            num_seen = 0 if self._has_batches else start
            shard = function.open(key, epoch=epoch, start=num_seen, **values)
            if shard is None:
                call = function.describe_call(key)
                raise function.fail(f"{call} returned None; examples are needed")
        if isinstance(shard, PyDatasetExamples):
            # A function that declares epoch is called for each epoch.
            if "epoch" not in function.declared:
                open_shards[key] = shard
            return shard.examples(epoch, start, values.get("seed")), shard.cardinality()

        # A function that declares start has left out the examples before it.
        num_left_out = start if "start" in function.declared else 0
        if "seed" in values:
            function.warn_about_order(shard)
        # tf.data returns a negative number if examples are endless, or have to be read to be counted.
        number = int(shard.cardinality())
        known_number = number + num_left_out if number >= 0 else None
        return shard.skip(start - num_left_out), known_number

    def _count(self, key: ShardKey) -> int:
        """Returns a shard's number of examples, counting them once; 0 if the function returns None."""
        if key not in self._counts:
            examples = self._open(key)
            number = int(examples.cardinality()) if examples else 0
            call = self._function.describe_call(key)
            if number == tf.data.INFINITE_CARDINALITY:
                raise DataError(
                    f"{call} never ends; set num_examples to the number of examples in an epoch"
                )
            if number == tf.data.UNKNOWN_CARDINALITY:
                log.info(
                    "%s: reading all examples to count them; set num_examples to avoid that", call
                )
                number = int(examples.reduce(np.int64(0), lambda count, _: count + 1))
            self._counts[key] = number
        return self._counts[key]

    def _open(self, key: ShardKey) -> Any:
        """Opens a shard with default values for the other arguments; sets element_spec for the whole training part."""
        examples = self._function.open(key)
        if examples and key == _whole_split("train"):
            self._element_spec = examples.element_spec
            self._has_batches = isinstance(examples, PyDatasetExamples)
        return examples


def _whole_split(split: str) -> ShardKey:
    """Returns the key of a whole split, as a single shard."""
    return ShardKey(0, 1, split)


def _shard_keys(topology: Topology, split: str) -> list[ShardKey]:
    """Returns the keys of a rank's shards: one, or one for each unit of its weight if ranks have weights.

    >>> _shard_keys(Topology(1, 2, weights=(6, 2)), "train")
    [ShardKey(shard=3, num_shards=4, split='train')]
    """
    # Weights of 6 and 2 make 4 shards, not 8: pattern() reduces them.
    num_shards, first, number = topology.pattern()
    return [ShardKey(shard, num_shards, split) for shard in range(first, first + number)]


def from_dataset(
    function: Callable[..., Any],
    *,
    num_examples: Mapping[str, int] | int | None = None,
    name: str | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> FunctionSource:
    """Makes a source from a function(shard, num_shards) that returns one of num_shards equal parts of the data.

    The function returns a tf.data.Dataset of single examples, (inputs, targets) or (inputs, targets,
    weights), or a keras.utils.PyDataset of batches of one size. It may declare more arguments, by name
    (**options get only shard and num_shards):

    - split: "train", "validation" or "test". The function must return None for a split that does
      not exist.
    - seed, epoch: the run's seed and the number of the epoch. tf.data's shuffles do not need them,
      since hvtrain seeds these shuffles.
    - start: number of examples of the epoch that a resumed run has already seen. The function must
      leave them out, which may be faster than reading and dropping them. For a PyDataset, start is 0.
    - batch_size: the rank's batch size, or 1 while examples are counted. The batches of a PyDataset
      may have another size.

    Example:
        def numbers(shard, num_shards):
            dataset = tf.data.Dataset.range(1000).shard(num_shards, shard)
            return dataset.map(lambda n: (n, n % 2)).shuffle(1000)

        source = from_dataset(numbers, num_classes=2)

    Args:
        num_examples: Number of examples in all shards together, by split, or a single number for
            train; the examples of other splits are counted.
        name: Name of the data set; by default the function's.
        num_classes, class_names: Number and names of the classes, if targets are classes.
        facts: Facts for the model's builder and the task, such as vocabulary_size.

    Raises:
        ConfigError: If the function does not take shard and num_shards, or needs other arguments.
    """
    if not isinstance(num_examples, Mapping | None):
        num_examples = {"train": num_examples}
    more_facts = {"num_classes": num_classes, "class_names": class_names, **(facts or {})}
    return FunctionSource(UserFunction(function, name), num_examples, more_facts)
