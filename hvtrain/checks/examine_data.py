"""Reads examples of each split of a data set, and notes their values, classes, repeats and faults.

One process, without Horovod; examples are read as streams of the evaluation give them.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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
NUM_ROWS = 5


@dataclass
class Values:
    """The values of an input or a target in the examples that were read."""

    kind: str
    shape: list[int]
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    num_finite: int = 0
    num_gaps: int = 0
    """Values that are NaN or infinite."""

    def add(self, array: np.ndarray) -> None:
        if self.kind == "names":
            return
        finite = array[np.isfinite(array)]
        self.num_finite += finite.size
        self.num_gaps += array.size - finite.size
        if finite.size:
            self.low = min(self.low, float(finite.min()))
            self.high = max(self.high, float(finite.max()))
            self.total += float(finite.sum(dtype=np.float64))


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
        digests: of the inputs of each example, with that of its target and its number among those read.
        repeats: numbers of an example and of an earlier one with the same inputs.
        num_contradictory: of these, those with another target.
        shown: (number, inputs, targets) of the first examples, of every class.
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
    _num_shown: Counter[int] = field(default_factory=Counter)

    def example(self, number: int) -> str:
        """Names an example by its number in the split; what could not be read has none."""
        is_whole = self.num_read == math.ceil(self.num_examples / self.step)
        return f"{'example' if is_whole else 'readable example'} {number * self.step}"

    def add(self, elements: tuple[Any, ...], num_classes: int) -> None:
        """Takes a batch: inputs, targets and perhaps weights, as NumPy arrays."""
        inputs, targets = elements[:2]
        for part, structure in (("inputs", inputs), ("targets", targets)):
            for name, array in inputs_of(structure).items():
                kind = input_kind(array)
                label = f"{part}.{name}".rstrip(".")
                self.values.setdefault(label, Values(kind["type"], kind["shape"])).add(array)

        labels = None
        if num_classes and isinstance(targets, np.ndarray) and targets.dtype.kind in "iu":
            self._count_classes(targets, num_classes)
            if targets.ndim == 1:
                labels = targets
        if len(elements) > 2 and getattr(inputs, "shape", None) == targets.shape:
            inputs = targets  # Texts with hidden tokens hide others in each row; their targets are whole.

        # Files are often listed class by class, so the first examples may all be of one.
        most = NUM_SHOWN if labels is None else math.ceil(NUM_SHOWN / num_classes)
        for row in range(len(tf.nest.flatten(inputs)[0])):
            example, target = tf.nest.map_structure(lambda array, row=row: array[row], (inputs, targets))
            self._note_repeat(_digest(example), _digest(target))
            group = 0 if labels is None else int(labels[row])
            if self._num_shown[group] < most and len(self.shown) < NUM_SHOWN:
                self._num_shown[group] += 1
                self.shown.append((self.num_read, example, target))
            self.num_read += 1

    def _count_classes(self, targets: np.ndarray, num_classes: int) -> None:
        counts = count_classes(targets, num_classes)
        self.num_outside += targets.size - int(counts.sum())
        # A mask may have pixels that do not count.
        if targets.ndim > 1 and num_classes <= IGNORED:
            self.num_outside -= int((targets == IGNORED).sum())
        self.class_counts = counts + (0 if self.class_counts is None else self.class_counts)

    def _note_repeat(self, digest: bytes, target_digest: bytes) -> None:
        earlier = self.digests.setdefault(digest, (target_digest, self.num_read))
        if earlier[1] < self.num_read:
            self.repeats.append((self.num_read, earlier[1]))
            self.num_contradictory += earlier[0] != target_digest

    def faults(self, class_names: list[str]) -> list[str]:
        """What a training would be refused for, a line each."""
        lines = []
        for name, values in self.values.items():
            if values.num_gaps:
                lines.append(f"{self.name}: {values.num_gaps:,} values of {name} are NaN or infinite; fix them")
        if self.num_outside:
            last = len(class_names) - 1
            lines.append(f"{self.name}: {self.num_outside:,} labels are outside 0 ... {last}; fix the targets")
        return lines

    def oddities(self, class_names: list[str], train: "SplitFacts") -> list[str]:
        """What a user should look at, a line each."""
        lines = []
        for name, values in self.values.items():
            if values.low == values.high and self.num_read > 1 and name.startswith("inputs"):
                lines.append(f"{self.name}: all values of {name} are {values.low:g}")
        if self.class_counts is not None and self.num_read == self.num_examples:
            lines += missing_classes({self.name: self.class_counts.tolist()}, class_names)

        if self.repeats:
            example, earlier = map(self.example, self.repeats[0])
            others = f", with another target {self.num_contradictory:,}" if self.num_contradictory else ""
            count = f"{len(self.repeats):,} of {self.num_read:,} examples{others}"
            lines.append(f"{self.name}: repeated {count}; {example} is {earlier}")
        shared = [digest for digest in self.digests if digest in train.digests]
        if shared and self is not train:
            example = self.example(self.digests[shared[0]][1])
            earlier = train.example(train.digests[shared[0]][1])
            count = f"{len(shared):,} of {self.num_read:,} examples"
            lines.append(f"{self.name}: also in train {count}; {example} is {earlier} of train")
        return lines


@dataclass
class Findings:
    """What was found of a data set.

    Attributes:
        source: the data set.
        class_names: names, or numbers, of the classes.
        described: what the source itself says.
        splits: what was read of each split.
        warnings: what is odd, a line each.
        refused: what a training would stop at, a line each.
        raw_rows: the first training rows of a table, by column.
    """

    source: Source
    class_names: list[str] = field(default_factory=list)
    described: DataDescription = field(default_factory=DataDescription)
    splits: list[SplitFacts] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    raw_rows: list[Any] = field(default_factory=list)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Notes an error of the block as a line, and goes on after it."""
        try:
            yield
        except (UserError, tf.errors.OpError) as error:
            explained = self.source.explain(error)
            if not isinstance(explained, UserError):
                raise
            # A file that cannot be read spoils every split in the same words.
            self.refused = list(dict.fromkeys([*self.refused, " ".join(str(explained).split())]))


def examine(config: RunConfig, limit: int, has_task: bool) -> Findings:
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
    findings = Findings(source)

    with findings.collecting():
        source.take_counts([source.own_counts(Topology())])
        findings.described = describe(source)
        findings.class_names = class_labels(source)
        if has_task:
            open_task(config, source)
    for split in source.SPLITS:
        with findings.collecting():
            facts = SplitFacts(split, source.num_examples(split))
            if facts.num_examples:
                findings.splits.append(facts)
                _read(source, facts, limit, len(findings.class_names))
    with findings.collecting():
        if isinstance(source.preprocessing().shape, dict):
            findings.raw_rows = source.raw_examples("train", Topology(), NUM_ROWS)

    skipped = [f"{item.location}: {item.problem}" for item in source.unreadable()]
    if config.data.on_error == "stop":
        findings.refused += skipped
    else:
        findings.warnings += skipped
    findings.warnings += findings.described.phrases.get("warnings", [])
    for facts in findings.splits:
        findings.refused += facts.faults(findings.class_names)
        findings.warnings += facts.oddities(findings.class_names, findings.splits[0])
    # The source may have said some of it.
    findings.warnings = list(dict.fromkeys(findings.warnings))
    return findings


def _read(source: Source, facts: SplitFacts, limit: int, num_classes: int) -> None:
    """Reads a split; of one with more than `limit` examples evenly spaced ones, if it can open single ones."""
    if isinstance(source, IndexedSource):
        facts.step = math.ceil(facts.num_examples / limit)
    topology = Topology(0, facts.step)
    number = min(topology.share_size(facts.num_examples), limit)
    progress = ProgressLines(f"{facts.name}: read", number, is_chief=True)
    examples = source.evaluation(facts.name, topology, min(BATCH_SIZE, number))
    for elements in examples.take(math.ceil(number / BATCH_SIZE)).as_numpy_iterator():
        facts.add(elements, num_classes)
        progress.update(facts.num_read)


def _digest(structure: Any) -> bytes:
    """A hash of one example's inputs or targets."""
    digest = hashlib.blake2b(digest_size=12)
    for value in map(np.asarray, tf.nest.flatten(structure)):
        # Of text NumPy has only the addresses.
        digest.update(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
    return digest.digest()
