"""Reads examples of each split of a data set, and notes their values, classes, repeats and faults.

One process, without Horovod; examples are read as streams of the evaluation give them.
"""

import hashlib
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.config.schema import RunConfig
from hvtrain.core.topology import Topology
from hvtrain.data.description import (
    DataDescription,
    class_labels,
    count_classes,
    describe,
    missing_classes,
)
from hvtrain.data.kinds import input_kind, inputs_of
from hvtrain.data.pipeline.streams import IndexedSource
from hvtrain.data.pipeline.transform import IGNORED
from hvtrain.data.source import Source
from hvtrain.errors import UserError
from hvtrain.finished.outputs import ProgressLines
from hvtrain.training.setup import open_source, open_task

BATCH_SIZE = 32
NUM_SHOWN = 12
NUM_SIZES = 24
"""Images whose own sizes are looked at. They are decoded whole, one at a time."""
NUM_ROWS = 5


@dataclass
class Values:
    """The values of an input or a target in the examples that were read."""

    kind: str
    shape: list[int]
    low: float = math.inf
    high: float = -math.inf
    num_values: int = 0
    num_gaps: int = 0
    """Values that are NaN or infinite."""
    total: float = 0.0

    def add(self, array: np.ndarray) -> None:
        self.num_values += array.size
        if self.kind == "names":
            return
        finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
        self.num_gaps += array.size - finite.size
        if finite.size:
            self.low = min(self.low, float(finite.min()))
            self.high = max(self.high, float(finite.max()))
            self.total += float(finite.sum(dtype=np.float64))

    @property
    def mean(self) -> float | None:
        """The mean of numbers. That of the numbers of classes or tokens would mean nothing."""
        num_finite = self.num_values - self.num_gaps
        return self.total / num_finite if num_finite and self.kind == "numbers" else None


@dataclass
class SplitFacts:
    """What was read of a split.

    Attributes:
        name: train, validation or test.
        num_examples: examples in all.
        step: distance of the examples that are read.
        num_read: examples that were read.
        values: by "inputs", "targets" and their names.
        class_counts: examples (of masks: pixels) of each class; None if targets are not classes.
        num_outside: labels that are no class.
        digests: of the inputs of each example, with that of its target and its place among those read.
        repeats: places of an example and of an earlier one with the same inputs.
        num_contradictory: of these, those with another target.
        shown: (place, inputs, targets) of the first examples, of every class.
    """

    name: str
    num_examples: int
    step: int = 1
    num_read: int = 0
    values: dict[str, Values] = field(default_factory=dict)
    class_counts: np.ndarray | None = None
    num_outside: int = 0
    digests: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    repeats: list[tuple[int, int]] = field(default_factory=list)
    num_contradictory: int = 0
    shown: list[tuple[int, Any, Any]] = field(default_factory=list)

    def example(self, place: int) -> str:
        """Names an example by its number in the split, or by its place if some were left out."""
        is_whole = self.num_read == math.ceil(self.num_examples / self.step)
        return f"example {place * self.step}" if is_whole else f"number {place} of those that can be read"

    def add(self, elements: tuple[Any, ...], num_classes: int) -> None:
        """Takes a batch: inputs, targets and perhaps weights, as NumPy arrays."""
        for part, structure in zip(("inputs", "targets"), elements):
            for name, array in inputs_of(structure).items():
                label = f"{part}.{name}" if name else part
                kind = input_kind(array)
                self.values.setdefault(label, Values(kind["type"], kind["shape"])).add(array)

        inputs, targets = elements[:2]
        is_class = num_classes and isinstance(targets, np.ndarray) and targets.dtype.kind in "iu"
        if is_class:
            counts = count_classes(targets, num_classes)
            # A mask may have pixels that do not count.
            num_ignored = int((targets == IGNORED).sum()) if targets.ndim > 1 and num_classes <= IGNORED else 0
            self.num_outside += targets.size - int(counts.sum()) - num_ignored
            self.class_counts = counts if self.class_counts is None else self.class_counts + counts

        self._note_repeats(elements)
        num_each = max(1, NUM_SHOWN // num_classes) if is_class and targets.ndim == 1 else NUM_SHOWN
        self._keep_shown(inputs, targets, num_each)
        self.num_read += _num_examples(inputs)

    def _note_repeats(self, elements: tuple[Any, ...]) -> None:
        inputs, targets = elements[:2]
        # Texts with hidden tokens hide others in each row; their targets are whole.
        is_masked_text = len(elements) > 2 and isinstance(inputs, np.ndarray) and inputs.shape == targets.shape
        if is_masked_text:
            inputs = targets
        for row in range(_num_examples(inputs)):
            digest = _digest(inputs, row)
            target_digest = _digest(targets, row)
            earlier = self.digests.get(digest)
            if earlier is None:
                self.digests[digest] = target_digest, self.num_read + row
            else:
                self.repeats.append((self.num_read + row, earlier[1]))
                self.num_contradictory += earlier[0] != target_digest

    def _keep_shown(self, inputs: Any, targets: Any, num_each: int) -> None:
        """Keeps the first examples, `num_each` of a class at most: files are often listed class by class."""
        for row in range(_num_examples(inputs)):
            if len(self.shown) == NUM_SHOWN:
                return
            example, target = tf.nest.map_structure(lambda array, row=row: array[row], (inputs, targets))
            is_class = num_each < NUM_SHOWN
            if is_class and sum(bool(shown == target) for _, _, shown in self.shown) >= num_each:
                continue
            self.shown.append((self.num_read + row, example, target))


@dataclass
class Findings:
    """What was found of a data set.

    Attributes:
        name: of the data set.
        origin: where it is from.
        class_names: names, or numbers, of the classes.
        described: what the source itself says.
        splits: what was read of each split.
        warnings: what is odd, a line each.
        refused: what a training would stop at, a line each.
        raw_rows: the first training rows of a table, by column.
    """

    name: str
    origin: str
    class_names: list[str] = field(default_factory=list)
    described: DataDescription = field(default_factory=DataDescription)
    splits: list[SplitFacts] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    raw_rows: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def collecting(self, source: Source) -> Iterator[None]:
        """Notes an error of the block as a line, and goes on after it."""
        try:
            yield
        except (UserError, tf.errors.OpError) as error:
            explained = source.explain(error) if isinstance(error, tf.errors.OpError) else error
            if not isinstance(explained, UserError):
                raise
            line = " ".join(str(explained).split())
            # A file that cannot be read spoils every split in the same words.
            if line not in self.refused:
                self.refused.append(line)


def examine(config: RunConfig, limit: int, has_task: bool) -> tuple[Findings, Source]:
    """Reads up to `limit` examples of each split.

    Args:
        config: the settings, of which data and dataset count, and task if has_task.
        limit: the most examples of a split.
        has_task: checks that the data fit the task.

    Raises:
        UserError: the data set cannot be opened.
    """
    source = open_source(config)
    # Then all that cannot be read is named, and not only the first example.
    if type(source).unreadable is not Source.unreadable:
        source.on_error = "skip"
    findings = Findings(source.name, str(source.origin))

    with findings.collecting(source):
        source.take_counts([source.own_counts(Topology())])
        findings.described = describe(source)
        findings.class_names = class_labels(source)
    if has_task and not findings.refused:
        with findings.collecting(source):
            open_task(config, source)
    for split in source.SPLITS:
        with findings.collecting(source):
            facts = SplitFacts(split, source.num_examples(split))
            if facts.num_examples:
                findings.splits.append(facts)
                _read(source, facts, limit, len(findings.class_names))

    for item in source.unreadable():
        lines = findings.refused if config.data.on_error == "stop" else findings.warnings
        lines.append(f"{item.location}: {item.problem}")
    with findings.collecting(source):
        _look_at_raw(source, findings)
    _judge(findings)
    return findings, source


def _read(source: Source, facts: SplitFacts, limit: int, num_classes: int) -> None:
    """Reads a split; of one with more than `limit` examples evenly spaced ones, if it can open single ones."""
    topology = Topology()
    if isinstance(source, IndexedSource):
        facts.step = math.ceil(facts.num_examples / limit)
        topology = Topology(0, facts.step)
    number = min(topology.share_size(facts.num_examples), limit)
    progress = ProgressLines(f"{facts.name}: read", number, is_chief=True)
    batches = source.evaluation(facts.name, topology, min(BATCH_SIZE, limit))
    for elements in batches.take(math.ceil(number / BATCH_SIZE)).as_numpy_iterator():
        facts.add(elements, num_classes)
        progress.update(facts.num_read)


def _look_at_raw(source: Source, findings: Findings) -> None:
    """Notes sizes of images that the source does not tell, and the first rows of a table."""
    split = "train"
    if not any(facts.name == split and facts.num_read for facts in findings.splits):
        return
    spec = source.preprocessing().shape
    if isinstance(spec, dict):
        findings.raw_rows = list(source.raw_examples(split, Topology(), NUM_ROWS))  # type: ignore[arg-type]
    elif isinstance(spec, tuple) and None in spec and "images" not in findings.described.phrases:
        number = min(NUM_SIZES, source.num_examples(split))
        sizes: set[tuple[int, ...]] = set()
        # One at a time, since photographs take many megabytes each; spread over the split.
        parts = range(number) if isinstance(source, IndexedSource) else range(1)
        for part in parts:
            # One that cannot be read has been named already.
            with suppress(UserError, tf.errors.OpError):
                examples = source.raw_examples(split, Topology(part, len(parts)), 1)
                sizes.update(tuple(np.shape(example)) for example in examples)
        if sizes:
            findings.described.phrases["images"] = [size_phrase(sizes)]


def _judge(findings: Findings) -> None:
    """Notes what is odd or refused in what was read."""
    train = next((facts for facts in findings.splits if facts.name == "train"), None)
    findings.warnings += findings.described.phrases.get("warnings", [])
    for facts in findings.splits:
        split = f"{facts.name}:"
        for name, values in facts.values.items():
            if values.num_gaps:
                findings.refused.append(
                    f"{split} {values.num_gaps:,} of {values.num_values:,} values of {name} are NaN or infinite; "
                    "fill or drop them"
                )
            elif values.low == values.high and facts.num_read > 1 and name.startswith("inputs"):
                findings.warnings.append(f"{split} all values of {name} are {values.low:g}")
        if facts.num_outside:
            last = len(findings.class_names) - 1
            findings.refused.append(f"{split} {facts.num_outside:,} labels are outside 0 ... {last}; fix the targets")
        if facts.class_counts is not None and facts.num_read == facts.num_examples:
            missing = missing_classes({facts.name: facts.class_counts.tolist()}, findings.class_names)
            findings.warnings += [text for text in missing if text not in findings.warnings]

        if facts.repeats:
            others = f", with another target {facts.num_contradictory:,}" if facts.num_contradictory else ""
            findings.warnings.append(
                f"{split} repeated {len(facts.repeats):,} of {facts.num_read:,} examples{others}; "
                f"{facts.example(facts.repeats[0][0])} is {facts.example(facts.repeats[0][1])}"
            )
        if train and facts is not train:
            shared = [digest for digest in facts.digests if digest in train.digests]
            if shared:
                places = facts.digests[shared[0]][1], train.digests[shared[0]][1]
                findings.warnings.append(
                    f"{split} also in train {len(shared):,} of {facts.num_read:,} examples; "
                    f"{facts.example(places[0])} is {train.example(places[1])} of train"
                )


def size_phrase(sizes: Collection[tuple[int, ...]]) -> str:
    """Sizes of images before they are resized, [height, width, channels], in words.

    >>> size_phrase([(480, 640, 3), (480, 640, 3), (100, 90, 3)])
    '90x100 to 640x480 pixels (width x height), 3 channels'
    """
    by_area = sorted(sizes, key=lambda size: size[0] * size[1])
    ends = [f"{size[1]}x{size[0]}" for size in (by_area[0], by_area[-1])]
    channels = ", ".join(str(number) for number in sorted({size[-1] for size in sizes}))
    return f"{' to '.join(dict.fromkeys(ends))} pixels (width x height), {channels} channels"


def _num_examples(inputs: Any) -> int:
    return len(tf.nest.flatten(inputs)[0])


def _digest(structure: Any, row: int) -> bytes:
    """A hash of one example's part of a batch."""
    digest = hashlib.blake2b(digest_size=12)
    for array in tf.nest.flatten(structure):
        value = array[row]
        if array.dtype == object:  # Text, of which NumPy has only the addresses.
            digest.update(repr(np.asarray(value).tolist()).encode())
        else:
            digest.update(np.ascontiguousarray(value).tobytes())
    return digest.digest()
