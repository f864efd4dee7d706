"""Base of the sources that read files: an example that cannot be read is named, or left out and counted."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.manifest import of_files, user_path
from hvtrain.data.pipeline.streams import Read, StreamedSource, Then, end_with_python
from hvtrain.data.pipeline.transform import Transform, check_image_shape
from hvtrain.data.source import LEAVE_OUT, Preprocessing, Unreadable, reason
from hvtrain.errors import DataError
from hvtrain.system import cores

Piece = TypeVar("Piece")
Example = Sequence[np.ndarray]
"""One example's part of a batch, as arrays of one element."""


class FileSource(StreamedSource):
    """A source of files with encoded images of any size. If they hold pixels, preprocessing() says so.

    on_error="stop": an example that cannot be read ends the stream with an error that explain() understands.
    on_error="skip": it is noted. In training a good example of its batch takes its place, so that all batches stay
    full and a stream stays a function of what the files hold; in evaluation it is left out.
    """

    def __init__(self, dir: str, image_shape: Sequence[int], transform: Transform) -> None:
        self.folder = user_path(dir)
        self.origin = str(self.folder)
        self.image_shape, self.transform = check_image_shape(image_shape), transform
        self._places: set[str] = set()  # Of all that was left out: each counts once.
        self._new: list[Unreadable] = []
        self._failure: DataError | None = None

    @abstractmethod
    def paths(self, split: str) -> list[str]:
        """The files of a split."""

    @abstractmethod
    def locate(self, split: str, topology: Topology, example: Example, why: str) -> Unreadable:
        """Place of an example, and the reason why it cannot be used. why: TensorFlow's error; "" for a label of -1."""

    def sure_reader(self, split: str, topology: Topology) -> Read:
        """Reads single examples of a batch that `reader` failed on."""
        return self.reader(split, topology)

    @property
    def skips(self) -> bool:
        return self.on_error == "skip"

    def manifest(self) -> dict[str, Any]:
        found = super().manifest()
        for split, part in found["splits"].items():
            part.update(of_files(self.folder, self.paths(split)))
        return found

    def preprocessing(self) -> Preprocessing:
        values = "pixels of a decoded image (tf.io.decode_image, keras.utils.load_img), not divided by 255"
        shape = (None, None, self.image_shape[2])
        return self.transform.preprocessing(shape, self.image_shape, values, (0.0, 255.0))

    def leave_out(self, item: Unreadable) -> None:
        """Notes a file, or a part of one, that on_error="skip" leaves out."""
        if item.place not in self._places:
            self._places.add(item.place)
            self._new.append(item)

    def unreadable(self) -> list[Unreadable]:
        new, self._new = self._new, []
        return new

    def explain(self, error: Exception) -> Exception:
        return self._failure if self._failure and "DataError" in str(error) else error

    def load(
        self, batches: tf.data.Dataset, split: str, topology: Topology, then: Then, batch_size: int | None = None
    ) -> tf.data.Dataset:
        end_with_python()
        read_one = self.sure_reader(split, topology)
        read_fast = tf.function(read_one)  # Its errors quote the graph, so read_one gives the reason.
        num_local = self.shard_sizes(split, topology.size, topology.weights)[topology.rank]
        bad: dict[str, Unreadable] = {}  # Of this stream, by place.

        def attempt(example: Example) -> tuple[np.ndarray, int] | None:
            for read in (read_fast, read_one):
                why = ""
                try:
                    with tf.device("CPU:0"):
                        images, labels = read(*map(tf.constant, example))
                    if labels[0] >= 0:
                        return images[0].numpy(), int(labels[0])
                except tf.errors.OpError as error:
                    why = reason(error)
            item = self.locate(split, topology, example, why)
            if not self.skips:
                raise self._fail(f"{item.place}: {item.why}; fix or remove it, {LEAVE_OUT}")
            self.leave_out(item)
            bad[item.place] = item
            if batch_size and sum(item.num_examples or 0 for item in list(bad.values())) == num_local:
                raise self._nothing_left(item, f"of the rank's part of {split}")
            return None

        def repair(none: np.ndarray, *batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            rows = range(len(batch[0]))
            found = [attempt([part[row : row + 1] for part in batch]) for row in rows]
            good = [row for row in rows if found[row]]
            if not batch_size:
                if not good:
                    raise self._nothing_left(next(reversed(bad.values())), "of its batch")
                good = [row if found[row] else good[row % len(good)] for row in rows]
            kept = [pair for row in good if (pair := found[row])]
            images = np.stack([image for image, _ in kept]) if kept else none
            return images, np.array([label for _, label in kept], np.int32)

        found = read_batches(batches, self.reader(split, topology), repair, then, topology)
        # Batches are cut again, since only the last one may be short.
        return found.unbatch().batch(batch_size) if batch_size and self.skips else found

    def _nothing_left(self, item: Unreadable, of: str) -> DataError:
        found = f"no other example {of} can be read, so that data.on_error=skip has nothing to go on with"
        return self._fail(f"{item.place}: {item.why}; and {found}; check the files and the settings of dataset")

    def _fail(self, message: str) -> DataError:
        self._failure = DataError(message)
        return self._failure


def read_batches(
    batches: tf.data.Dataset, read: Read, repair: Callable, then: Then, topology: Topology
) -> tf.data.Dataset:
    """(step, batch) -> then(step, *read(batch)), in order. A batch that read() fails on, or of which a label is -1,
    goes through repair() instead, which gives the images and labels of what can be read of it; in plain Python.

    TensorFlow does not say which file its input pipeline could not read, and searching all files afterwards takes hours
    on a large data set. So a batch that fails is read again at once, each example alone.
    """

    def whole_or_repaired(step: tf.Tensor, batch: Any) -> tf.data.Dataset:
        this = tf.data.Dataset.from_tensors(batch)
        whole = this.map(read)
        images, labels = whole.element_spec
        none = np.zeros([0, *images.shape[1:]], images.dtype.as_numpy_dtype)

        def repaired(*batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            found = tf.numpy_function(partial(repair, none), batch, [images.dtype, labels.dtype])
            return tf.ensure_shape(found[0], images.shape), tf.ensure_shape(found[1], labels.shape)

        whole = whole.filter(lambda images, labels: tf.reduce_all(labels >= 0)).ignore_errors()
        # The second part is made only if the first is empty.
        either = whole.concatenate(this.map(repaired)).take(1)
        return either.map(lambda images, labels: then(step, images, labels))

    threads = cores.each(topology.local_size)
    return batches.interleave(whole_or_repaired, threads, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


class DealtSource(FileSource):
    """A source whose files are dealt to the ranks in pieces: whole files, or row groups."""

    PIECE: ClassVar[str]
    """The name of a piece, for error messages."""

    @property
    @abstractmethod
    def counts(self) -> Mapping[str, Mapping[Any, int]]:
        """Examples by split and piece, counted on first use, since what damage does depends on on_error."""

    def num_examples(self, split: str) -> int:
        return sum(self.counts.get(split, {}).values())

    def shard_sizes(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[int]:
        counts = self.counts.get(split, {})
        return [sum(counts[piece] for piece in shard) for shard in self.shards(split, num_shards, weights)]

    def shards(self, split: str, num_shards: int, weights: Sequence[int] = ()) -> list[list[Any]]:
        """The pieces of each rank. Each rank needs one for training; for evaluation it may have none."""
        counts = self.counts.get(split, {})
        if split == "train" and len(counts) < num_shards:
            found = f"{self.origin} holds {len(counts)} {self.PIECE}s of training data for {num_shards} ranks"
            fix = f"write at least {num_shards} {self.PIECE}s or use fewer ranks"
            raise DataError(f"{found}, and each rank reads its own; {fix}")
        return deal(counts, num_shards, weights)

    def shard(self, split: str, topology: Topology) -> list[Any]:
        """This rank's pieces."""
        return self.shards(split, topology.size, topology.weights)[topology.rank]


def deal(counts: Mapping[Piece, int], num_shards: int, weights: Sequence[int] = ()) -> list[list[Piece]]:
    """Pieces for each shard: the largest first, each to the shard that has least so far for its weight. Pure.

    >>> deal({"a": 5, "b": 3, "c": 2}, 2)
    [['a'], ['b', 'c']]
    """
    shards: list[list[Piece]] = [[] for _ in range(num_shards)]
    loads = [0.0] * num_shards
    for piece in sorted(counts, key=lambda piece: (-counts[piece], piece)):
        lightest = min(range(num_shards), key=lambda shard: (loads[shard], len(shards[shard]), shard))
        shards[lightest].append(piece)
        loads[lightest] += counts[piece] / (weights[lightest] if weights else 1)
    return shards
