"""TFRecord files of encoded images, dealt to the ranks by file."""

import time
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.formats.record_files import CORRUPTED, find_damage, find_record, scan_records, walk
from hvtrain.data.pipeline.streams import BLOCK, FOREVER, ORDER, Read, derive_seed, unconverted
from hvtrain.data.pipeline.transform import Transform, decode_batch
from hvtrain.data.source import LEAVE_OUT, StreamRequest, Unreadable, reason
from hvtrain.data.sources.file_source import DealtSource, Example
from hvtrain.errors import DataError

CHANGED = "dataset was expected to contain"  # TensorFlow's words if a file is shorter than it was.
INTERLEAVED_FILES = 8  # A constant: the order of examples must not depend on the machine.
SEARCH_SECONDS = 5.0


class TFRecords(DealtSource):
    """DIR/train*.tfrecord, DIR/validation*.tfrecord, DIR/test*.tfrecord; pixels are scaled to 0 ... 1.

    Epoch e of a rank: its files in an order made from (seed, e, rank), eight read in turns, and the records
    shuffled in blocks of shuffle_buffer. tf.data's shuffle() would mix TensorFlow's global seed into its own, so
    that the order would depend on what else the process did.
    Each image is an encoded one of any size, resized to image_shape [height, width, channels].
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
    ) -> None:
        super().__init__(dir, image_shape, Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip))
        self.num_classes = num_classes
        self._image_key, self._label_key = image_key, label_key
        kinds = {image_key: tf.string, label_key: tf.int64}
        self._features = {key: tf.io.FixedLenFeature([], kind) for key, kind in kinds.items()}
        self._shuffle_buffer = shuffle_buffer
        self._paths = {split: sorted(map(str, self.folder.glob(f"{split}*.tfrecord"))) for split in self.SPLITS}
        self._opened: dict[str, int] = {}  # Files that streams of this process read, and their records.
        if not self._paths["train"]:
            raise DataError(f"{self.folder} holds no train*.tfrecord; set dataset.dir to a folder that does")

    @cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        return {split: {path: self._count(path) for path in paths} for split, paths in self._paths.items()}

    def _count(self, path: str) -> int:
        offsets, problem = scan_records(Path(path), check_lengths=self.skips)
        if problem and not self.skips:
            raise DataError(f"{path}: {problem}; write or fetch it again, {LEAVE_OUT}")
        if problem:
            self.leave_out(Unreadable(path, f"{problem}; the rest of this file is left out", None))
        return len(offsets)

    def paths(self, split: str) -> list[str]:
        return self._paths[split]

    def _open(self, split: str, topology: Topology) -> dict[str, int]:
        counts = {path: self.counts[split][path] for path in self.shard(split, topology)}
        self._opened.update(counts)
        return counts

    def training_batches(self, request: StreamRequest) -> tf.data.Dataset:
        counts = self._open("train", request.topology)
        share = request.share_of(sum(counts.values()))
        first_epoch, steps_done = request.position
        sizes = tf.constant([share.begin(step + 1) - share.begin(step) for step in range(share.steps)], tf.int64)

        @unconverted
        def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
            records = self._shuffled(list(counts), request, epoch).take(share.num_examples)
            # Without this the search for records in files that were emptied meanwhile would never end.
            records = records.apply(tf.data.experimental.assert_cardinality(share.num_examples))
            # Only the first epoch of a resumed run begins in the middle. Records are skipped before they are decoded.
            first_step = tf.where(epoch == first_epoch, steps_done, 0)
            records = records.skip(tf.cast(share.begin(first_step, tf.minimum), tf.int64))
            batches = records.batch(share.batch_size, drop_remainder=share.is_full)
            return batches if share.is_full else batches.rebatch(sizes[first_step:])

        epochs = tf.data.Dataset.range(first_epoch, FOREVER)
        return epochs.flat_map(epoch_batches).enumerate(start=request.start_step)

    def evaluation_batches(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        paths = list(self._open(split, topology))
        return self._in_turn(tf.constant(paths, tf.string)).batch(batch_size).enumerate()

    def _shuffled(self, paths: list[str], request: StreamRequest, epoch: tf.Tensor) -> tf.data.Dataset:
        """All of this rank's records once, in the order of that epoch."""
        seed, rank = request.seed, request.topology.rank
        order = tf.random.experimental.stateless_shuffle(tf.constant(paths), seed=derive_seed(seed, ORDER, rank, epoch))
        records = tf.data.Dataset.from_tensor_slices(order).interleave(
            self._in_turn,
            cycle_length=min(INTERLEAVED_FILES, len(paths)),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        if self._shuffle_buffer < 2:
            return records

        def shuffle_block(number: tf.Tensor, block: tf.Tensor) -> tf.Tensor:
            return tf.random.experimental.stateless_shuffle(block, seed=derive_seed(seed, BLOCK, rank, epoch, number))

        return records.batch(self._shuffle_buffer).enumerate().map(shuffle_block).unbatch()

    def _in_turn(self, path: tf.Tensor) -> tf.data.Dataset:
        """The records of a file; as (place, data) if damaged ones are left out, which is slower."""
        if not self.skips:
            return tf.data.TFRecordDataset(path)
        walked = partial(tf.data.Dataset.from_generator, walk, output_signature=tf.TensorSpec([None, 2], tf.string))
        paths = tf.data.Dataset.from_tensor_slices(tf.reshape(path, [-1]))
        return paths.flat_map(lambda path: walked(args=(path,)).unbatch())

    def reader(self, split: str, topology: Topology) -> Read:
        def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            features = tf.io.parse_example(records[:, 1] if self.skips else records, self._features)
            labels = features[self._label_key]
            inside = (labels >= 0) & (labels < self.num_classes)
            labels = tf.cast(tf.where(inside, labels, -1), tf.int32)
            return decode_batch(features[self._image_key], self.image_shape), labels

        return parse

    def locate(self, split: str, topology: Topology, example: Example, why: str) -> Unreadable:
        *place, record = example[0].ravel()  # A record that comes without its place is searched for by its bytes.
        found = place[0].decode() if place else find_record(self._opened, record, time.monotonic() + SEARCH_SECONDS)
        if not why:
            label = int(tf.io.parse_single_example(record, self._features)[self._label_key])
            why = f"label {label} is outside 0 ... {self.num_classes - 1}"
        why = why.removeprefix("Name: <unknown>, ") if record else CORRUPTED
        if found:
            return Unreadable(found, why)
        return Unreadable(f"{self.origin}, a record not found in {SEARCH_SECONDS:.0f} s (skip would name it)", why)

    def explain(self, error: Exception) -> Exception:
        """Explains damage between records, too, for which TensorFlow names no file."""
        explained, said = super().explain(error), str(error)
        if explained is not error:
            return explained
        if not (isinstance(error, tf.errors.DataLossError) or CHANGED in said or any(p in said for p in self._opened)):
            return error
        if damage := find_damage(self._opened, said, self.skips, time.monotonic() + SEARCH_SECONDS):
            return DataError(f"{damage}; write or fetch the file again, {LEAVE_OUT}")
        found = f"{self.origin}: {reason(error)}, in one of {len(self._opened):,} files"
        return DataError(f"{found}; it was not found in {SEARCH_SECONDS:.0f} s, but data.on_error=skip names it")
