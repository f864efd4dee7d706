"""Parquet files of encoded images or of pixels, dealt to the ranks by row group; only two columns are read."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.formats import row_groups
from hvtrain.data.formats.row_groups import Columns, RowGroup, is_encoded
from hvtrain.data.pipeline import streams
from hvtrain.data.pipeline.transform import Transform, decode_batch
from hvtrain.data.source import Preprocessing, StreamRequest, Unreadable
from hvtrain.data.sources.file_source import DealtSource, Example
from hvtrain.errors import ConfigError, DataError

ROW_BITS = 40  # A row's code is the number of its row group, shifted by so many bits, plus the row's own number.

Batch = tuple[np.ndarray, ...]
"""Images, labels, and the codes of their rows."""
Read = tuple[Batch, np.ndarray]
"""The content of a piece, and its rows in the order in which they are taken."""


class Piece(NamedTuple):
    """Row groups that are in memory together, and those of their rows that are used, in order."""

    groups: list[RowGroup]
    rows: np.ndarray


class Parquet(DealtSource):
    """DIR/train*.parquet or DIR/train/, and likewise validation and test; or one file, the training part.

    Opening reads the footers, which hold the counts. Epoch e of a rank: its row groups in an order made from
    (seed, e, rank), shuffle_groups of them read and their rows shuffled together, then the next ones. The
    footers tell where each row comes, so a stream that starts in the middle reads no earlier row group.
    Memory holds shuffle_groups row groups and, read ahead by a thread, as many again.
    """

    name = "parquet"
    PIECE = "row group"
    _encoded: bool
    _pixel_type: tf.DType

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
        if not scale > 0:
            raise ConfigError(f"dataset.scale={scale} cannot divide pixels; give the largest value, 255 or 1")
        if shuffle_groups < 1:
            raise ConfigError(f"dataset.shuffle_groups={shuffle_groups} is out of range; it must be at least 1")
        super().__init__(dir, image_shape, Transform(scale=scale, shift_pixels=shift_pixels, flip=flip))
        self.num_classes = num_classes
        self._shuffle_groups = shuffle_groups
        self._columns = Columns(image_column, label_column, self.image_shape, num_classes)
        self._wrong_rows: dict[tuple[RowGroup, int], str] = {}  # Rows that were read and cannot be used, and why.
        self._wrong_groups: dict[RowGroup, str] = {}

    @cached_property
    def counts(self) -> dict[str, dict[RowGroup, int]]:
        groups: dict[str, dict[RowGroup, int]] = {split: {} for split in self.SPLITS}
        first_of: dict[pa.DataType, Path] = {}
        for split, found in groups.items():
            for path in row_groups.find_files(self.folder, split):
                found.update((group, group.num_rows) for group in self._read_footer(path, first_of))
        if not groups["train"]:
            advice = "set dataset.dir to a folder that does"
            raise DataError(f"{self.folder} holds no rows in train*.parquet or train/; {advice}")
        self._encoded = any(map(is_encoded, first_of))
        self._pixel_type = tf.uint8 if set(first_of) == {pa.uint8()} else tf.float32
        if self._encoded and not all(map(is_encoded, first_of)):
            both = " and ".join(map(str, first_of.values()))
            what = f"{self._columns.image} is encoded in one and pixels in the other"
            raise DataError(f"{both}: {what}; write both the same way")
        return groups

    @cached_property
    def _all_groups(self) -> list[RowGroup]:
        return [group for part in self.counts.values() for group in part]

    def _read_footer(self, path: Path, first_of: dict[pa.DataType, Path]) -> list[RowGroup]:
        try:
            groups, schema = row_groups.read_footer(path)
        except DataError as error:
            if not self.skips:
                raise
            self.leave_out(Unreadable(str(path), str(error).removeprefix(f"{path} "), None))
            return []
        if groups:
            first_of.setdefault(row_groups.pixel_type(path, schema, self._columns), path)
        return groups

    def paths(self, split: str) -> list[str]:
        return list(dict.fromkeys(group.path for group in self.counts[split]))

    def training_batches(self, request: StreamRequest) -> tf.data.Dataset:
        groups = self.shard("train", request.topology)
        share = request.share_of(sum(group.num_rows for group in groups))

        def batches() -> Iterator[Batch]:
            steps = itertools.count(request.position[1])
            sizes = (share.begin(step % share.steps + 1) - share.begin(step % share.steps) for step in steps)
            return self._cut(pieces_of(groups, self._shuffle_groups, request), sizes)

        return self._stream(batches, share.batch_size if share.is_full else None).enumerate(request.start_step)

    def evaluation_batches(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        groups = self.shard(split, topology)
        num_local = sum(group.num_rows for group in groups)

        def batches() -> Iterator[Batch]:
            pieces = (Piece([group], np.arange(group.num_rows)) for group in groups)
            return self._cut(pieces, (min(batch_size, num_local - at) for at in range(0, num_local, batch_size)))

        return self._stream(batches, None).enumerate()

    def reader(self, split: str, topology: Topology) -> streams.Read:
        def decode(images: tf.Tensor, labels: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return (decode_batch(images, self.image_shape) if self._encoded else images), labels

        return decode

    def preprocessing(self) -> Preprocessing:
        if self.counts and self._encoded:
            return super().preprocessing()
        values = f"the list in column {self._columns.image}"
        shape, limits = (int(np.prod(self.image_shape)),), (0.0, float(self.transform.scale))
        return self.transform.preprocessing(shape, self.image_shape, values, limits)

    def _stream(self, batches: Callable[[], Iterator[Batch]], batch_size: int | None) -> tf.data.Dataset:
        shape, kind = ([], tf.string) if self._encoded else (self.image_shape, self._pixel_type)
        numbers = tf.TensorSpec([batch_size], tf.int32), tf.TensorSpec([batch_size], tf.int64)
        signature = (tf.TensorSpec([batch_size, *shape], kind), *numbers)
        return tf.data.Dataset.from_generator(batches, output_signature=signature)

    def _cut(self, pieces: Iterable[Piece], sizes: Iterable[int]) -> Iterator[Batch]:
        """The rows of the pieces in batches of these sizes. The next piece is read while one is in use."""
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
        """Images, labels (-1 in rows that cannot be used), and codes."""
        try:
            images, labels, wrong = row_groups.read_group(group, self._columns)
            self._wrong_rows.update({(group, row): why for row, why in wrong.items()})
        except DataError as error:
            self._wrong_groups[group] = str(error).removeprefix(f"{group} ")
            shape, kind = ((), object) if self._encoded else (self.image_shape, self._pixel_type.as_numpy_dtype)
            images = np.full([group.num_rows, *shape], b"" if self._encoded else 0, kind)
            labels = np.full(group.num_rows, -1, np.int32)
        return images, labels, (self._all_groups.index(group) << ROW_BITS) + np.arange(group.num_rows)

    def locate(self, split: str, topology: Topology, example: Example, why: str) -> Unreadable:
        number, row = divmod(int(example[-1][0]), 1 << ROW_BITS)
        group = self._all_groups[number]
        if group in self._wrong_groups:
            return Unreadable(str(group), self._wrong_groups[group], group.num_rows)
        return Unreadable(f"{group}, row {row}", self._wrong_rows.get((group, row), why))


def pieces_of(groups: list[RowGroup], shuffle_groups: int, request: StreamRequest) -> Iterator[Piece]:
    """The pieces that a rank reads, endlessly, from request.start_step on. Pure."""
    share = request.share_of(sum(group.num_rows for group in groups))
    first_epoch, steps_done = request.position
    for epoch in itertools.count(first_epoch):
        random = np.random.default_rng((request.seed, streams.ORDER, request.topology.rank, epoch))
        order = random.permutation(len(groups))
        begin = share.begin(steps_done) if epoch == first_epoch else 0
        before = 0  # Rows of the epoch before this piece.
        for number, at in enumerate(range(0, len(groups), shuffle_groups)):
            chosen = [groups[index] for index in order[at : at + shuffle_groups]]
            num_rows = sum(group.num_rows for group in chosen)
            low, high = max(begin - before, 0), min(share.num_examples - before, num_rows)
            if low < high:
                random = np.random.default_rng((request.seed, streams.BLOCK, request.topology.rank, epoch, number))
                yield Piece(chosen, random.permutation(num_rows)[low:high])
            before += num_rows


def read_ahead(pool: Executor, read: Callable[[Piece], Read], pieces: Iterable[Piece]) -> Iterator[Read]:
    """read(piece) of each piece in turn. While one is in use, the next one is being read, and no other."""
    reading: Future[Read] | None = None
    for piece in pieces:
        ready = reading.result() if reading else None
        try:
            reading = pool.submit(read, piece)
        except RuntimeError:
            return  # Python is shutting down, and TensorFlow's threads still ask for more.
        if ready:
            yield ready
    if reading:
        yield reading.result()


def rebatch(pieces: Iterator[Read], sizes: Iterable[int]) -> Iterator[Batch]:
    """Batches of the given sizes, across the boundaries of pieces."""
    at, rows = 0, np.empty(0, np.int64)
    for size in sizes:
        parts = []
        while size:
            if at == len(rows):
                if (piece := next(pieces, None)) is None:
                    return
                at, (arrays, rows) = 0, piece
            taken = rows[at : at + size]
            parts.append(tuple(array[taken] for array in arrays))
            at, size = at + len(taken), size - len(taken)
        yield parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts)))
