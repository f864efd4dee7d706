"""Parquet files of encoded images or of pixels, dealt to the ranks by row group; only two columns are read."""

from __future__ import annotations

import atexit
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from hvtrain.data.decode import check_image_shape, decode, decode_batch
from hvtrain.data.framing import deal
from hvtrain.data.pipeline import AUGMENT, derive_seed, finish, parallel_map, share_of_epoch
from hvtrain.data.row_groups import Columns, RowGroup, find_files, is_encoded, read_footer, read_group
from hvtrain.data.row_order import Batch, Piece, Rows, epochs, read_ahead, rebatch
from hvtrain.data.source import Source, reason
from hvtrain.data.transform import Transform
from hvtrain.errors import ConfigError, DataError
from hvtrain.topology import Topology


class Parquet(Source):
    """DIR/train*.parquet or DIR/train/, and likewise validation and test; or one file, the training part.

    Opening reads the footers, which hold the counts. Epoch e of a rank: its row groups in an order made from
    (seed, e, rank), shuffle_groups of them read and their rows shuffled together, then the next ones. Since the
    footers say where each row comes, a stream that starts in the middle reads nothing of what came before.
    In memory are shuffle_groups row groups and, read ahead by a thread, as many again.
    """

    name = "parquet"

    def __init__(
        self,
        dir: str,
        image_shape: Sequence[int],
        num_classes: int,
        image_column: str = "image",
        label_column: str = "label",
        scale: float = 255.0,
        shuffle_groups: int = 4,
        shift_pixels: int = 0,
        flip: bool = False,
    ) -> None:
        place = Path(dir).expanduser()
        self.origin = str(place)
        self.image_shape, self.num_classes = check_image_shape(image_shape), num_classes
        if not scale > 0:
            raise ConfigError(f"dataset.scale={scale} cannot divide pixels; give the largest value, 255 or 1")
        if shuffle_groups < 1:
            raise ConfigError(f"dataset.shuffle_groups={shuffle_groups} is out of range; it must be at least 1")
        self.transform = Transform(scale=scale, shift_pixels=shift_pixels, flip=flip)
        self._shuffle_groups = shuffle_groups
        self._columns = Columns(image_column, label_column, self.image_shape, num_classes)
        self._groups: dict[str, dict[str, RowGroup]] = {}
        first_of: dict[pa.DataType, Path] = {}
        for split in self.SPLITS:
            self._groups[split] = {}
            for path in find_files(place, split):
                groups, pixel = read_footer(path, self._columns)
                self._groups[split].update({f"{group.path} {group.number:09d}": group for group in groups})
                if groups:
                    first_of.setdefault(pixel, path)
        if not self._groups["train"]:
            raise DataError(f"{place} holds no rows in train*.parquet or train/; give dataset.dir a folder that does")
        self._encoded = any(map(is_encoded, first_of))
        self._pixel_type = tf.uint8 if set(first_of) == {pa.uint8()} else tf.float32
        if self._encoded and not all(map(is_encoded, first_of)):
            paths = " and ".join(map(str, first_of.values()))
            raise DataError(f"{paths}: {image_column} is encoded in one and pixels in the other; write them alike")
        self._opened: dict[RowGroup, None] = {}  # Row groups that streams of this process read, for explain().
        self._failure: DataError | None = None

    def num_examples(self, split: str) -> int:
        return sum(group.num_rows for group in self._groups.get(split, {}).values())

    def shard_sizes(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[int]:
        return [sum(group.num_rows for group in part) for part in self.shard_groups(split, num_shards, weights)]

    def shard_groups(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[list[RowGroup]]:
        """The row groups of each rank. Every rank needs one for training; for evaluation it may have none."""
        groups = self._groups.get(split, {})
        if split == "train" and len(groups) < num_shards:
            raise DataError(
                f"{self.origin} holds {len(groups)} row groups of training data for {num_shards} ranks, and each rank "
                f"reads row groups of its own; write at least {num_shards}, smaller ones or in more files, "
                "or use fewer ranks"
            )
        counts = {key: group.num_rows for key, group in groups.items()}
        return [[groups[key] for key in part] for part in deal(counts, num_shards, weights)]

    def training(
        self,
        topology: Topology,
        batch_size: int,
        seed: int,
        start_step: int,
        steps_per_epoch: int,
        num_examples: int | None = None,
    ) -> tf.data.Dataset:
        groups = self._open("train", topology)
        num_local = sum(group.num_rows for group in groups)
        share = share_of_epoch(num_local, batch_size, steps_per_epoch, num_examples, topology)

        def batches() -> Iterator[Batch]:
            pieces = epochs(groups, share, self._shuffle_groups, seed, topology.rank, start_step)
            steps = itertools.count(start_step % share.steps)
            sizes = (share.begin(step % share.steps + 1) - share.begin(step % share.steps) for step in steps)
            return self._cut(pieces, sizes)

        def load(step: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            images, labels = self._decode(*batch)
            images = self.transform.augment(images, derive_seed(seed, AUGMENT, topology.rank, step))
            return self.transform.normalize(images), labels

        stream = self._stream(batches, batch_size if share.is_full else None)
        return finish(parallel_map(stream.enumerate(start=start_step), load), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        groups = self._open(split, topology)
        num_local = sum(group.num_rows for group in groups)

        def batches() -> Iterator[Batch]:
            pieces = (Piece([group], np.arange(group.num_rows)) for group in groups)
            return self._cut(pieces, (min(batch_size, num_local - at) for at in range(0, num_local, batch_size)))

        def load(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images, labels = self._decode(images, labels)
            return self.transform.normalize(images), labels

        return finish(parallel_map(self._stream(batches, None), load), topology)

    def _open(self, split: str, topology: Topology) -> list[RowGroup]:
        groups = self.shard_groups(split, topology.size, topology.weights)[topology.rank]
        self._opened.update(dict.fromkeys(groups))
        return groups

    def _stream(self, batches: Callable[[], Iterator[Batch]], batch_size: int | None) -> tf.data.Dataset:
        atexit.register(_end_streams)
        shape, kind = ([], tf.string) if self._encoded else (self.image_shape, self._pixel_type)
        signature = (tf.TensorSpec([batch_size, *shape], kind), tf.TensorSpec([batch_size], tf.int32))
        return tf.data.Dataset.from_generator(batches, output_signature=signature)

    def _decode(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return (decode_batch(images, self.image_shape) if self._encoded else images), labels

    def _cut(self, pieces: Iterable[Piece], sizes: Iterable[int]) -> Iterator[Batch]:
        """The rows of the pieces in batches of these sizes; the piece after the current one is read meanwhile."""
        pool = ThreadPoolExecutor(1, "parquet")
        try:
            yield from rebatch(read_ahead(pool, self._read, pieces), sizes)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, piece: Piece) -> Rows:
        try:
            parts = [read_group(group, self._columns) for group in piece.groups]
        except DataError as error:
            self._failure = error
            raise
        images, labels = ([part[which] for part in parts] for which in (0, 1))
        joined = images[0] if len(parts) == 1 else np.concatenate(images)
        if not self._encoded:
            joined = joined.astype(self._pixel_type.as_numpy_dtype, copy=False)
        return joined, np.concatenate(labels), piece.rows

    def explain(self, error: Exception) -> Exception:
        """What a read met; for an image that cannot be decoded, the first such one of the row groups opened."""
        if "DataError" in str(error) and self._failure:
            return self._failure
        if not self._encoded or "DecodeImage" not in str(error):
            return error
        for group in self._opened:
            for row, encoded in enumerate(read_group(group, self._columns)[0]):
                try:
                    decode(tf.constant(encoded), self.image_shape)
                except tf.errors.OpError as cause:
                    return DataError(f"{group}, row {row}: {reason(cause)}; write the file again")
        return error


def _end_streams() -> None:
    """Ends open streams while Python is alive: TensorFlow's threads call these generators, and wait for ever for a
    call that the end of the interpreter has cut off."""
    for found in gc.get_objects():
        if isinstance(found, OwnedIterator):
            found._iterator_resource = None
