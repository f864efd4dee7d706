"""TFRecord files of encoded images, dealt to the ranks by file; and a small writer of such files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvtrain.data.decode import check_image_shape, decode, decode_batch
from hvtrain.data.framing import count_records, deal
from hvtrain.data.pipeline import (
    AUGMENT,
    BLOCK,
    FOREVER,
    ORDER,
    derive_seed,
    finish,
    parallel_map,
    share_of_epoch,
)
from hvtrain.data.source import Source, reason
from hvtrain.data.transform import Transform
from hvtrain.errors import DataError
from hvtrain.plan import Share
from hvtrain.topology import Topology

INTERLEAVED_FILES = 8  # A constant: the order of examples must not depend on the machine.


class TFRecords(Source):
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
        self._counts = {
            split: {str(path): count_records(path) for path in sorted(folder.glob(f"{split}*.tfrecord"))}
            for split in self.SPLITS
        }
        self._opened: dict[str, None] = {}  # Files that streams of this process read, for explain().
        if not self._counts["train"]:
            raise DataError(f"{folder} holds no train*.tfrecord; give dataset.dir a folder that does")

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
            # Only the first epoch of a resumed run is entered in the middle; its records stay encoded.
            done = tf.cast(share.begin(tf.where(epoch == first_epoch, steps_done, 0), tf.minimum), tf.int64)
            return _cut(records.skip(done), share, done)

        batches = tf.data.Dataset.range(first_epoch, FOREVER).flat_map(epoch_batches).enumerate(start=start_step)

        def load(step: tf.Tensor, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images, labels = self._parse(records)
            images = self.transform.augment(images, derive_seed(seed, AUGMENT, topology.rank, step))
            return self.transform.normalize(images), labels

        return finish(parallel_map(batches, load), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        records = tf.data.TFRecordDataset(tf.constant(self._open(split, topology), tf.string))

        def load(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images, labels = self._parse(records)
            return self.transform.normalize(images), labels

        return finish(parallel_map(records.batch(batch_size), load), topology)

    def _open(self, split: str, topology: Topology) -> list[str]:
        paths = self.shard_files(split, topology.size, topology.weights)[topology.rank]
        self._opened.update(dict.fromkeys(paths))
        return paths

    def _shuffled(self, paths: list[str], seed: int, rank: int, epoch: tf.Tensor) -> tf.data.Dataset:
        """All of this rank's records once, in the order of that epoch."""
        order = tf.random.experimental.stateless_shuffle(tf.constant(paths), seed=derive_seed(seed, ORDER, rank, epoch))
        records = tf.data.Dataset.from_tensor_slices(order).interleave(
            tf.data.TFRecordDataset,
            cycle_length=min(INTERLEAVED_FILES, len(paths)),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        if self._shuffle_buffer < 2:
            return records

        def shuffle_block(number: tf.Tensor, block: tf.Tensor) -> tf.Tensor:
            return tf.random.experimental.stateless_shuffle(block, seed=derive_seed(seed, BLOCK, rank, epoch, number))

        return records.batch(self._shuffle_buffer).enumerate().map(shuffle_block).unbatch()

    def _parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Serialised examples [batch] to raw images and labels; a label outside the classes stops the run."""
        features = tf.io.parse_example(records, self._features)
        labels = features[self._label_key]
        inside = tf.reduce_all((labels >= 0) & (labels < self.num_classes))
        message = f"DataError: a label is outside 0 ... {self.num_classes - 1}"
        with tf.control_dependencies([tf.debugging.Assert(inside, [message, labels])]):
            labels = tf.cast(labels, tf.int32)
        return decode_batch(features[self._image_key], self.image_shape), labels

    def explain(self, error: Exception) -> Exception:
        """Reads the files that were opened, record by record, until one fails as the pipeline did."""
        signs = ("DecodeImage", "DataError", "corrupted record", "truncated record", "ParseExample")
        if not any(sign in str(error) for sign in signs):
            return error
        for path in self._opened:
            index = 0
            try:
                for record in tf.data.TFRecordDataset(path):
                    self._check(record)
                    index += 1
            except (tf.errors.OpError, DataError) as cause:
                what = reason(cause) if isinstance(cause, tf.errors.OpError) else cause
                return DataError(f"{path}, record {index}: {what}; write the file again")
        return error

    def _check(self, record: tf.Tensor) -> None:
        """Does to one record, eagerly, what the pipeline does, so that it fails where that failed."""
        features = tf.io.parse_single_example(record, self._features)
        label = int(features[self._label_key])
        if not 0 <= label < self.num_classes:
            raise DataError(f"label {label} is outside 0 ... {self.num_classes - 1}")
        decode(features[self._image_key], self.image_shape)


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


def write_tfrecords(dir: str | Path, split: str, images: np.ndarray, labels: np.ndarray, num_files: int) -> list[Path]:
    """Writes images uint8 [n, h, w, c] as PNG and labels [n] to num_files files that TFRecords reads.

    Example i goes to file i % num_files. A file appears under its name only when it is complete.
    """
    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(num_files):
        path = folder / f"{split}-{number:05d}-of-{num_files:05d}.tfrecord"
        partial = path.with_suffix(".partial")
        with tf.io.TFRecordWriter(str(partial)) as writer:
            for image, label in zip(images[number::num_files], labels[number::num_files], strict=True):
                encoded = tf.io.encode_png(image).numpy()
                features = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
        paths.append(partial.rename(path))
    return paths
