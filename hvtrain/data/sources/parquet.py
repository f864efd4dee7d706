"""Parquet files of encoded images or pixels, dealt to the ranks by row group.

Only the columns of images and labels are read, so other columns cost nothing.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import tensorflow as tf
from tensorflow import TensorSpec
from tensorflow.data import Dataset

from hvtrain.config.validate import check_least
from hvtrain.core.topology import Topology
from hvtrain.data.formats import row_groups
from hvtrain.data.formats.folders import find_split_files
from hvtrain.data.formats.image_files import MAX_SAMPLE
from hvtrain.data.formats.row_groups import Columns, RowGroup, is_encoded
from hvtrain.data.pipeline import streams
from hvtrain.data.pipeline.decoding import decode_batch
from hvtrain.data.source import Phrases, Preprocessing, StreamRequest, Unreadable
from hvtrain.data.sources.file_source import DealtSource, Example
from hvtrain.errors import DataError, StorageError

# Images, labels, and the codes of the rows.
Rows = tuple[np.ndarray, ...]


class Piece(NamedTuple):
    """Row groups that are in memory at the same time, and the order of their rows."""

    groups: list[RowGroup]
    rows: np.ndarray
    """Indices of the rows to use, in order, within the concatenated groups."""


class Parquet(DealtSource):
    """A source of images or pixels, with labels, in the row groups of Parquet files.

    In epoch e, a rank takes its row groups in an order derived from (seed, e, rank): it reads
    shuffle_groups of them and shuffles their rows together, then the next ones. Positions of rows are
    known from the files' footers, so a stream that starts in the middle of an epoch reads no earlier
    row group. Memory holds shuffle_groups row groups, and as many again, which a thread reads ahead.

    Example:
        python -m hvtrain dataset=parquet dataset.dir=DIR dataset.image_shape=[64,64,3]
            dataset.num_classes=5

    Args:
        dir: A folder that holds train*.parquet or train/, and likewise validation (or val, valid, dev)
            and test; or a file, which is the training part.
        image_shape: [height, width, channels]. Encoded images of other sizes are resized.
        num_classes: Number of classes; labels are whole numbers from 0 to num_classes - 1, or text.
        image_column, label_column: Names of columns; `record.field` names the field of a struct.
        scale: The number by which pixels are divided.
        shuffle_groups: Number of row groups whose rows are shuffled together.
        images: class_names, shift_pixels, flip, and how encoded images are resized; see FileSource.
            If labels are text, class_names are by default the sorted labels of the training part.

    Raises:
        ConfigError: If a setting is out of range.
        DataError: When rows are counted, if there are no training rows, or if files differ in the kind of a column.
    """

    name = "parquet"
    PIECE = "row group"
    REMOTE_SUFFIXES = row_groups.SUFFIXES
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
        **images: Any,
    ) -> None:
        check_least("dataset.shuffle_groups", shuffle_groups, 1)

        super().__init__(dir, image_shape, num_classes, scale=scale, **images)
        self._ranges: dict[Path, tuple[float, float]] = {}  # Pixel ranges by file.
        self._shuffle_groups = shuffle_groups
        # Hydra takes a name such as 0 for a number.
        names = str(image_column), str(label_column)
        self._columns = Columns(*names, self.image_shape, num_classes)

        # The problem of each unreadable row group, or the problems of its unusable rows by row.
        self._problems: dict[RowGroup, str | dict[int, str]] = {}

    @cached_property
    def counts(self) -> dict[str, dict[RowGroup, int]]:
        files = {"train": [self.folder]}
        if self.folder.is_dir():
            files, self._warnings = find_split_files(self.folder, row_groups.files_of)
        # The first file with each type of pixels, and the first file with each kind of labels (text
        # or not), for the messages about types that cannot be mixed.
        first_paths: dict[pa.DataType, Path] = {}
        label_paths: dict[bool, Path] = {}
        counts = {
            split: {
                group: group.num_rows
                for path in paths
                for group in self._read_footer(path, first_paths, label_paths)
            }
            for split, paths in files.items()
        }
        if not counts["train"]:
            raise DataError(
                f"{self.folder} holds no training rows; set dataset.dir to a Parquet file with rows, or to a folder "
                "with rows in train*.parquet or train/"
            )

        self._set_image_type(first_paths)
        check_single_kind(
            f"{self._columns.label} holds text in one and whole numbers in the other", label_paths
        )
        row_groups.check_ranges(self._ranges)
        if True in label_paths:
            if self.class_names is None:
                train_paths = dict.fromkeys(group.path for group in counts["train"])
                names = row_groups.label_names(train_paths, self._columns)
                self.set_class_names(names, self._columns.label)
            self._columns = self._columns._replace(class_names=tuple(self.class_names or ()))
        return counts

    def _set_image_type(self, first_paths: dict[pa.DataType, Path]) -> None:
        """Sets whether images are encoded, and the type of pixels, given the first file with each type."""
        # Encoded images may have different binary types, and pixels different numeric types, but
        # one data set cannot have both.
        image_paths = {is_encoded(pixel_type): path for pixel_type, path in first_paths.items()}
        check_single_kind(
            f"{self._columns.image} holds encoded images in one and pixels in the other",
            image_paths,
        )
        self._encoded = True in image_paths
        # Only pixels that are all uint8 keep their type; others become float32.
        self._pixel_type = tf.uint8 if set(first_paths) == {pa.uint8()} else tf.float32

    def sample_images(self) -> list[tuple[str, bytes]]:
        if not self.is_encoded:
            return []
        group = next(iter(self.counts["train"]))
        images = self._read_group(group)[0][:MAX_SAMPLE]
        return [(f"{group}, row {row}", image) for row, image in enumerate(images) if image]

    def description(self) -> Phrases:
        description = super().description()
        if self._ranges:
            lows, highs = zip(*self._ranges.values())
            low = min(lows)
            high = max(highs)
            scale = self.transform.scale
            description["images"] = [f"pixels {low:g} to {high:g}, divided by {scale:g}"]
            if high <= 1 < scale or high > scale:
                warning = f"pixels reach {high:g} and are divided by {scale:g}; set dataset.scale"
                description["warnings"].append(warning)
        return description

    def _read_footer(
        self, path: Path, first_paths: dict[pa.DataType, Path], label_paths: dict[bool, Path]
    ) -> list[RowGroup]:
        """Returns a file's row groups; adds the file to the dictionaries if it is the first of its kind."""
        try:
            groups, schema = row_groups.read_footer(path)
        except DataError as error:
            # None, since the number of rows in a damaged file is unknown.
            self.refuse(Unreadable(str(path), str(error).removeprefix(f"{path} "), None))
            return []

        if groups:
            pixel_type = row_groups.pixel_type(path, schema, self._columns)
            first_paths.setdefault(pixel_type, path)
            label_type = row_groups.type_of(path, schema, self._columns.label)
            label_paths.setdefault(row_groups.is_text(label_type), path)
            pixel_range = row_groups.value_range(path, self._columns)
            if pixel_range and not is_encoded(pixel_type):
                self._ranges[path] = pixel_range
        return groups

    def paths(self, split: str) -> list[str]:
        # Each file once, in order; files without rows have no row groups.
        return list(dict.fromkeys(group.path for group in self.counts[split]))

    def training_batches(self, request: StreamRequest) -> Dataset:
        groups = self.shard("train", request.topology)
        share = request.share_of(sum(group.num_rows for group in groups))
        rows = self._stream(lambda: pieces_of(groups, self._shuffle_groups, request))
        if share.is_full:
            batches = rows.rebatch(share.batch_size, drop_remainder=True)
        else:
            # rebatch() cycles through the sizes of an epoch's steps, so they begin with
            # that of the first step to come.
            _, steps_done = request.position
            batches = rows.rebatch(np.roll(streams.step_sizes(share), -steps_done))
        return batches.enumerate(request.start_step)

    def evaluation_batches(self, split: str, topology: Topology, batch_size: int) -> Dataset:
        # One row group at a time, in the order of the files.
        groups = sorted(self.shard(split, topology), key=self.first_codes.__getitem__)
        pieces = [Piece([group], np.arange(group.num_rows)) for group in groups]
        return self._stream(lambda: pieces).rebatch(batch_size).enumerate()

    def reader(self, split: str, topology: Topology) -> streams.Read:
        def decode(images, labels, codes, *draws):
            if self._encoded:
                images = decode_batch(images, self.sizing, *draws)
            return images, labels

        return decode

    @property
    def is_encoded(self) -> bool:
        """True for encoded images, False for pixels. The first use counts the examples by reading the footers."""
        return bool(self.counts) and self._encoded

    @property
    def no_random_crop(self) -> str:  # type: ignore[override]
        return "" if self.is_encoded else "holds pixels of one size"

    def preprocessing(self) -> Preprocessing:
        if self.is_encoded:
            return super().preprocessing()
        return self.transform.preprocessing(
            (int(np.prod(self.image_shape)),),
            self.image_shape,
            f"the list in column {self._columns.image}",
            (0.0, float(self.transform.scale)),
        )

    def _stream(self, pieces: Callable[[], Iterable[Piece]]) -> Dataset:
        """Streams the rows of the pieces: images, labels and codes."""
        images = TensorSpec([None], tf.string)
        if not self._encoded:
            images = TensorSpec([None, *self.image_shape], self._pixel_type)
        labels = TensorSpec([None], tf.int32)
        codes = TensorSpec([None], tf.int64)
        rows = Dataset.from_generator(
            lambda: map(self._read, pieces()), output_signature=(images, labels, codes)
        )
        # While one piece is in use, only the next one is read ahead, to save memory.
        return rows.prefetch(1)

    def _read(self, piece: Piece) -> Rows:
        rows = [self._read_group(group) for group in piece.groups]
        images, labels, codes = (np.concatenate(parts)[piece.rows] for parts in zip(*rows))
        if not self._encoded:
            images = images.astype(self._pixel_type.as_numpy_dtype, copy=False)
        return images, labels, codes

    def _read_group(self, group: RowGroup) -> Rows:
        """Reads a row group's images, labels (-1 in unusable rows), and codes.

        The problems of unusable rows are kept for locate().
        """
        try:
            images, labels, problems = row_groups.read_group(group, self._columns)
            if problems:
                self._problems[group] = problems
        except StorageError as error:  # The rows may be good, so they are not left out.
            raise self.record_error(error) from None
        except DataError as error:
            self._problems[group] = str(error).removeprefix(f"{group} ")
            # Placeholder rows for an unreadable row group.
            images = np.zeros([group.num_rows, *self.image_shape], self._pixel_type.as_numpy_dtype)
            if self._encoded:
                images = np.full(group.num_rows, b"", object)
            labels = np.full(group.num_rows, -1, np.int32)

        return images, labels, self.first_codes[group] + np.arange(group.num_rows)

    def locate(self, split: str, topology: Topology, example: Example, problem: str) -> Unreadable:
        piece, row = self.piece_and_row(example[-1])
        problems = self._problems.get(piece, {})
        if isinstance(problems, str):
            return Unreadable(str(piece), problems, piece.num_rows)
        return Unreadable(f"{piece}, row {row}", problems.get(row, problem))


def check_single_kind(problem: str, paths: dict[bool, Path]) -> None:
    """Raises DataError if there is a file of each of two kinds; `problem` says how the two files differ."""
    if len(paths) > 1:
        first, second = paths.values()
        raise DataError(f"{first} and {second}: {problem}; use one kind in all files")


def pieces_of(
    groups: list[RowGroup], shuffle_groups: int, request: StreamRequest
) -> Iterator[Piece]:
    """Yields the pieces that a rank reads, endlessly, from request.start_step on. Pure.

    Earlier pieces are skipped. The first piece leaves out the rows before start_step, and the last piece of an
    epoch those that the epoch does not use.
    """
    share = request.share_of(sum(group.num_rows for group in groups))
    first_epoch, steps_done = request.position
    seed = request.seed
    rank = request.topology.rank

    for epoch in itertools.count(first_epoch):
        order = np.random.default_rng((seed, streams.ORDER, rank, epoch)).permutation(len(groups))
        # Only the first epoch of a resumed run begins in the middle.
        begin = share.begin(steps_done) if epoch == first_epoch else 0
        piece_begin = 0  # The number of rows before this piece in the epoch.

        for number, start in enumerate(range(0, len(groups), shuffle_groups)):
            chosen = [groups[index] for index in order[start : start + shuffle_groups]]
            num_rows = sum(group.num_rows for group in chosen)
            # The rows of this piece that lie between the stream's start and the epoch's end.
            low = max(begin - piece_begin, 0)
            high = min(share.num_examples - piece_begin, num_rows)
            if low < high:
                # Seeded by the piece's number, so that a resumed run
                # need not shuffle earlier pieces.
                random = np.random.default_rng((seed, streams.BLOCK, rank, epoch, number))
                yield Piece(chosen, random.permutation(num_rows)[low:high])

            piece_begin += num_rows
