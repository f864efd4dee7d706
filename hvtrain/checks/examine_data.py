"""Reads examples of each split of a data set, and records their values, classes, duplicates and faults.

Runs in one process, without Horovod; examples are read through the evaluation pipeline.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow import nest

from hvtrain.config.schema import RunConfig
from hvtrain.core.topology import Topology
from hvtrain.data.description import (
    class_labels,
    count_classes,
    describe,
    missing_classes,
)
from hvtrain.data.kinds import NAMES, input_kind, inputs_of
from hvtrain.data.manifest import digest_arrays
from hvtrain.data.pipeline.streams import IndexedSource
from hvtrain.data.pipeline.transform import CHANNELS, IGNORED
from hvtrain.data.source import Phrases, Source, StreamRequest, Unreadable
from hvtrain.errors import UserError, message_of
from hvtrain.finished.outputs import ProgressLines
from hvtrain.training.setup import open_source, open_task_and_layers

BATCH_SIZE = 32
# Number of examples that the page shows of each split, spread over the classes.
NUM_SHOWN = 12
# Number of raw rows that the page shows of a table.
NUM_ROWS = 5
# Number of training images that the page shows with their augmentation, and of random draws for each.
NUM_VIEWED = 4
NUM_DRAWS = 3

# The inputs and the target of an example, as nested arrays without a batch axis.
Row = tuple[Any, Any]


class Example(NamedTuple):
    """An example to show: its index among the examples read, its inputs and its target."""

    number: int
    inputs: Any
    target: Any


@dataclass
class Values:
    """The values of an input or a target in the examples that were read."""

    # The type and shape, in words.
    kind: str
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    num_finite: int = 0
    # Values that are NaN or infinite.
    num_nonfinite: int = 0

    def add(self, array: np.ndarray) -> None:
        if self.kind.startswith(NAMES):
            return
        finite = array[np.isfinite(array)]
        self.num_finite += finite.size
        self.num_nonfinite += array.size - finite.size
        if finite.size:
            self.low = min(self.low, float(finite.min()))
            self.high = max(self.high, float(finite.max()))
            # A long sum in float32 would lose digits of the mean.
            self.total += finite.sum(dtype=np.float64)


@dataclass
class SplitFacts:
    """Facts about the examples read from a split.

    Attributes:
        name: "train", "validation" or "test".
        num_examples: The size of the split.
        step: Every step-th example is read.
        is_whole: True if no example was left out, so that the number of each in the split is known.
        values: The values of each input and target, by "inputs" or "targets", followed by ".name" if it has a name.
        class_counts: Examples (of masks: pixels) of each class; None if targets are not classes.
        num_outside: The number of labels that are not a class.
        digests: Hashes of the inputs and of the target of each example read.
        shown: The first few examples of each class.
    """

    name: str
    num_examples: int
    step: int = 1
    is_whole: bool = False
    values: dict[str, Values] = field(default_factory=dict)
    class_counts: np.ndarray | None = None
    num_outside: int = 0
    digests: list[tuple[str, str]] = field(default_factory=list)
    shown: list[Example] = field(default_factory=list)

    @property
    def num_read(self) -> int:
        return len(self.digests)

    def example_name(self, number: int) -> str:
        """Names an example by its number in the split; if some were skipped, by its number among the readable ones."""
        name = f"example {number * self.step}"
        return name if self.is_whole else f"readable {name}"

    def matches_in(self, other: "SplitFacts") -> list[tuple[int, int]]:
        """Returns (number in self, first number in `other`) for each example whose inputs are in `other` too."""
        first: dict[str, int] = {}
        for number, (digest, _) in enumerate(other.digests):
            first.setdefault(digest, number)
        return [
            (number, first[digest])
            for number, (digest, _) in enumerate(self.digests)
            if digest in first
        ]

    def add(self, elements: tuple[Any, ...], num_classes: int) -> None:
        """Adds the examples of a batch: inputs, targets and perhaps weights, as NumPy arrays."""
        inputs, targets = elements[:2]
        for name, array in inputs_of({"inputs": inputs, "targets": targets}).items():
            kind = input_kind(array.dtype, array.shape[1:])
            size = " x ".join(map(str, kind["shape"]))
            values = Values(f"{kind['type']}, {size}".removesuffix(", "))
            self.values.setdefault(name, values).add(array)
        has_labels = isinstance(targets, np.ndarray) and targets.dtype.kind in "iu"
        if num_classes and has_labels:
            self._count_classes(targets, num_classes)
        if len(elements) > 2 and has_labels and np.shape(inputs) == targets.shape:
            # Masked language modeling hides random tokens of the inputs, so the targets, which are
            # the whole text, identify an example.
            inputs = targets

        # Files are often listed class by class, so the first examples may all be of one class.
        max_per_class = math.ceil(NUM_SHOWN / max(num_classes, 1))
        for example, target in rows_of((inputs, targets)):
            target_digest = digest_arrays(nest.flatten(target))
            same_class = [row for row in self.shown if self.digests[row.number][1] == target_digest]
            if len(self.shown) < NUM_SHOWN and len(same_class) < max_per_class:
                self.shown.append(Example(self.num_read, example, target))
            self.digests.append((digest_arrays(nest.flatten(example)), target_digest))

    def _count_classes(self, targets: np.ndarray, num_classes: int) -> None:
        counts = count_classes(targets, num_classes)
        self.num_outside += targets.size - counts.sum()
        # A mask may have pixels that the loss ignores.
        if targets.ndim > 1 and num_classes <= IGNORED:
            self.num_outside -= (targets == IGNORED).sum()
        if self.class_counts is not None:
            counts += self.class_counts
        self.class_counts = counts

    def faults(self, class_names: list[str]) -> list[str]:
        """Returns one line for each fault for which training would be refused."""
        lines = [
            f"{self.name}: NaN or infinite values in {name} (count: {values.num_nonfinite:,}); fix them"
            for name, values in self.values.items()
            if values.num_nonfinite
        ]
        if self.num_outside:
            last = len(class_names) - 1
            lines.append(
                f"{self.name}: labels outside 0 ... {last} (count: {self.num_outside:,}); fix the targets"
            )
        return lines

    def oddities(self, class_names: list[str], train: "SplitFacts") -> list[str]:
        """Returns one line for each finding that a user should look at."""
        lines = []
        for name, values in self.values.items():
            if values.low == values.high and self.num_read > 1 and name.startswith("inputs"):
                lines.append(f"{self.name}: all values of {name} are {values.low:g}")
        # In a sample of the split, a class may be missing by chance.
        if self.class_counts is not None and self.num_read == self.num_examples:
            lines += missing_classes({self.name: self.class_counts.tolist()}, class_names)

        repeats = [
            (number, earlier) for number, earlier in self.matches_in(self) if earlier < number
        ]
        if repeats:
            number, earlier = repeats[0]
            # The second digest is the target's: the same image in two classes cannot be learned.
            num_others = sum(
                self.digests[index][1] != self.digests[first][1] for index, first in repeats
            )
            others = f", {num_others:,} with another target" if num_others else ""
            lines.append(
                f"{self.name}: {len(repeats):,} of {self.num_read:,} examples repeat an earlier one{others}; "
                f"{self.example_name(number)} repeats {self.example_name(earlier)}"
            )

        shared = self.matches_in(train)
        if shared and self is not train:
            number, earlier = shared[0]
            lines.append(
                f"{self.name}: {len(shared):,} of {self.num_read:,} examples are in train too; "
                f"{self.example_name(number)} repeats {train.example_name(earlier)} of train"
            )
        return lines


@dataclass
class Findings:
    """The results of an examination.

    Attributes:
        source: The data set.
        class_names: Names, or numbers, of the classes.
        described: The source's description of itself.
        splits: Facts about each split that has examples.
        views: For each training image shown, the whole image (without a target), its augmented
            draws, and the input that validation gives the model; only one draw if it is unknown
            which example a stream yields.
        raw_rows: The first training rows of a table, by column.
        warnings: Oddities, one line each.
        refused: Faults for which training would be refused, one line each.
    """

    source: Source
    class_names: list[str] = field(default_factory=list)
    described: Phrases = field(default_factory=dict)
    splits: list[SplitFacts] = field(default_factory=list)
    views: list[list[Row]] = field(default_factory=list)
    raw_rows: list[Any] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @contextmanager
    def collect_errors(self) -> Iterator[None]:
        """Adds an error of the block to `refused` if the user can fix it, and continues after the block."""
        try:
            yield
        except (UserError, tf.errors.OpError) as error:
            explained = self.source.explain(error)
            if not isinstance(explained, UserError):
                raise
            message = message_of(explained)
            # An unreadable file gives the same error in every split.
            if message not in self.refused:
                self.refused.append(message)


def examine(config: RunConfig, limit: int, has_task: bool) -> Findings:
    """Reads up to `limit` examples of each split, and returns what was found.

    Args:
        config: The settings; data, dataset, augment and seed matter, and task if has_task or augment is set.
        limit: Maximum number of examples to read from each split.
        has_task: True to check that the data fit the task.

    Raises:
        UserError: The data set cannot be opened.
    """
    source = open_source(config)
    # With "skip", all unreadable examples are reported, not only the first.
    if type(source).unreadable is not Source.unreadable:
        source.on_error = "skip"
    findings = Findings(source)

    with findings.collect_errors():
        source.take_counts([source.own_counts(Topology())])
        findings.described = describe(source)
        findings.class_names = class_labels(source)
        if has_task or config.augment:
            # No step runs on a device here, so the layers run in the input
            # pipeline, as in a resized run.
            open_task_and_layers(config, source, is_resized=True)
    left_out: list[Unreadable] = []
    for split in source.SPLITS:
        with findings.collect_errors():
            facts = SplitFacts(split, source.num_examples(split))
            if facts.num_examples:
                findings.splits.append(facts)
                left_out += _read(source, facts, limit, len(findings.class_names))
    with findings.collect_errors():
        if findings.splits:
            findings.views = _views(source, findings.splits[0], config.seed)
        if isinstance(source.preprocessing().shape, dict):
            findings.raw_rows = source.raw_examples("train", Topology(), NUM_ROWS)

    left_out += source.unreadable()
    skipped = [f"{item.location}: {item.problem}" for item in left_out]
    if config.data.on_error == "stop":
        findings.refused += skipped
    else:
        findings.warnings += skipped
    findings.warnings += findings.described.get("warnings", [])
    for facts in findings.splits:
        findings.refused += facts.faults(findings.class_names)
        findings.warnings += facts.oddities(findings.class_names, findings.splits[0])
    # The source's own warnings may repeat some of these.
    findings.warnings = list(dict.fromkeys(findings.warnings))
    return findings


def _read(source: Source, facts: SplitFacts, limit: int, num_classes: int) -> Sequence[Unreadable]:
    """Reads up to `limit` examples of a split: evenly spaced ones if single examples can be opened, else the first.

    Returns what could not be read.
    """
    if isinstance(source, IndexedSource):
        facts.step = math.ceil(facts.num_examples / limit)
    # Rank 0 of `step` ranks gets every step-th example.
    topology = Topology(0, facts.step)
    num_examples = min(topology.share_size(facts.num_examples), limit)
    progress = ProgressLines(f"{facts.name}: read", num_examples, is_chief=True)
    batches = source.evaluation(facts.name, topology, min(BATCH_SIZE, num_examples))
    for elements in batches.unbatch().take(num_examples).batch(BATCH_SIZE).as_numpy_iterator():
        facts.add(elements, num_classes)
        progress.update(facts.num_read)
    left_out = source.unreadable()
    facts.is_whole = facts.num_read == num_examples and not left_out
    return left_out


def _views(source: Source, train: SplitFacts, seed: int) -> list[list[Row]]:
    """Returns training images as training and validation see them; empty if the inputs are not images."""
    if not train.shown or image_of(train.shown[0].inputs) is None:
        return []
    # Which example a stream yields is known only if single examples can
    # be opened and none was skipped.
    if not (isinstance(source, IndexedSource) and train.is_whole):
        batch_size = min(NUM_SHOWN, train.num_examples)
        return [[row] for row in _training_rows(source, Topology(), batch_size, seed, steps=1)]

    views = []
    for example in train.shown[:NUM_VIEWED]:
        # With as many ranks as examples, each rank has one example, which each step augments again.
        topology = Topology(example.number * train.step, train.num_examples)
        whole = [(image, None) for image in source.raw_examples("train", topology, 1)]
        draws = _training_rows(source, topology, 1, seed, NUM_DRAWS)
        plain = next(source.evaluation("train", topology, 1).as_numpy_iterator())
        views.append([*whole, *draws, *rows_of(plain)])
    return views


def _training_rows(
    source: Source, topology: Topology, batch_size: int, seed: int, steps: int
) -> list[Row]:
    """Returns the examples of a rank's first training batches, as the model gets them."""
    request = StreamRequest(topology, batch_size, seed, start_step=0, steps_per_epoch=1)
    batches = source.training(request)
    if source.augmentation:
        batches = source.augmentation.augment_stream(batches, request)
    rows = []
    for inputs, *others in batches.take(steps):
        # With augmentation layers, inputs are normalized in the step, not in the pipeline.
        model_inputs = source.finish(inputs) if source.raw_batches else inputs
        rows += rows_of(nest.map_structure(np.asarray, (model_inputs, *others)))
    return rows


def rows_of(batch: tuple[Any, ...]) -> list[Row]:
    """Splits a batch of NumPy arrays into the inputs and target of each example."""
    pair = batch[:2]
    size = len(nest.flatten(pair)[0])
    return [nest.map_structure(lambda array, row=row: array[row], pair) for row in range(size)]


def image_of(inputs: Any) -> np.ndarray | None:
    """Returns the first image [height, width, 1 or 3] among an example's inputs, without transparency, or None."""
    arrays = map(np.asarray, inputs_of(inputs).values())
    return next(
        (image[..., :3] for image in arrays if image.ndim == 3 and image.shape[-1] in CHANNELS),
        None,
    )
