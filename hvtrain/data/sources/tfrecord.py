"""TFRecord files of encoded images, dealt to the ranks by file."""

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.description import listed
from hvtrain.data.formats.image_files import describe_images, sample
from hvtrain.data.formats.record_files import (
    CORRUPTED,
    EMPTY,
    find_damage,
    find_files,
    find_record,
    first_records,
    is_gzipped,
    scan_records,
    walk,
)
from hvtrain.data.pipeline.decoding import decode_batch
from hvtrain.data.pipeline.streams import (
    BLOCK,
    FOREVER,
    ORDER,
    Read,
    derive_seed,
    unconverted,
)
from hvtrain.data.pipeline.transform import Transform
from hvtrain.data.source import LEAVE_OUT, StreamRequest, Unreadable, reason
from hvtrain.data.sources.file_source import DealtSource, Example, check_class_names
from hvtrain.errors import DataError

# TensorFlow's words if a file holds fewer records than when it was counted (assert_cardinality).
SHORTENED = "dataset was expected to contain"
# Of each file that is looked at.
SAMPLED_RECORDS = 4
# A constant: the order of examples must not depend on the machine.
INTERLEAVED_FILES = 8
# The longest search for a bad record, since files may be large.
SEARCH_SECONDS = 5.0


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
        num_classes: labels are whole numbers from 0 to num_classes - 1.
        image_key, label_key: names of the features of a tf.train.Example.
        class_names: by class, if labels are text.
        shuffle_buffer: records of a block that is shuffled; less than 2: only files are.
        shift_pixels, flip: augmentation of training images; see Transform.
        exif: turns photographs upright, as their EXIF orientation says.

    Raises:
        DataError: if there is no training file; once counted, if a file is damaged.
    """

    name = "tfrecord"
    PIECE = "TFRecord file"

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
        exif: bool = True,
    ) -> None:
        transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)
        super().__init__(dir, image_shape, transform, exif)
        self.num_classes = num_classes
        self.class_names = check_class_names(class_names, num_classes)
        self._image_key = image_key
        self._label_key = label_key
        self._shuffle_buffer = shuffle_buffer
        # Files that streams of this process read, and how many records they held.
        self._opened: dict[str, int] = {}

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
        paths = sample(list(self.counts["train"]), 4)
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
            texts = {text.decode(errors="replace") for label in labels for text in label.bytes_list.value}
            if self.class_names is None:
                raise DataError(
                    f"{self.folder}: {self._label_key} holds text ({listed(sorted(texts))}); give the names of all "
                    f"{self.num_classes} classes, as in 'dataset.class_names=[{','.join(sorted(texts)[:3])},...]'"
                )
        return {
            self._image_key: tf.io.FixedLenFeature([], tf.string),
            self._label_key: tf.io.FixedLenFeature([], label_type),
        }

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
        return describe_images(images, self.image_shape, self.exif)

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

    def _open(self, split: str, topology: Topology) -> dict[str, int]:
        """Returns this rank's files and their records, and notes them for explain()."""
        # Refuses images that would be read wrongly.
        self._look  # noqa: B018
        counts = {path: self.counts[split][path] for path in self.shard(split, topology)}
        self._opened.update(counts)
        return counts

    def training_batches(self, request: StreamRequest) -> tf.data.Dataset:
        counts = self._open("train", request.topology)
        share = request.share_of(sum(counts.values()))
        first_epoch, steps_done = request.position
        sizes = tf.constant(
            [share.begin(step + 1) - share.begin(step) for step in range(share.steps)],
            tf.int64,
        )

        @unconverted
        def epoch_batches(epoch):
            records = self._shuffled(list(counts), request, epoch).take(share.num_examples)
            # Without this the search for records in files that were emptied meanwhile would never
            # end.
            records = records.apply(tf.data.experimental.assert_cardinality(share.num_examples))
            # Only the first epoch of a resumed run begins in the middle. Records are skipped
            # before they are decoded.
            first_step = tf.where(epoch == first_epoch, steps_done, 0)
            records = records.skip(tf.cast(share.begin(first_step), tf.int64))
            batches = records.batch(share.batch_size, drop_remainder=share.is_full)
            return batches if share.is_full else batches.rebatch(sizes[first_step:])

        epochs = tf.data.Dataset.range(first_epoch, FOREVER)
        return epochs.flat_map(epoch_batches).enumerate(start=request.start_step)

    def evaluation_batches(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        paths = tf.constant(list(self._open(split, topology)), tf.string)
        return self._records(paths, self._packing(split)).batch(batch_size).enumerate()

    def _shuffled(self, paths: list[str], request: StreamRequest, epoch: tf.Tensor) -> tf.data.Dataset:
        """Returns all of this rank's records once, in the order of that epoch."""
        seed = request.seed
        rank = request.topology.rank
        file_order = derive_seed(seed, ORDER, rank, epoch)
        shuffled = tf.random.experimental.stateless_shuffle(tf.constant(paths), seed=file_order)
        records = tf.data.Dataset.from_tensor_slices(shuffled).interleave(
            partial(self._records, packing=self._packing("train")),
            cycle_length=min(INTERLEAVED_FILES, len(paths)),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

        if self._shuffle_buffer < 2:
            return records

        def shuffle_block(number, block):
            block_seed = derive_seed(seed, BLOCK, rank, epoch, number)
            return tf.random.experimental.stateless_shuffle(block, seed=block_seed)

        return records.batch(self._shuffle_buffer).enumerate().map(shuffle_block).unbatch()

    def _records(self, paths: tf.Tensor, packing: str) -> tf.data.Dataset:
        """Returns the records of a file, or of several in turn.

        If damaged records are left out, each comes as (location, data), read in Python, which is
        slower.
        """
        if not self.skips:
            return tf.data.TFRecordDataset(paths, compression_type=packing)

        signature = tf.TensorSpec([None, 2], tf.string)
        walked = partial(tf.data.Dataset.from_generator, walk, output_signature=signature)
        files = tf.data.Dataset.from_tensor_slices(tf.reshape(paths, [-1]))
        return files.flat_map(lambda path: walked(args=(path,)).unbatch())

    def reader(self, split: str, topology: Topology) -> Read:
        def parse(records):
            if self.skips:
                records = records[:, 1]  # Without their locations.
            features = tf.io.parse_example(records, self._features)
            labels = self._classes(features[self._label_key])
            return decode_batch(features[self._image_key], self.image_shape, self.exif), labels

        return parse

    def _classes(self, labels: tf.Tensor) -> tf.Tensor:
        """Returns labels [batch] as int32 classes; -1 marks an example that cannot be used."""
        if labels.dtype == tf.string:
            is_name = labels[:, tf.newaxis] == tf.constant(self.class_names)
            indices = tf.argmax(is_name, axis=1, output_type=tf.int32)
            return tf.where(tf.reduce_any(is_name, axis=1), indices, -1)
        is_class = (labels >= 0) & (labels < self.num_classes)
        if labels.dtype.is_floating:
            is_class &= labels == tf.floor(labels)
        return tf.cast(tf.where(is_class, labels, -1), tf.int32)

    def locate(self, split: str, topology: Topology, example: Example, problem: str) -> Unreadable:
        # (location, data) if the source skips, else the data alone.
        *locations, record = example[0].ravel()
        if not problem:
            label = tf.io.parse_single_example(record, self._features)[self._label_key].numpy()
            problem = f"label {label} is outside 0 ... {self.num_classes - 1}"
            if isinstance(label, bytes):
                problem = f"label {label.decode(errors='replace')!r} is none of dataset.class_names"

        problem = problem.removeprefix("Name: <unknown>, ") if record else CORRUPTED
        if locations:
            return Unreadable(locations[0].decode(), problem)

        # A record that comes without its location is searched for by its bytes.
        location = find_record(self._opened, record, time.monotonic() + SEARCH_SECONDS)
        if location is None:
            seconds = f"{SEARCH_SECONDS:.0f} s"
            location = f"{self.origin}, a record not found in {seconds} (skip would name it)"

        return Unreadable(location, problem)

    def explain(self, error: Exception) -> Exception:
        """Explains damage between records, too, for which TensorFlow names no file."""
        explained = super().explain(error)
        if explained is not error:
            return explained

        message = str(error)
        is_damage = isinstance(error, tf.errors.DataLossError) or SHORTENED in message
        if not is_damage and not any(path in message for path in self._opened):
            return error

        damage = find_damage(self._opened, message, self.skips, time.monotonic() + SEARCH_SECONDS)
        if damage:
            return DataError(f"{damage}; write or fetch the file again, {LEAVE_OUT}")
        return DataError(
            f"{self.origin}: {reason(error)}, in one of {len(self._opened):,} files; it was not "
            f"found in {SEARCH_SECONDS:.0f} s, but data.on_error=skip names it"
        )
