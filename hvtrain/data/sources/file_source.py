"""Base of the sources that read files: names an example that cannot be read, or leaves it out.

TensorFlow does not say which file its input pipeline could not read, and searching all files
afterwards takes hours on a large data set. So a batch that fails is read again at once, each
example alone.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.description import listed
from hvtrain.data.manifest import data_path, with_files
from hvtrain.data.pipeline.decoding import Sizing
from hvtrain.data.pipeline.streams import (
    Postprocess,
    Read,
    StreamedSource,
    end_with_python,
)
from hvtrain.data.pipeline.transform import Transform, check_image_shape
from hvtrain.data.source import LEAVE_OUT, Preprocessing, Unreadable, reason
from hvtrain.errors import DataError, StorageError, UserError
from hvtrain.system import resources

Piece = TypeVar("Piece")
Example = Sequence[np.ndarray]
"""One example's part of a batch, as arrays of one element."""


class NotesFailure:
    """Keeps the error that Python code of a stream raised: TensorFlow passes on only its text."""

    _failures: Sequence[UserError] = ()

    def note(self, error: UserError) -> UserError:
        """Returns the error, and keeps it for explain()."""
        # tf.data reads ahead, and meets more errors behind the first.
        self._failures = [*self._failures[-9:], error]
        return error

    def fail(self, message: str) -> UserError:
        """Returns a DataError to raise, and keeps it for explain()."""
        return self.note(DataError(message))

    def explain(self, error: Exception) -> Exception:
        # TensorFlow quotes the error that its Python call raised.
        quoted = (failure for failure in self._failures if f"{type(failure).__name__}: {failure}" in str(error))
        return next(quoted, error)


class FileSource(NotesFailure, StreamedSource):
    """A source of files with encoded images of any size.

    A subclass whose files hold pixels overrides preprocessing() and no_random_crop.

    on_error="stop": an example that cannot be read ends the stream with an error that explain()
        understands.
    on_error="skip": it is noted. In training a good example of its batch takes its place, so that
        all batches stay full and a stream stays a function of what the files hold. In evaluation
        it is left out.
    """

    ADVICE: ClassVar[str] = "fix or remove it"
    """What to do about an example that cannot be read, for the message."""

    no_random_crop = ""

    def __init__(
        self,
        dir: str,
        image_shape: Sequence[int],
        transform: Transform,
        **sizing: Any,
    ) -> None:
        self.folder = data_path(dir)
        self.origin = str(self.folder)
        self.image_shape = check_image_shape(image_shape)
        self.transform = transform
        self.sizing = Sizing(self.image_shape, **sizing)
        # By location, in order: every epoch meets such an example again, but it counts once.
        self._left_out: dict[str, Unreadable] = {}
        self._num_reported = 0

    @abstractmethod
    def paths(self, split: str) -> list[str]:
        """Returns the files of a split."""

    @abstractmethod
    def locate(self, split: str, topology: Topology, example: Example, problem: str) -> Unreadable:
        """Returns the location of an example that cannot be used, and the problem.

        Args:
            example: as the reader takes it.
            problem: TensorFlow's error; empty for a label of -1.
        """

    def sure_reader(self, split: str, topology: Topology) -> Read:
        """Opens a reader for single examples of a batch that `reader` failed on."""
        return self.reader(split, topology)

    @property
    def skips(self) -> bool:
        return self.on_error == "skip"

    def manifest(self) -> dict[str, Any]:
        return with_files(super().manifest(), self.folder, self.paths)

    def preprocessing(self) -> Preprocessing:
        return decoded_preprocessing(self.transform, self.sizing)

    def leave_out(self, item: Unreadable) -> None:
        """Notes a file, or a part of one, that on_error="skip" leaves out."""
        self._left_out.setdefault(item.location, item)

    def unreadable(self) -> list[Unreadable]:
        new = list(self._left_out.values())[self._num_reported :]
        self._num_reported += len(new)
        return new

    def load(
        self,
        batches: tf.data.Dataset,
        split: str,
        topology: Topology,
        postprocess: Postprocess,
        batch_size: int | None = None,
    ) -> tf.data.Dataset:
        end_with_python()
        repair = _BatchRepair(self, split, topology, is_training=batch_size is None)
        read = self.reader(split, topology)
        stream = read_batches(batches, read, repair, postprocess, topology)

        # Batches that lost examples are cut again, since only the last one may be short.
        if batch_size and self.skips:
            stream = stream.unbatch().batch(batch_size)
        return stream


class _BatchRepair:
    """Reads the good examples of a stream's failed batches, each alone, in plain Python.

    Args:
        source: locates the examples that fail, and notes them.
        is_training: True if good examples take the places of those that fail.
    """

    def __init__(
        self,
        source: FileSource,
        split: str,
        topology: Topology,
        is_training: bool,
    ) -> None:
        self._source = source
        self._split = split
        self._topology = topology
        self._is_training = is_training
        self._num_local = source.shard_sizes(split, topology.size, topology.weights)[topology.rank]
        self._skipped: dict[str, Unreadable] = {}  # By location.

        # The compiled reader is tried first, since most examples of a failed batch are good. Its
        # errors quote the graph, so the plain one gives the reason.
        read = source.sure_reader(split, topology)
        self._readers = tf.function(read), read

    def __call__(self, blanks: Example, *batch: np.ndarray) -> Example:
        """Returns the images and targets that can be read of a batch.

        Args:
            blanks: images and targets of a batch of no examples.
            batch: the failed batch, as its reader takes it.
        """
        examples = [[part[row : row + 1] for part in batch] for row in range(len(batch[0]))]
        attempts = [self._read(example) for example in examples]
        good = [pair for pair in attempts if pair]

        if self._is_training:
            if not good:
                raise self._nothing_left(next(reversed(self._skipped.values())), "of its batch")
            good = [pair or good[row % len(good)] for row, pair in enumerate(attempts)]

        return [np.stack(parts) for parts in zip(*good)] if good else blanks

    def _read(self, example: Example) -> tuple[np.ndarray, ...] | None:
        """Returns an image and its target; None if they are skipped.

        Raises:
            DataError: if the source does not skip, or nothing is left of the evaluation.
        """
        source = self._source
        for read in self._readers:
            problem = ""
            try:
                with tf.device("CPU:0"):
                    images, targets = read(*map(tf.constant, example))
                if tf.reduce_all(targets >= 0):
                    return images[0].numpy(), targets[0].numpy()
            except tf.errors.OpError as error:
                problem = reason(error)
            except DataError as error:  # As Python code of a reader raises it outside of a graph.
                problem = str(error)
            except StorageError as error:  # The example may be good, so it is not left out.
                raise source.note(error) from None

        # The crop's draws, which come last, are none of the source's parts.
        parts = example[:-1] if self._is_training and source.sizing.crop else example
        item = source.locate(self._split, self._topology, parts, problem)
        if not source.skips:
            raise source.fail(f"{item.location}: {item.problem}; {source.ADVICE}, {LEAVE_OUT}")

        source.leave_out(item)
        self._skipped[item.location] = item
        # A copy, since batches are repaired in several threads.
        skipped = list(self._skipped.values())
        num_skipped = sum(item.num_examples or 0 for item in skipped)
        if not self._is_training and num_skipped == self._num_local:
            raise self._nothing_left(item, f"of the rank's part of {self._split}")
        return None

    def _nothing_left(self, item: Unreadable, scope: str) -> UserError:
        return self._source.fail(
            f"{item.location}: {item.problem}; and no other example {scope} can be read, so that "
            "data.on_error=skip has nothing to go on with; check the files and the settings of "
            "dataset"
        )


def read_batches(
    batches: tf.data.Dataset,
    read: Read,
    repair: Callable,
    postprocess: Postprocess,
    topology: Topology,
) -> tf.data.Dataset:
    """Maps (step, batch) to postprocess(step, *read(batch)), in order.

    Args:
        batches: (step, batch) as the reader takes it.
        read: the reader.
        repair: gives images and targets, in plain Python, for a batch that read() fails on or of
            which a label is -1; see _BatchRepair.
        postprocess: what is done with each batch that was read.
        topology: tells how many ranks share the cores of this host.
    """

    def whole_or_repaired(step, batch):
        single = tf.data.Dataset.from_tensors(batch)
        whole = single.map(read)
        specs = whole.element_spec
        blanks = [np.zeros([0, *spec.shape[1:]], spec.dtype.as_numpy_dtype) for spec in specs]

        def repaired(*batch):
            tensors = tf.numpy_function(partial(repair, blanks), batch, [spec.dtype for spec in specs])
            # A Python function hides the shapes from the graph.
            return tuple(tf.ensure_shape(tensor, spec.shape) for tensor, spec in zip(tensors, specs))

        whole = whole.filter(lambda _, targets: tf.reduce_all(targets >= 0)).ignore_errors()
        # The second part is made only if the first is empty.
        either = whole.concatenate(single.map(repaired)).take(1)
        return either.map(lambda *pair: postprocess(step, *pair))

    # Several batches are read at a time, and still come in order.
    threads = resources.cores_of_each(topology.local_size)
    return batches.interleave(
        whole_or_repaired,
        threads,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def decoded_preprocessing(transform: Transform, sizing: Sizing) -> Preprocessing:
    """Returns the preprocessing of image files: a saved model takes decoded images of any size."""
    shape: tuple[int | None, ...] = (None, None, sizing.image_shape[2])
    values = "pixels of a decoded image (tf.io.decode_image, keras.utils.load_img), not divided by 255"
    if sizing.is_fixed:
        shape = sizing.image_shape
        values += f", {sizing.phrase()}"
    return transform.preprocessing(shape, sizing.image_shape, values, (0.0, 255.0), sizing.layers())


class DealtSource(FileSource):
    """A source whose files are dealt to the ranks in pieces: whole files, or row groups."""

    PIECE: ClassVar[str]
    """The name of a piece, for error messages."""
    ROW_BITS: ClassVar[int] = 40
    """An example's code, the last part of a batch: its piece's number << ROW_BITS, plus its row."""

    @property
    @abstractmethod
    def counts(self) -> Mapping[str, Mapping[Any, int]]:
        """Examples by split and piece.

        Counted on first use, since on_error, which is set after opening, says what damage does.
        """

    @abstractmethod
    def locate_row(self, piece: Any, row: int, example: Example, problem: str) -> Unreadable:
        """As locate(), by the example's piece and its row in the piece."""

    def locate(self, split: str, topology: Topology, example: Example, problem: str) -> Unreadable:
        return self.locate_row(*self.piece_and_row(example[-1]), example, problem)

    def piece_and_row(self, codes: np.ndarray) -> tuple[Any, int]:
        """Returns the piece and the row of the example with codes[0]."""
        row = int(codes[0]) % (1 << self.ROW_BITS)
        return self._pieces[int(codes[0]) - row], row

    @cached_property
    def _pieces(self) -> dict[int, Any]:
        """All pieces by the code of their first example."""
        pieces = [piece for pieces in self.counts.values() for piece in pieces]
        return {number << self.ROW_BITS: piece for number, piece in enumerate(pieces)}

    @cached_property
    def first_codes(self) -> dict[Any, int]:
        """The code of each piece's first example."""
        return {piece: code for code, piece in self._pieces.items()}

    def facts(self) -> dict[str, Any]:
        self.num_examples("train")  # Counting reads the names of classes.
        return super().facts()

    def take_class_names(self, names: Collection[str], label: str) -> None:
        """Takes the names of classes, sorted, from the labels of the training part.

        Args:
            label: The name of the column, for the message.

        Raises:
            DataError: There are other than num_classes of them.
        """
        if len(names) != self.num_classes:
            raise DataError(
                f"{self.origin}: {label} holds {len(names)} names ({listed(sorted(names))}) and "
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
            DataError: if a rank would have no piece to train on. For evaluation it may have none.
        """
        counts = self.counts.get(split, {})
        if split == "train" and len(counts) < num_shards:
            raise DataError(
                f"{self.origin} holds {len(counts)} {self.PIECE}s of training data for "
                f"{num_shards} ranks, and each rank reads its own; write at least {num_shards} "
                f"{self.PIECE}s or use fewer ranks"
            )
        return deal(counts, num_shards, weights)

    def shard(self, split: str, topology: Topology) -> list[Any]:
        """Returns this rank's pieces."""
        return self.shards(split, topology.size, topology.weights)[topology.rank]


def deal(
    counts: Mapping[Piece, int],
    num_shards: int,
    weights: Sequence[int] = (),
) -> list[list[Piece]]:
    """Deals pieces to shards, so that each holds examples in proportion to its weight. Pure.

    The largest piece comes first; each goes to the shard that has least so far for its weight.

    >>> deal({"a": 5, "b": 3, "c": 2}, 2)
    [['a'], ['b', 'c']]
    """
    shards: list[list[Piece]] = [[] for _ in range(num_shards)]
    weights = weights or [1] * num_shards
    loads = [0.0] * num_shards

    def load_of(shard):
        # Ties are broken by number, so that all ranks deal alike.
        return loads[shard], len(shards[shard]), shard

    for piece in sorted(counts, key=lambda piece: (-counts[piece], piece)):
        lightest = min(range(num_shards), key=load_of)
        shards[lightest].append(piece)
        loads[lightest] += counts[piece] / weights[lightest]

    return shards
