"""TFRecord files of encoded images, dealt to the ranks by file."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import Tensor
from tensorflow.data import Dataset

from hvtrain.core.topology import Topology
from hvtrain.data.description import listed
from hvtrain.data.formats.folders import find_split_files
from hvtrain.data.formats.image_files import sample
from hvtrain.data.formats.record_files import (
    CORRUPTED,
    EMPTY,
    compression_type,
    example_problem,
    features_of,
    files_of,
    first_records,
    read_record,
    scan_records,
    stream_records,
)
from hvtrain.data.pipeline.decoding import decode_batch
from hvtrain.data.pipeline.epochs import call_python
from hvtrain.data.pipeline.streams import (
    BLOCK,
    FOREVER,
    ORDER,
    Read,
    derive_seed,
    step_sizes,
    unconverted,
)
from hvtrain.data.source import Phrases, StreamRequest, Unreadable
from hvtrain.data.sources.file_source import DealtSource, Example
from hvtrain.errors import ConfigError, DataError

# The sample has this many records from each of this many files.
SAMPLED_RECORDS = 4
SAMPLED_FILES = 4
# Number of files read at a time. Fixed, since the order of examples must not depend on the machine.
INTERLEAVED_FILES = 8
# Training files up to this total size are read once to find the class names. Larger ones would
# keep every rank waiting before its first step.
MAX_NAMED_BYTES = 2**28


class TFRecords(DealtSource):
    """A source of encoded images of any size, with labels, in TFRecord files. Pixels are scaled to 0 ... 1.

    In epoch e, a rank reads its files in an order derived from (seed, e, rank), eight at a time, and
    shuffles their records in blocks of shuffle_buffer. tf.data's shuffle() is not used: it mixes in
    TensorFlow's global seed, so the order would depend on what else the process did.

    Args:
        dir: A folder with train*.tfrecord, validation*.tfrecord and test*.tfrecord, or with folders
            train/, validation/ and test/ of such files; only the training files are required. Names may
            end in .tfrecords or .tfrec, or in -00000-of-00001; files may be gzipped.
        image_shape: [height, width, channels] to which images are resized.
        num_classes: Number of classes; labels are whole numbers from first_label on, or text.
        image_key, label_key: Names of the features of a tf.train.Example.
        shuffle_buffer: Number of records that are shuffled together; below 2, only files are shuffled.
        first_label: The label of class 0. It is 1 in files written by TensorFlow's scripts for
            ImageNet, in which 0 stands for the background.
        images: class_names, shift_pixels, flip, and how images are resized; see FileSource. If labels
            are text, class_names are by default the sorted labels of the training part, if its files
            are small enough to be read in advance.

    Raises:
        DataError: If there is no training file; when records are counted, if a file is damaged.
        ConfigError: When records are counted, if no sampled record holds an encoded image and a label.
    """

    name = "tfrecord"
    PIECE = "TFRecord file"
    ADVICE = "write or fetch the file again"

    def __init__(
        self,
        dir: str,
        image_shape: Sequence[int],
        num_classes: int,
        image_key: str = "image",
        label_key: str = "label",
        shuffle_buffer: int = 10_000,
        first_label: int = 0,
        **images: Any,
    ) -> None:
        super().__init__(dir, image_shape, num_classes, **images)
        self._image_key = image_key
        self._label_key = label_key
        self._first_label = first_label
        self._shuffle_buffer = shuffle_buffer
        # Record offsets and the defect, if any, of files with a record that could not be used.
        self._scans: dict[str, tuple[Sequence[int], str | None]] = {}

        self._empty: list[str] = []  # Files without records, for the description.
        files, self._warnings = find_split_files(self.folder, files_of)
        self._paths = {split: list(map(str, paths)) for split, paths in files.items()}
        if not self._paths["train"]:
            raise DataError(
                f"{self.folder} holds no train*.tfrecord; set dataset.dir to a folder that does"
            )

    @cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        counts = {}
        for split, paths in self._paths.items():
            num_records = {path: self._count(path) for path in paths}
            # Files without records are normal: Beam and Spark write one file per
            # worker, even for a worker without data.
            counts[split] = {
                path: count for path, count in num_records.items() if path not in self._empty
            }

        if not counts["train"]:
            raise DataError(
                f"{self.folder}: all training files are empty; write or fetch them again"
            )
        if self._features[self._label_key].dtype == tf.string and self.class_names is None:
            self._name_classes()
        return counts

    @cached_property
    def _sample(self) -> list[tuple[str, bytes]]:
        """A sample of training records with their locations."""
        filled = [path for path in self._paths["train"] if Path(path).stat().st_size]
        paths = sample(filled, SAMPLED_FILES)
        records = [(path, first_records(path, SAMPLED_RECORDS)) for path in paths]
        return [
            (f"{path}, record {number}", record)
            for path, part in records
            for number, record in enumerate(part)
        ]

    @cached_property
    def _features(self) -> dict[str, Any]:
        """The features to parse from an example; the label's type is that of the first usable sampled record."""
        problems = {
            location: example_problem(record, self._image_key, self._label_key)
            for location, record in self._sample
        }
        # If only some examples are bad, the streams report them.
        if problems and all(problems.values()):
            location, problem = next(iter(problems.items()))
            raise ConfigError(f"{location} {problem}")
        usable = (record for location, record in self._sample if not problems[location])
        record = next(usable, b"")
        kind = features_of(record)[self._label_key].WhichOneof("kind")
        label_type = {"float_list": tf.float32, "bytes_list": tf.string}.get(kind, tf.int64)
        return {
            self._image_key: tf.io.FixedLenFeature([], tf.string),
            self._label_key: tf.io.FixedLenFeature([], label_type),
        }

    def _name_classes(self) -> None:
        """Sets the class names to the distinct labels of the training files, which are text.

        Raises:
            DataError: The files are too large to be read in advance, or do not hold num_classes names.
        """
        paths = self._paths["train"]
        if sum(Path(path).stat().st_size for path in paths) > MAX_NAMED_BYTES:
            labels = self._sample_values(self._label_key)
            names = sorted({name.decode(errors="replace") for _, name in labels})
            raise DataError(
                f"{self.folder}: {self._label_key} holds text ({listed(names)}); give the names of all "
                f"{self.num_classes} classes, as in 'dataset.class_names=[{','.join(names[:3])},...]'"
            )

        feature = {self._label_key: tf.io.FixedLenFeature([], tf.string)}
        files = Dataset.from_tensor_slices((paths, list(map(compression_type, paths))))
        records = files.flat_map(tf.data.TFRecordDataset)
        labels = records.map(
            lambda record: tf.io.parse_single_example(record, feature)[self._label_key]
        )
        # Unreadable records are ignored here; the streams report them.
        distinct = labels.ignore_errors().unique().as_numpy_iterator()
        self.set_class_names([name.decode(errors="replace") for name in distinct], self._label_key)

    def sample_images(self) -> list[tuple[str, bytes]]:
        return self._sample_values(self._image_key)

    def _sample_values(self, key: str) -> list[tuple[str, bytes]]:
        """Returns the bytes of a feature in the sample, with the locations of their records."""
        return [
            (location, value)
            for location, record in self._sample
            for value in features_of(record)[key].bytes_list.value
        ]

    def description(self) -> Phrases:
        description = super().description()
        if self._empty:
            description["warnings"].append(
                f"{len(self._empty)} file(s) without records: {listed(self._empty)}"
            )
        return description

    def _count(self, path: str) -> int:
        """Counts the readable records of a file.

        With on_error="skip", the records after the damage are left out.

        Raises:
            DataError: The file is damaged, and on_error is not "skip".
        """
        offsets, problem = scan_records(Path(path), check_lengths=self.skips)
        if problem == EMPTY:
            self._empty.append(path)
            return 0
        if problem:
            self.refuse(Unreadable(path, f"{problem}; the rest of the file cannot be read", None))
        return len(offsets)

    def paths(self, split: str) -> list[str]:
        return self._paths.get(split, [])

    def _files(self, split: str, topology: Topology, in_order: bool = False) -> tuple[Tensor, ...]:
        """Returns this rank's files, sorted by first code if in_order is true, as arguments of stream_records()."""
        # Computed here, since it refuses images that would be misread.
        self._image_phrases  # noqa: B018
        paths = self.shard(split, topology)
        if in_order:
            paths = sorted(paths, key=self.first_codes.__getitem__)
        counts = [self.counts[split][path] for path in paths]
        first_codes = [self.first_codes[path] for path in paths]
        return (
            tf.constant(paths, tf.string),
            tf.constant(list(map(compression_type, paths)), tf.string),
            tf.constant(counts, tf.int64),
            tf.constant(first_codes, tf.int64),
        )

    def training_batches(self, request: StreamRequest) -> Dataset:
        files = self._files("train", request.topology)
        # files[2] holds the number of records in each file.
        share = request.share_of(int(sum(files[2])))
        first_epoch, steps_done = request.position
        sizes = tf.constant(step_sizes(share), tf.int64)

        @unconverted
        def epoch_batches(epoch):
            records = self._epoch_records(files, request, epoch).take(share.num_examples)
            # Only the first epoch of a resumed run begins in the middle.
            # Skipped records are not decoded.
            first_step = tf.where(epoch == first_epoch, steps_done, 0)
            records = records.skip(tf.cast(share.begin(first_step), tf.int64))
            batches = records.batch(share.batch_size, drop_remainder=share.is_full)
            return batches if share.is_full else batches.rebatch(sizes[first_step:])

        epochs = Dataset.range(first_epoch, FOREVER)
        return epochs.flat_map(epoch_batches).enumerate(start=request.start_step)

    def evaluation_batches(self, split: str, topology: Topology, batch_size: int) -> Dataset:
        files = Dataset.from_tensor_slices(self._files(split, topology, in_order=True))
        return files.flat_map(stream_records).batch(batch_size).enumerate()

    def _epoch_records(
        self, files: tuple[Tensor, ...], request: StreamRequest, epoch: Tensor
    ) -> Dataset:
        """Streams each of this rank's records once, in the order of the epoch."""
        seed = request.seed
        rank = request.topology.rank
        file_order = derive_seed(seed, ORDER, rank, epoch)
        records = Dataset.from_tensor_slices(_shuffle(files, file_order)).interleave(
            stream_records,
            cycle_length=min(INTERLEAVED_FILES, len(files[0])),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

        if self._shuffle_buffer < 2:
            return records

        def shuffle_block(index, block):
            return _shuffle(block, derive_seed(seed, BLOCK, rank, epoch, index))

        return records.batch(self._shuffle_buffer).enumerate().map(shuffle_block).unbatch()

    def reader(self, split: str, topology: Topology) -> Read:
        def parse(records, codes, *draws):
            features = tf.io.parse_example(records, self._features)
            labels = self._classes(features[self._label_key])
            return decode_batch(features[self._image_key], self.sizing, *draws), labels

        return parse

    def retry_reader(self, split: str, topology: Topology) -> Read:
        parse = self.reader(split, topology)

        def read(records, codes, *draws):
            (records,) = call_python(
                self._read_again, [records, codes], [tf.TensorSpec([None], tf.string)]
            )
            return parse(records, codes, *draws)

        return read

    def _read_again(self, records: np.ndarray, codes: np.ndarray) -> list[np.ndarray]:
        """Returns one record. Reads an empty one again, since it may be intact and merely follow a damaged record."""
        path, row = self.piece_and_row(codes)
        offsets, _ = self._scan(path)
        # TensorFlow cannot seek to a record in a compressed file.
        if records[0] or row >= len(offsets) or compression_type(path):
            return [records]
        return [np.array([read_record(path, offsets[row])], object)]

    def _scan(self, path: str) -> tuple[Sequence[int], str | None]:
        if path not in self._scans:
            self._scans[path] = scan_records(Path(path), self.skips)
        return self._scans[path]

    def _classes(self, labels: Tensor) -> Tensor:
        """Returns labels [batch] as int32 classes, or -1 for an example that cannot be used."""
        if labels.dtype == tf.string:
            is_name = labels[:, None] == tf.constant(self.class_names)
            indices = tf.argmax(is_name, axis=1, output_type=tf.int32)
            return tf.where(tf.reduce_any(is_name, axis=1), indices, -1)
        labels -= self._first_label
        is_class = (labels >= 0) & (labels < self.num_classes)
        if labels.dtype.is_floating:
            is_class &= labels == tf.floor(labels)
        return tf.cast(tf.where(is_class, labels, -1), tf.int32)

    def locate(self, split: str, topology: Topology, example: Example, problem: str) -> Unreadable:
        piece, row = self.piece_and_row(example[-1])
        record = example[0][0]
        # An empty record is damaged, or the file has changed since it was last scanned. Scanning it
        # again shows which.
        may_have_changed = not record and not self.skips
        if may_have_changed:
            self._scans.pop(piece, None)
        offsets, defect = self._scan(piece)

        if row >= len(offsets) or may_have_changed:
            count = next(counts[piece] for counts in self.counts.values() if piece in counts)
            if len(offsets) != count:
                defect = defect or f"holds {len(offsets)} record(s), but held {count} before"
            if defect:
                return Unreadable(piece, defect)

        if not record:
            problem = CORRUPTED
        elif not problem:
            problem = self._label_problem(record)
        # TensorFlow begins a parsing error with the example's name, which is unknown.
        location = f"{piece}, record {row} at byte {offsets[row]}"
        return Unreadable(location, problem.removeprefix("Name: <unknown>, "))

    def _label_problem(self, record: bytes) -> str:
        label = tf.io.parse_single_example(record, self._features)[self._label_key].numpy()
        if isinstance(label, bytes):
            return f"label {label.decode(errors='replace')!r} is not one of dataset.class_names"
        end = self._first_label + self.num_classes
        problem = f"label {label} is outside {self._first_label} ... {end - 1}"
        if label == end:
            first_label = self._first_label + 1
            problem += f"; if labels begin at {first_label}, set dataset.first_label={first_label}"
        return problem


def _shuffle(rows: Any, seed: Tensor) -> Any:
    """Shuffles the rows of all tensors in the same order."""
    return tf.nest.map_structure(
        lambda part: tf.random.experimental.stateless_shuffle(part, seed=seed), rows
    )
