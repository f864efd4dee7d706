"""TFRecord files of encoded images, dealt to the ranks by file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tensorflow as tf

from hvtrain.core.step_plan import Share
from hvtrain.core.topology import Topology
from hvtrain.data.formats.record_framing import LEAVE_OUT, count_records, deal, scan_records
from hvtrain.data.formats.record_reader import (
    find_changed,
    find_corrupted,
    find_fingerprint,
    fingerprints,
    read_at,
    walk,
)
from hvtrain.data.pipeline.decode import check_image_shape, decode, decode_batch
from hvtrain.data.pipeline.streams import (
    AUGMENT,
    BLOCK,
    FOREVER,
    ORDER,
    derive_seed,
    end_with_python,
    finish,
    share_of_epoch,
)
from hvtrain.data.pipeline.transform import Transform
from hvtrain.data.source import reason
from hvtrain.data.sources.file_source import SEARCH_SECONDS, FileSource
from hvtrain.errors import DataError

CHANGED = "dataset was expected to contain"  # TensorFlow's words where a file is shorter than it was.
INTERLEAVED_FILES = 8  # A constant: the order of examples must not depend on the machine.


class TFRecords(FileSource):
    """DIR/train*.tfrecord, DIR/validation*.tfrecord, DIR/test*.tfrecord; pixels are scaled to 0 ... 1.

    Epoch e of a rank: its files in an order made from (seed, e, rank), eight read in turns, and the records
    shuffled in blocks of shuffle_buffer. Blocks instead of tf.data's shuffle(), because that one mixes the
    global seed of TensorFlow into its own, so that the order would depend on what else the process did.
    Each image is an encoded one of any size, resized to image_shape [height, width, channels].
    """

    name = "tfrecord"

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
        folder = Path(dir).expanduser()
        self.origin = str(folder)
        self.image_shape, self.num_classes = check_image_shape(image_shape), num_classes
        self.transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)
        self._image_key, self._label_key = image_key, label_key
        self._features = {
            image_key: tf.io.FixedLenFeature([], tf.string),
            label_key: tf.io.FixedLenFeature([], tf.int64),
        }
        self._shuffle_buffer = shuffle_buffer
        self._paths = {split: sorted(map(str, folder.glob(f"{split}*.tfrecord"))) for split in self.SPLITS}
        self._opened: dict[str, None] = {}  # Files that streams of this process read, for explain().
        if not self._paths["train"]:
            raise DataError(f"{folder} holds no train*.tfrecord; give dataset.dir a folder that does")

    @cached_property
    def _counts(self) -> dict[str, dict[str, int]]:
        """Records by split and file; counted when first asked for, since what damage does depends on on_error."""
        return {split: {path: self._count(path) for path in paths} for split, paths in self._paths.items()}

    def _count(self, path: str) -> int:
        if not self.skips:
            return count_records(Path(path))
        offsets, problem = scan_records(Path(path), check_lengths=True)
        if problem:
            self.lose(path, f"{problem}; what follows in this file is left out")
        return len(offsets)

    def paths(self, split: str) -> list[str]:
        return self._paths[split]

    def num_examples(self, split: str) -> int:
        return sum(self._counts.get(split, {}).values())

    def shard_sizes(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[int]:
        counts = self._counts.get(split, {})
        return [sum(counts[path] for path in paths) for paths in self.shard_files(split, num_shards, weights)]

    def shard_files(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[list[str]]:
        """The files of each rank. Every rank needs one for training; for evaluation it may have none."""
        counts = self._counts.get(split, {})
        if split == "train" and len(counts) < num_shards:
            raise DataError(
                f"{self.origin} holds {len(counts)} train*.tfrecord files for {num_shards} ranks, and each rank "
                f"reads files of its own; write at least {num_shards} files or use fewer ranks"
            )
        return deal(counts, num_shards, weights)

    def training(
        self,
        topology: Topology,
        batch_size: int,
        seed: int,
        start_step: int,
        steps_per_epoch: int,
        num_examples: int | None = None,
    ) -> tf.data.Dataset:
        paths = self._open("train", topology)
        num_local = sum(self._counts["train"][path] for path in paths)
        share = share_of_epoch(num_local, batch_size, steps_per_epoch, num_examples, topology)
        first_epoch, steps_done = divmod(start_step, steps_per_epoch)

        def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
            records = self._shuffled(paths, seed, topology.rank, epoch).take(share.num_examples)
            # Or an epoch of files that were emptied meanwhile would be looked for for ever.
            records = records.apply(tf.data.experimental.assert_cardinality(share.num_examples))
            # Only the first epoch of a resumed run is entered in the middle; its records stay encoded.
            done = tf.cast(share.begin(tf.where(epoch == first_epoch, steps_done, 0), tf.minimum), tf.int64)
            return _cut(records.skip(done), share, done)

        batches = tf.data.Dataset.range(first_epoch, FOREVER).flat_map(epoch_batches).enumerate(start=start_step)

        def augment(step: tf.Tensor, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images = self.transform.augment(images, derive_seed(seed, AUGMENT, topology.rank, step))
            return self.transform.normalize(images), labels

        return finish(self.read_carefully(batches, self._parse, self._keys, augment, topology), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        paths = self._open(split, topology)
        num_local = sum(self._counts[split][path] for path in paths)
        batches = self._in_turn(tf.constant(paths, tf.string)).batch(batch_size).enumerate()

        def normalize(_: tf.Tensor, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self.transform.normalize(images), labels

        return finish(
            self.read_carefully(batches, self._parse, self._keys, normalize, topology, batch_size, num_local), topology
        )

    def _open(self, split: str, topology: Topology) -> list[str]:
        paths = self.shard_files(split, topology.size, topology.weights)[topology.rank]
        self._opened.update(dict.fromkeys(paths))
        return paths

    def _shuffled(self, paths: list[str], seed: int, rank: int, epoch: tf.Tensor) -> tf.data.Dataset:
        """All of this rank's records once, in the order of that epoch."""
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
        """The records of a file; each with its key where damaged ones are left out, which costs more."""
        if not self.skips:
            return tf.data.TFRecordDataset(path)
        end_with_python()
        pieces = tf.TensorSpec([None, 2], tf.string)
        paths = tf.data.Dataset.from_tensor_slices(tf.reshape(path, [-1]))
        return paths.flat_map(
            lambda path: tf.data.Dataset.from_generator(walk, args=(path,), output_signature=pieces).unbatch()
        )

    def _parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Serialised examples [batch], or [batch, 2] with their keys, to raw images and labels, -1 for a wrong one."""
        features = tf.io.parse_example(records[:, 1] if self.skips else records, self._features)
        labels = features[self._label_key]
        inside = (labels >= 0) & (labels < self.num_classes)
        labels = tf.cast(tf.where(inside, labels, -1), tf.int32)
        return decode_batch(features[self._image_key], self.image_shape), labels

    def _keys(self, records: tf.Tensor) -> tf.Tensor:
        return records[:, 0] if self.skips else fingerprints(records)

    def locate(self, key: str) -> tuple[str, str]:
        if not self.skips:
            found = find_fingerprint(self._opened, key, time.monotonic() + SEARCH_SECONDS)
            if found is None:
                why = f"a record cannot be read; it was not found in {SEARCH_SECONDS:.0f} s, but skip would name it"
                return self.origin, why
            key = found
        place, record, why = read_at(key)
        return place, why if record is None else self._check(record)

    def search(self, error: Exception) -> Exception:
        """For damage that reading the file itself met, which is not said to be in which file."""
        said, deadline_seconds = str(error), time.monotonic() + SEARCH_SECONDS
        found = find_corrupted(self._opened, said, deadline_seconds)
        if CHANGED in said:
            counted = {path: count for counts in self._counts.values() for path, count in counts.items()}
            found = find_changed({path: counted[path] for path in self._opened}, self.skips, deadline_seconds)
        if found:
            return DataError(f"{found[0]}: {found[1]}; write or fetch the file again, {LEAVE_OUT}")
        for path in self._opened:
            if path in said:
                return DataError(f"{path}: {reason(error).removeprefix(f'{path}; ')}; leave files alone in a run")
        if isinstance(error, tf.errors.DataLossError) or CHANGED in said:
            return DataError(
                f"{self.origin}: {reason(error)}, in one of {len(self._opened):,} files; it was not found in "
                f"{SEARCH_SECONDS:.0f} s, but data.on_error=skip would name it"
            )
        return error

    def _check(self, record: bytes) -> str:
        """Why the pipeline could not use a record: does to it, eagerly, what that does."""
        try:
            features = tf.io.parse_single_example(record, self._features)
            label = int(features[self._label_key])
            if not 0 <= label < self.num_classes:
                return f"label {label} is outside 0 ... {self.num_classes - 1}"
            decode(features[self._image_key], self.image_shape)
        except tf.errors.OpError as error:
            return reason(error)
        return "could not be read, but can now"


def _cut(records: tf.data.Dataset, share: Share, begin: tf.Tensor) -> tf.data.Dataset:
    """Batches as the share has them, from example number `begin` on."""
    if share.is_full:
        return records.batch(share.batch_size, drop_remainder=True)
    begins = tf.constant([share.begin(step) for step in range(share.steps + 1)], tf.int64)

    def step_of(number: tf.Tensor, record: tf.Tensor) -> tf.Tensor:
        return tf.searchsorted(begins, number[None], side="right", out_type=tf.int64)[0] - 1

    def batch(step: tf.Tensor, window: tf.data.Dataset) -> tf.data.Dataset:
        return window.map(lambda number, record: record).batch(share.batch_size)

    def size(step: tf.Tensor) -> tf.Tensor:
        return begins[step + 1] - begins[step]

    return records.enumerate(start=begin).group_by_window(step_of, batch, window_size_func=size)
