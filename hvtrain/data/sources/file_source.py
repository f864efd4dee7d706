"""Base classes for sources that read files, and name or leave out each unreadable example.

TensorFlow does not say which file its pipeline could not read, and searching all files of a large
data set takes hours. So a batch that fails is read again immediately, example by example.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.data import Dataset

from hvtrain.core.topology import Topology
from hvtrain.data.description import listed
from hvtrain.data.formats.image_files import describe_images
from hvtrain.data.manifest import data_path, with_files
from hvtrain.data.pipeline.decoding import Sizing
from hvtrain.data.pipeline.epochs import call_python
from hvtrain.data.pipeline.streams import Postprocess, Read, StreamedSource
from hvtrain.data.pipeline.transform import Transform, check_image_shape
from hvtrain.data.source import (
    SKIP_ADVICE,
    Phrases,
    Preprocessing,
    Unreadable,
    check_class_names,
    reason,
)
from hvtrain.errors import DataError, StorageError, UserError
from hvtrain.system import resources

# A batch of a DealtSource ends with the codes of its examples, which are
# (number of the piece << ROW_BITS) + row.
ROW_BITS = 40
# Number of the latest errors that StreamErrors keeps.
MAX_FAILURES = 10

Piece = TypeVar("Piece")
# A batch of one example, as arrays of one element.
Example = Sequence[np.ndarray]


class StreamErrors:
    """Keeps the errors of a stream's Python code, since TensorFlow passes on only their text."""

    _failures: Sequence[UserError] = ()

    def record_error(self, error: UserError) -> UserError:
        """Returns the error, and keeps it for explain()."""
        # Several errors are kept, since tf.data reads ahead past the first, but only the latest, to save memory.
        self._failures = [*self._failures[1 - MAX_FAILURES :], error]
        return error

    def fail(self, message: str) -> UserError:
        """Returns a DataError to raise, and keeps it for explain()."""
        return self.record_error(DataError(message))

    def explain(self, error: Exception) -> Exception:
        # TensorFlow's message contains the text of the error that its Python call raised.
        for failure in self._failures:
            if f"{type(failure).__name__}: {failure}" in str(error):
                return failure
        return error


class FileSource(StreamErrors, StreamedSource):
    """Base class for sources that read files of encoded images of any size.

    A subclass whose files hold pixels instead overrides preprocessing() and no_random_crop.

    Args:
        dir: The folder of the files.
        image_shape: [height, width, channels] to which images are resized.
        class_names: The name of each of the num_classes classes.
        shift_pixels, flip, scale: See Transform.
        sizing: How images are resized: resize, fit, crop_fraction and exif; see Sizing.

    With on_error="stop", an unreadable example ends the stream, and explain() returns its error. With
    "skip", the example is reported by unreadable(). In training, a good example of the same batch
    replaces it, so that batches stay full and the stream depends on nothing but the files. In
    evaluation, it is left out.
    """

    ADVICE = "fix or remove it"
    """Advice about an unreadable example, for the message."""

    REMOTE_SUFFIXES: ClassVar[tuple[str, ...]] = ()
    """Suffixes of files that are read in parts from object storage instead of being copied."""

    no_random_crop = ""
    _warnings: Sequence[str] = ()
    """Warnings about the files, for the description."""

    def __init__(
        self,
        dir: str,
        image_shape: Sequence[int],
        num_classes: int = 0,
        class_names: Sequence[str] | None = None,
        shift_pixels: int = 0,
        flip: bool = False,
        scale: float = 255.0,
        **sizing: Any,
    ) -> None:
        self.folder = data_path(dir, self.REMOTE_SUFFIXES)
        self.origin = str(self.folder)
        self.image_shape = check_image_shape(image_shape)
        self.num_classes = num_classes
        self.class_names = check_class_names(class_names, num_classes)
        self.transform = Transform(scale=scale, shift_pixels=shift_pixels, flip=flip)
        self.sizing = Sizing(self.image_shape, **sizing)
        # Items left out, by location, in order. One that recurs in each epoch is reported once.
        self._left_out: dict[str, Unreadable] = {}
        self._num_reported = 0

    @abstractmethod
    def paths(self, split: str) -> list[str]:
        """Returns the files of a split."""

    @abstractmethod
    def locate(self, split: str, topology: Topology, example: Example, problem: str) -> Unreadable:
        """Returns the location and the problem of an example that cannot be used.

        Args:
            example: The reader's arguments for this example.
            problem: TensorFlow's error; empty if the reader gave the example the label -1.
        """

    @abstractmethod
    def sample_images(self) -> Iterable[tuple[str, str | bytes]]:
        """Returns a sample of the training images, as pairs of a location and a path or bytes."""

    @cached_property
    def _image_phrases(self) -> list[str]:
        """Describes the sample. Raises an error for images that would be misread."""
        return describe_images(self.sample_images(), self.sizing)

    def description(self) -> Phrases:
        return super().description() | {
            "images": self._image_phrases,
            "warnings": list(self._warnings),
        }

    def retry_reader(self, split: str, topology: Topology) -> Read:
        """Opens the reader for single examples of a failed batch; by default, calls reader()."""
        return self.reader(split, topology)

    def manifest(self) -> dict[str, Any]:
        return with_files(super().manifest(), self.folder, self.paths)

    def preprocessing(self) -> Preprocessing:
        return decoded_preprocessing(self.transform, self.sizing)

    def refuse(self, item: Unreadable) -> None:
        """Raises the error about an unusable example, file, or part of a file.

        With on_error="skip", the item is left out instead, and reported by unreadable().
        """
        if not self.skips:
            raise self.fail(f"{item.location}: {item.problem}; {self.ADVICE}, {SKIP_ADVICE}")
        self._left_out.setdefault(item.location, item)

    def unreadable(self) -> list[Unreadable]:
        new = list(self._left_out.values())[self._num_reported :]
        self._num_reported += len(new)
        return new

    def load(
        self,
        batches: Dataset,
        split: str,
        topology: Topology,
        postprocess: Postprocess,
        batch_size: int | None = None,
    ) -> Dataset:
        read = self.reader(split, topology)
        repair = BatchRepair(self, split, topology, is_training=batch_size is None)

        def read_or_repair(step, batch):
            single = Dataset.from_tensors(batch)
            whole = single.map(read)
            specs = whole.element_spec
            blanks = [np.zeros([0, *spec.shape[1:]], spec.dtype.as_numpy_dtype) for spec in specs]

            repaired = single.map(
                lambda *batch: tuple(call_python(partial(repair, blanks), batch, specs))
            )
            whole = whole.filter(lambda _, targets: tf.reduce_all(targets >= 0)).ignore_errors()
            # take(1) reads the repaired batch only if the whole one failed.
            either = whole.concatenate(repaired).take(1)
            return either.map(lambda *pair: postprocess(step, *pair))

        # Several batches are read at a time, but arrive in order.
        stream = batches.interleave(
            read_or_repair,
            resources.cores_of_each(topology.local_size),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        # In evaluation, only the last batch may be short, so batches
        # that lost examples are cut again.
        if batch_size and self.skips:
            stream = stream.unbatch().batch(batch_size)
        return stream


class BatchRepair:
    """Reads the examples of failed batches again, one by one, and leaves out those that cannot be used.

    Args:
        source: The source of the batches.
        split, topology: The shard that they belong to.
        is_training: True if good examples replace those that fail, so that the batch stays full.
    """

    def __init__(
        self, source: FileSource, split: str, topology: Topology, is_training: bool
    ) -> None:
        self._source = source
        self._split = split
        self._topology = topology
        self._is_training = is_training
        self._num_local = source.shard_size(split, topology)
        # The compiled reader is tried first, since most examples of a failed batch are good. Its
        # errors name nodes of the graph, so the eager one provides the reason.
        eager_read = source.retry_reader(split, topology)
        self._readers = tf.function(eager_read), eager_read
        # The skipped examples, by location.
        self._skipped: dict[str, Unreadable] = {}

    def __call__(self, blanks: Example, *batch: np.ndarray) -> Example:
        """Returns the images and targets of a batch that can be read; `blanks`, an empty batch, if there are none.

        Raises:
            DataError: An example cannot be used, and on_error is not "skip"; or no other can be used either.
            StorageError: The storage cannot be read.
        """
        examples = [[part[row : row + 1] for part in batch] for row in range(len(batch[0]))]
        attempts = list(map(self._read, examples))
        good = [pair for pair in attempts if pair]
        if self._is_training:
            if not good:
                item = next(reversed(self._skipped.values()))
                raise self._nothing_left_error(item, "of its batch")
            good = [pair or good[row % len(good)] for row, pair in enumerate(attempts)]
        return [np.stack(parts) for parts in zip(*good)] if good else blanks

    def _read(self, example: Example) -> tuple[np.ndarray, ...] | None:
        """Returns an image and its target, or None if the example is skipped."""
        for read in self._readers:
            problem = ""
            try:
                with tf.device("CPU:0"):
                    images, targets = read(*map(tf.constant, example))
                if tf.reduce_all(targets >= 0):
                    return images[0].numpy(), targets[0].numpy()
            except tf.errors.OpError as error:
                problem = reason(error)
            except DataError as error:  # Raised by a reader's Python code in eager mode.
                problem = str(error)
            except StorageError as error:  # The example may be good, so it is not left out.
                raise self._source.record_error(error) from None
        self._skip(example, problem)
        return None

    def _skip(self, example: Example, problem: str) -> None:
        """Leaves out an example, or raises the error about it."""
        # A training example that is cropped at random ends with the crop's
        # draws, which locate() does not take.
        if self._is_training and self._source.sizing.crop:
            example = example[:-1]
        item = self._source.locate(self._split, self._topology, example, problem)
        self._source.refuse(item)
        self._skipped[item.location] = item
        # Counted in a copy, since other threads repair batches at the same time.
        num_skipped = sum(item.num_examples or 0 for item in list(self._skipped.values()))
        if not self._is_training and num_skipped == self._num_local:
            raise self._nothing_left_error(item, f"of the rank's part of {self._split}")

    def _nothing_left_error(self, item: Unreadable, scope: str) -> UserError:
        return self._source.fail(
            f"{item.location}: {item.problem}; no other example {scope} can be read either, so "
            "data.on_error=skip leaves nothing; check the files and the settings of dataset"
        )


def decoded_preprocessing(transform: Transform, sizing: Sizing) -> Preprocessing:
    """Returns the preprocessing of decoded images, of any size unless sizing.is_fixed."""
    shape: tuple[int | None, ...] = (None, None, sizing.image_shape[2])
    values = "decoded pixels (tf.io.decode_image, keras.utils.load_img), not divided by 255"
    if sizing.exif:
        values += ", turned upright (PIL.ImageOps.exif_transpose)"
    if sizing.is_fixed:
        shape = sizing.image_shape
        values += f", {sizing.phrase()}"
    return transform.preprocessing(shape, sizing.image_shape, values, (0.0, 255.0), sizing.layers())


class DealtSource(FileSource):
    """Base class for sources whose ranks read different pieces: whole files, or row groups of files."""

    PIECE: ClassVar[str]
    """The name for a piece in error messages."""

    @property
    @abstractmethod
    def counts(self) -> Mapping[str, Mapping[Any, int]]:
        """Number of examples by split and piece.

        Counted on first use, since on_error, which decides what happens to damaged files, is set after opening.
        """

    def piece_and_row(self, codes: np.ndarray) -> tuple[Any, int]:
        """Returns the piece and the row of the example whose code is codes[0]."""
        number, row = divmod(int(codes[0]), 1 << ROW_BITS)
        return list(self.first_codes)[number], row

    @cached_property
    def first_codes(self) -> dict[Any, int]:
        """The code of each piece's first example."""
        pieces = chain(*self.counts.values())
        return {piece: number << ROW_BITS for number, piece in enumerate(pieces)}

    def facts(self) -> dict[str, Any]:
        # Counting sets the class names if labels are text.
        self.num_examples("train")
        return super().facts()

    def set_class_names(self, names: Collection[str], label: str) -> None:
        """Sets the class names to the sorted `names`, the distinct labels of the training part.

        Args:
            label: The name of their column, for the message.

        Raises:
            DataError: The number of names is not num_classes.
        """
        if len(names) != self.num_classes:
            raise DataError(
                f"{self.origin}: {label} holds {len(names)} name(s) ({listed(sorted(names))}), but "
                f"dataset.num_classes is {self.num_classes}; set it to {len(names)}, or give dataset.class_names"
            )
        self.class_names = sorted(names)

    def num_examples(self, split: str) -> int:
        return sum(self.counts.get(split, {}).values())

    def shard_sizes(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[int]:
        counts = self.counts.get(split, {})
        shards = self.shards(split, num_shards, weights)
        return [sum(counts[piece] for piece in shard) for shard in shards]

    def shards(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[list[Any]]:
        """Returns the pieces of each rank.

        Raises:
            DataError: If a rank would have no piece to train on; for evaluation, it may have none.
        """
        counts = self.counts.get(split, {})
        if split == "train" and len(counts) < num_shards:
            raise DataError(
                f"{self.origin} holds {len(counts)} {self.PIECE}(s) of training data for "
                f"{num_shards} ranks, and each rank needs its own; write at least {num_shards} "
                f"{self.PIECE}s or use fewer ranks"
            )
        return deal(counts, num_shards, weights)

    def shard(self, split: str, topology: Topology) -> list[Any]:
        """Returns this rank's pieces."""
        return self.shards(split, topology.size, topology.weights)[topology.rank]


def deal(
    counts: Mapping[Piece, int], num_shards: int, weights: Sequence[int] = ()
) -> list[list[Piece]]:
    """Deals pieces to shards, so that each shard holds examples in proportion to its weight. Pure.

    Pieces are dealt from the largest down, each to the shard with the lowest load for its weight so far.

    >>> deal({"a": 5, "b": 3, "c": 2}, 2)
    [['a'], ['b', 'c']]
    """
    shards: list[list[Piece]] = [[] for _ in range(num_shards)]
    weights = weights or [1] * num_shards
    loads = [0.0] * num_shards

    for piece in sorted(counts, key=lambda piece: (-counts[piece], piece)):
        # Ties go to the shard with fewer pieces, then to the first, so that all ranks deal alike.
        lightest = min(range(num_shards), key=lambda shard: (loads[shard], len(shards[shard])))
        shards[lightest].append(piece)
        loads[lightest] += counts[piece] / weights[lightest]

    return shards
