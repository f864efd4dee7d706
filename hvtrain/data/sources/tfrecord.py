"""TFRecord files of encoded images, dealt to the ranks by file."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.description import listed
from hvtrain.data.formats.image_files import describe_images, sample
from hvtrain.data.formats.record_files import (
    CORRUPTED,
    EMPTY,
    find_files,
    first_records,
    is_gzipped,
    read_record,
    scan_records,
    stream_records,
)
from hvtrain.data.pipeline.decoding import decode_batch
from hvtrain.data.pipeline.streams import (
    BLOCK,
    FOREVER,
    ORDER,
    Read,
    derive_seed,
    step_sizes,
    unconverted,
)
from hvtrain.data.pipeline.transform import Transform
from hvtrain.data.source import LEAVE_OUT, StreamRequest, Unreadable, check_class_names
from hvtrain.data.sources.file_source import DealtSource, Example
from hvtrain.errors import DataError

# Of each file that is looked at.
SAMPLED_RECORDS = 4
# A constant: the order of examples must not depend on the machine.
INTERLEAVED_FILES = 8
# Training files up to this size in all are read once for the names of classes. Larger ones would
# keep every rank waiting before its first step.
MAX_NAMED_BYTES = 2**28


class TFRecords(DealtSource):
    """Encoded images of any size, and labels, in TFRecord files. Pixels are scaled to 0 ... 1.

    Epoch e of a rank: its files in an order made from (seed, e, rank), eight read in turns, and
    the records shuffled in blocks of shuffle_buffer. tf.data's shuffle() would mix TensorFlow's
    global seed into its own, so that the order would depend on what else the process did.

    Args:
        dir: holds train*.tfrecord, validation*.tfrecord and test*.tfrecord, or folders train/,
            validation/ and test/ of such files; the last two are optional. Names may end in
            .tfrecords or .tfrec, or in -00000-of-00001; files may be gzipped.
        image_shape: [height, width, channels] to which images are resized.
        num_classes: labels are num_classes whole numbers, from first_label on.
        image_key, label_key: names of the features of a tf.train.Example.
        class_names: by class, if labels are text; None: those of the training part, sorted, if its files
            are small enough to be read for them.
        shuffle_buffer: records of a block that is shuffled; less than 2: only files are.
        shift_pixels, flip: augmentation of training images; see Transform.
        sizing: resize, fit, crop_fraction and exif; see Sizing.
        first_label: the label of class 0; 1 in files of TensorFlow's scripts for ImageNet, where 0
            stands for the background.

    Raises:
        DataError: if there is no training file; once counted, if a file is damaged.
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
        shift_pixels: int = 0,
        flip: bool = False,
        class_names: Sequence[str] | None = None,
        first_label: int = 0,
        **sizing: Any,
    ) -> None:
        transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)
        super().__init__(dir, image_shape, transform, **sizing)
        self.num_classes = num_classes
        self.class_names = check_class_names(class_names, num_classes)
        self._image_key = image_key
        self._label_key = label_key
        self._first_label = first_label
        self._shuffle_buffer = shuffle_buffer
        # Offsets of the records, and defects, of files in which a record could not be used.
        self._scans: dict[str, tuple[Sequence[int], str | None]] = {}

        self._empty: list[str] = []  # Files without records, for the description.
        self._paths, self._warnings = find_files(self.folder)
        if not self._paths.get("train"):
            raise DataError(f"{self.folder} holds no train*.tfrecord; set dataset.dir to a folder that does")

    @cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        counts = {}
        for split, paths in self._paths.items():
            numbers = {path: self._count(path) for path in paths}
            # Beam and Spark write a file for each of their workers, and some may have nothing to write.
            counts[split] = {path: number for path, number in numbers.items() if path not in self._empty}
            self._packing(split)

        if not counts["train"]:
            raise DataError(f"{self.folder}: all training files are empty; write or fetch them again")
        if self._features[self._label_key].dtype == tf.string and self.class_names is None:
            self._name_classes()
        return counts

    def _packing(self, split: str) -> str:
        """Returns tf.data's name for the compression of a split's files. Raises DataError if they differ."""
        packed = [path for path in self._paths[split] if path not in self._empty and is_gzipped(path)]
        plain = [path for path in self._paths[split] if path not in self._empty and path not in packed]
        if packed and plain:
            raise DataError(f"{packed[0]} is gzipped and {plain[0]} is not; pack all files of {split}, or none")
        return "GZIP" if packed else ""

    @cached_property
    def _sample(self) -> list[tuple[str, bytes]]:
        """Some training records with their locations."""
        paths = sample([path for path in self._paths["train"] if Path(path).stat().st_size], 4)
        records = [(path, first_records(path, SAMPLED_RECORDS)) for path in paths]
        return [(f"{path}, record {number}", record) for path, part in records for number, record in enumerate(part)]

    @cached_property
    def _features(self) -> dict[str, Any]:
        """The features of an example; the label has the type that it has in the first record."""
        label_type = tf.int64
        labels = [self._feature(record, self._label_key) for _, record in self._sample]
        if labels and labels[0].float_list.value:
            label_type = tf.float32
        if labels and labels[0].bytes_list.value:
            label_type = tf.string
        return {
            self._image_key: tf.io.FixedLenFeature([], tf.string),
            self._label_key: tf.io.FixedLenFeature([], label_type),
        }

    def _name_classes(self) -> None:
        """Takes the names of classes from labels that are text.

        Raises:
            DataError: The files are too large to be read for that, or hold others than num_classes.
        """
        paths = self._paths["train"]
        if sum(Path(path).stat().st_size for path in paths) > MAX_NAMED_BYTES:
            labels = [self._feature(record, self._label_key) for _, record in self._sample]
            names = sorted({name.decode(errors="replace") for label in labels for name in label.bytes_list.value})
            raise DataError(
                f"{self.folder}: {self._label_key} holds text ({listed(names)}); give the names of all "
                f"{self.num_classes} classes, as in 'dataset.class_names=[{','.join(names[:3])},...]'"
            )

        feature = {self._label_key: tf.io.FixedLenFeature([], tf.string)}
        records = tf.data.TFRecordDataset(paths, self._packing("train"))
        labels = records.map(lambda record: tf.io.parse_single_example(record, feature)[self._label_key])
        # Without records that cannot be read: those are the business of the streams.
        distinct = labels.ignore_errors().unique().as_numpy_iterator()
        self.take_class_names([name.decode(errors="replace") for name in distinct], self._label_key)

    def _feature(self, record: bytes, key: str) -> tf.train.Feature:
        """Returns a feature of a record; an empty one if the record has none, or is something else."""
        example = tf.train.Example()
        with suppress(Exception):  # protobuf's errors are of several types.
            example.ParseFromString(record)
        return example.features.feature[key]

    @cached_property
    def _look(self) -> list[str]:
        images = []
        for location, record in self._sample:
            images += [(location, image) for image in self._feature(record, self._image_key).bytes_list.value]
        return describe_images(images, self.sizing.phrase(), self.sizing.exif)

    def description(self) -> dict[str, list[str]]:
        warnings = list(self._warnings)
        if self._empty:
            warnings.append(f"{len(self._empty)} file(s) without records: {listed(self._empty)}")
        return {**super().description(), "images": self._look, "warnings": warnings}

    def _count(self, path: str) -> int:
        """Returns how many records of a file can be read. Raises DataError for a damaged file.

        If the source skips, what comes after the damage is left out.
        """
        offsets, problem = scan_records(Path(path), check_lengths=self.skips)
        if problem == EMPTY:
            self._empty.append(path)
            return 0
        if problem and not self.skips:
            raise DataError(f"{path}: {problem}; write or fetch it again, {LEAVE_OUT}")
        if problem:
            self.leave_out(Unreadable(path, f"{problem}; the rest of this file is left out", None))
        return len(offsets)

    def paths(self, split: str) -> list[str]:
        return self._paths.get(split, [])

    def _files(self, split: str, topology: Topology) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns this rank's files: their paths, numbers of records, and codes of their first ones."""
        # Refuses images that would be read wrongly.
        self._look  # noqa: B018
        paths = self.shard(split, topology)
        counts = [self.counts[split][path] for path in paths]
        first_codes = [self.first_codes[path] for path in paths]
        return tf.constant(paths, tf.string), tf.constant(counts, tf.int64), tf.constant(first_codes, tf.int64)

    def training_batches(self, request: StreamRequest) -> tf.data.Dataset:
        files = self._files("train", request.topology)
        share = request.share_of(int(sum(files[1])))
        first_epoch, steps_done = request.position
        sizes = tf.constant(step_sizes(share), tf.int64)

        @unconverted
        def epoch_batches(epoch):
            records = self._shuffled(files, request, epoch).take(share.num_examples)
            # Only the first epoch of a resumed run begins in the middle. Records are skipped
            # before they are decoded.
            first_step = tf.where(epoch == first_epoch, steps_done, 0)
            records = records.skip(tf.cast(share.begin(first_step), tf.int64))
            batches = records.batch(share.batch_size, drop_remainder=share.is_full)
            return batches if share.is_full else batches.rebatch(sizes[first_step:])

        epochs = tf.data.Dataset.range(first_epoch, FOREVER)
        return epochs.flat_map(epoch_batches).enumerate(start=request.start_step)

    def evaluation_batches(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        files = tf.data.Dataset.from_tensor_slices(self._files(split, topology))
        records = files.flat_map(partial(stream_records, packing=self._packing(split)))
        return records.batch(batch_size).map(_flat).enumerate()

    def _shuffled(self, files: tuple[tf.Tensor, ...], request: StreamRequest, epoch: tf.Tensor) -> tf.data.Dataset:
        """Returns all of this rank's records once, in the order of that epoch."""
        seed = request.seed
        rank = request.topology.rank
        file_order = derive_seed(seed, ORDER, rank, epoch)
        records = tf.data.Dataset.from_tensor_slices(_shuffle(files, file_order)).interleave(
            partial(stream_records, packing=self._packing("train")),
            cycle_length=min(INTERLEAVED_FILES, len(files[0])),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

        if self._shuffle_buffer < 2:
            return records.map(_flat)

        def shuffle_block(number, block):
            return _shuffle(_flat(*block), derive_seed(seed, BLOCK, rank, epoch, number))

        return records.batch(self._shuffle_buffer).enumerate().map(shuffle_block).unbatch()

    def reader(self, split: str, topology: Topology) -> Read:
        def parse(records, codes, *draws):
            features = tf.io.parse_example(records, self._features)
            labels = self._classes(features[self._label_key])
            return decode_batch(features[self._image_key], self.sizing, *draws), labels

        return parse

    def sure_reader(self, split: str, topology: Topology) -> Read:
        parse = self.reader(split, topology)

        def read(records, codes, *draws):
            records = tf.numpy_function(self._read_again, [records, codes], tf.string)
            return parse(tf.ensure_shape(records, [None]), codes, *draws)

        return read

    def _read_again(self, records: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Reads a record that came empty, which may be a good one after a damaged one of its file."""
        path, row = self.piece_and_row(codes)
        offsets, _ = self._scan(path)
        # TensorFlow finds no record of a packed file by its offset.
        if records[0] or row >= len(offsets) or is_gzipped(path):
            return records
        return np.array([read_record(path, offsets[row])], object)

    def _scan(self, path: str) -> tuple[Sequence[int], str | None]:
        if path not in self._scans:
            self._scans[path] = scan_records(Path(path), self.skips)
        return self._scans[path]

    def _classes(self, labels: tf.Tensor) -> tf.Tensor:
        """Returns labels [batch] as int32 classes; -1 marks an example that cannot be used."""
        if labels.dtype == tf.string:
            is_name = labels[:, tf.newaxis] == tf.constant(self.class_names)
            indices = tf.argmax(is_name, axis=1, output_type=tf.int32)
            return tf.where(tf.reduce_any(is_name, axis=1), indices, -1)
        labels -= self._first_label
        is_class = (labels >= 0) & (labels < self.num_classes)
        if labels.dtype.is_floating:
            is_class &= labels == tf.floor(labels)
        return tf.cast(tf.where(is_class, labels, -1), tf.int32)

    def locate_row(self, piece: str, row: int, example: Example, problem: str) -> Unreadable:
        record = example[0][0]
        if not record and not self.skips:
            # The file may have changed since its last damage.
            self._scans.pop(piece, None)
        offsets, defect = self._scan(piece)

        if row >= len(offsets) or not (record or self.skips):
            count = next(counts[piece] for counts in self.counts.values() if piece in counts)
            if len(offsets) != count:
                defect = defect or f"holds {len(offsets)} records and had {count} before"
            if defect:
                return Unreadable(piece, defect)

        if not record:
            problem = CORRUPTED
        elif not problem:
            label = tf.io.parse_single_example(record, self._features)[self._label_key].numpy()
            last_label = self._first_label + self.num_classes - 1
            problem = f"label {label} is outside {self._first_label} ... {last_label}"
            if label == last_label + 1:
                problem += f"; if labels begin at {self._first_label + 1}, set dataset.first_label to that"
            if isinstance(label, bytes):
                problem = f"label {label.decode(errors='replace')!r} is none of dataset.class_names"

        location = f"{piece}, record {row} at byte {offsets[row]}"
        return Unreadable(location, problem.removeprefix("Name: <unknown>, "))


def _shuffle(rows: Any, seed: tf.Tensor) -> Any:
    """Shuffles the rows of all tensors in the same order."""
    return tf.nest.map_structure(lambda part: tf.random.experimental.stateless_shuffle(part, seed=seed), rows)


@unconverted
def _flat(readable: tuple[tf.Tensor, tf.Tensor], codes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns what stream_records() gives, one or a batch, as readers take it: records and codes."""
    return readable[0], codes
