"""Parquet files of encoded images or of pixels, dealt to the ranks by row group; only two columns are read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.formats.record_framing import LEAVE_OUT, deal
from hvtrain.data.formats.row_groups import (
    Columns,
    RowGroup,
    find_files,
    is_encoded,
    pixel_type,
    read_footer,
    read_group,
)
from hvtrain.data.pipeline.decode import check_image_shape, decode, decode_batch
from hvtrain.data.pipeline.row_order import Batch, Piece, Read, epochs, read_ahead, rebatch
from hvtrain.data.pipeline.streams import AUGMENT, derive_seed, end_with_python, finish, numbered, share_of_epoch
from hvtrain.data.pipeline.transform import Transform
from hvtrain.data.preprocessing import Preprocessing, reshape
from hvtrain.data.source import reason
from hvtrain.data.sources.file_source import FileSource
from hvtrain.errors import ConfigError, DataError

ROW_BITS = 40  # A row's code is the number of its row group above these bits, and the row.


class Parquet(FileSource):
    """DIR/train*.parquet or DIR/train/, and likewise validation and test; or one file, the training part.

    Opening reads the footers, which hold the counts. Epoch e of a rank: its row groups in an order made from
    (seed, e, rank), shuffle_groups of them read and their rows shuffled together, then the next ones. Since the
    footers say where each row comes, a stream that starts in the middle reads nothing of what came before.
    In memory are shuffle_groups row groups and, read ahead by a thread, as many again.
    """

    name = "parquet"
    _encoded: bool
    _pixel_type: tf.DType
    _all_groups: list[RowGroup]

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
        self._place = place
        self._wrong: dict[str, str] = {}  # Why rows that were read cannot be used, by key.
        self._failure: DataError | None = None

    @cached_property
    def _groups(self) -> dict[str, dict[str, RowGroup]]:
        """Row groups by split and name; read when first asked for, since what damage does depends on on_error."""
        groups: dict[str, dict[str, RowGroup]] = {}
        first_of: dict[pa.DataType, Path] = {}
        for split in self.SPLITS:
            groups[split] = {}
            for path in find_files(self._place, split):
                found = self._read_footer(path, first_of)
                groups[split].update({f"{group.path} {group.number:09d}": group for group in found})
        if not groups["train"]:
            raise DataError(
                f"{self._place} holds no rows in train*.parquet or train/; give dataset.dir a folder that does"
            )
        self._encoded = any(map(is_encoded, first_of))
        self._pixel_type = tf.uint8 if set(first_of) == {pa.uint8()} else tf.float32
        if self._encoded and not all(map(is_encoded, first_of)):
            paths = " and ".join(map(str, first_of.values()))
            raise DataError(
                f"{paths}: {self._columns.image} is encoded in one and pixels in the other; write them alike"
            )
        self._all_groups = [group for part in groups.values() for group in part.values()]
        return groups

    def _read_footer(self, path: Path, first_of: dict[pa.DataType, Path]) -> list[RowGroup]:
        try:
            groups, schema = read_footer(path)
        except DataError as error:
            if not self.skips:
                raise
            self.lose(str(path), str(error).removeprefix(f"{path} "))
            return []
        if groups:
            first_of.setdefault(pixel_type(path, schema, self._columns), path)
        return groups

    def paths(self, split: str) -> list[str]:
        return list(dict.fromkeys(group.path for group in self._groups[split].values()))

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

        def augment(step: tf.Tensor, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images = self.transform.augment(images, derive_seed(seed, AUGMENT, topology.rank, step))
            return self.transform.normalize(images), labels

        steps = numbered(self._stream(batches, batch_size if share.is_full else None), start_step)
        return finish(self.read_carefully(steps, self._decode, _keys, augment, topology), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        groups = self._open(split, topology)
        num_local = sum(group.num_rows for group in groups)

        def batches() -> Iterator[Batch]:
            pieces = (Piece([group], np.arange(group.num_rows)) for group in groups)
            return self._cut(pieces, (min(batch_size, num_local - at) for at in range(0, num_local, batch_size)))

        def normalize(_: tf.Tensor, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self.transform.normalize(images), labels

        steps = numbered(self._stream(batches, None))
        return finish(
            self.read_carefully(steps, self._decode, _keys, normalize, topology, batch_size, num_local), topology
        )

    def preprocessing(self) -> Preprocessing:
        if self._groups and self._encoded:
            return super().preprocessing()
        shape = (int(np.prod(self.image_shape)),)
        layers = [*reshape(shape, self.image_shape), *self.transform.layers(self.image_shape)]
        return Preprocessing(shape, layers, f"the list in column {self._columns.image}")

    def _open(self, split: str, topology: Topology) -> list[RowGroup]:
        return self.shard_groups(split, topology.size, topology.weights)[topology.rank]

    def _stream(self, batches: Callable[[], Iterator[Batch]], batch_size: int | None) -> tf.data.Dataset:
        end_with_python()
        shape, kind = ([], tf.string) if self._encoded else (self.image_shape, self._pixel_type)
        numbers = tf.TensorSpec([batch_size], tf.int32), tf.TensorSpec([batch_size], tf.int64)
        signature = (tf.TensorSpec([batch_size, *shape], kind), *numbers)
        return tf.data.Dataset.from_generator(batches, output_signature=signature)

    def _decode(self, images: tf.Tensor, labels: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return (decode_batch(images, self.image_shape) if self._encoded else images), labels

    def _cut(self, pieces: Iterable[Piece], sizes: Iterable[int]) -> Iterator[Batch]:
        """The rows of the pieces in batches of these sizes; the piece after the current one is read meanwhile."""
        pool = ThreadPoolExecutor(1, "parquet")
        try:
            yield from rebatch(read_ahead(pool, self._read, pieces), sizes)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, piece: Piece) -> Read:
        parts = [self._read_group(group) for group in piece.groups]
        images, labels, codes = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts))
        if not self._encoded:
            images = images.astype(self._pixel_type.as_numpy_dtype, copy=False)
        return (images, labels, codes), piece.rows

    def _read_group(self, group: RowGroup) -> Batch:
        """Images, labels, and codes, which say where a row lies."""
        try:
            images, labels, wrong = read_group(group, self._columns)
            if wrong and not self.skips:
                row = min(wrong)
                raise DataError(f"{group}, row {row}: {wrong[row]}, {LEAVE_OUT}")
        except DataError as error:
            if not self.skips:
                self._failure = error
                raise
            self.lose(str(group), str(error).removeprefix(f"{group} "), group.num_rows)
            return self._nothing(group.num_rows)
        first = self._all_groups.index(group) << ROW_BITS
        self._wrong.update({str(first + row): why for row, why in wrong.items()})
        return images, labels, np.arange(first, first + group.num_rows)

    def _nothing(self, num_rows: int) -> Batch:
        """Rows that are not there, and are counted as a whole."""
        blank = np.full(num_rows, b"", object) if self._encoded else np.zeros([num_rows, *self.image_shape], np.uint8)
        return blank, np.full(num_rows, -1, np.int32), np.full(num_rows, -1)

    def locate(self, key: str) -> tuple[str, str]:
        number, row = divmod(int(key), 1 << ROW_BITS)
        group = self._all_groups[number]
        place = f"{group}, row {row}"
        if key in self._wrong:
            return place, self._wrong[key]
        try:
            decode(tf.constant(read_group(group, self._columns).images[row]), self.image_shape)
        except tf.errors.OpError as error:
            return place, reason(error)
        except DataError as error:
            return place, str(error)
        return place, "could not be read, but can now"

    def search(self, error: Exception) -> Exception:
        return self._failure if "DataError" in str(error) and self._failure else error


def _keys(images: tf.Tensor, labels: tf.Tensor, codes: tf.Tensor) -> tf.Tensor:
    return tf.where(codes < 0, "", tf.strings.as_string(codes))
