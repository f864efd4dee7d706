"""Initializes a rank's rows of a sharded table, gathers them for a checkpoint, and restores them.

Row r is on rank r mod the number of ranks, so the frequent ids at the beginning of a vocabulary are
spread over the ranks. No process holds a whole table in memory: each row is initialized from its number,
and rows pass through rank 0 in pieces on their way to and from a file, which has a shard for each rank.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from scipy.special import ndtr, ndtri

from hvtrain.checkpoint.store import PIECE_BYTES, ShardedTable, whole_shape
from hvtrain.errors import StorageError
from hvtrain.keras.in_graph import tf_variable
from hvtrain.system import resources


class Rows(NamedTuple):
    """This rank's rows of a table, or of an optimizer's slot for it: every `num_ranks`th, beginning with row `rank`."""

    table: str
    # Number of rows of the whole table.
    num_rows: int
    rank: int
    num_ranks: int

    @property
    def num_own(self) -> int:
        return len(range(self.rank, self.num_rows, self.num_ranks))

    def pieces(self, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields (begin, end) of each piece of this rank's rows; all ranks have the same pieces.

        The last end may exceed a rank's number of rows.
        """
        step = max(1, PIECE_BYTES // (row_bytes * self.num_ranks))
        for begin in range(0, math.ceil(self.num_rows / self.num_ranks), step):
            yield begin, begin + step

    def gather(self, variable: Any, folder: Path | None = None) -> ShardedTable | None:
        """Returns the whole table on rank 0, and None elsewhere (every rank).

        Args:
            variable: this rank's rows, [own, ...].
            folder: where rank 0 has space for the file; None: the system's temporary folder.

        Raises:
            StorageError: on all ranks, if the file cannot be written.
        """
        value = tf_variable(variable)
        shape = (self.num_rows, *value.shape[1:])
        table = None
        problem = None
        if self.rank == 0:
            try:
                table = self._empty_table(shape, value.dtype, folder)
            except OSError as error:
                where = folder or gettempdir()
                problem = (
                    f"a whole table of shape {shape} cannot be written in {where}: {error.strerror}; "
                    "make room there, or choose another folder"
                )
        problem = hvd.broadcast_object(problem, 0, name="hvtrain.table_space")
        if problem:
            raise StorageError(problem)

        for begin, end in self.pieces(math.prod(shape[1:]) * value.dtype.size):
            own = value[begin:end]
            # Sends all rows of the piece to rank 0.
            splits = tf.one_hot(0, self.num_ranks, tf.shape(own)[0], 0, dtype=tf.int32)
            received, counts = hvd.alltoall(own, splits, name="hvtrain.table_rows")
            if table is not None:
                pieces = np.split(received.numpy(), np.cumsum(counts)[:-1])
                for shard, piece in zip(table.shards, pieces):
                    shard[begin : begin + len(piece)] = piece
        return table

    def _empty_table(
        self, shape: tuple[int, ...], dtype: tf.DType, folder: Path | None
    ) -> ShardedTable:
        """Returns a table in an unnamed temporary file, deleted with the table; each shard has one rank's rows."""
        with TemporaryFile(dir=folder) as file:
            # Reserves the space: a write to mapped memory would kill the process if the disk were full.
            os.posix_fallocate(file.fileno(), 0, math.prod(shape) * dtype.size)
            rows = np.memmap(file, dtype.as_numpy_dtype, "r+", shape=shape)
        counts = [self._replace(rank=rank).num_own for rank in range(self.num_ranks)]
        return ShardedTable(np.split(rows, np.cumsum(counts)[:-1]))

    def scatter(self, variable: Any, whole: np.ndarray | ShardedTable | None) -> None:
        """Sets this rank's rows to those of rank 0's table (every rank)."""
        value = tf_variable(variable)
        row_shape = value.shape[1:]
        for begin, end in self.pieces(math.prod(row_shape) * value.dtype.size):
            sent = [np.empty((0, *row_shape), value.dtype.as_numpy_dtype)] * self.num_ranks
            if whole is not None and self.rank == 0:
                piece = np.asarray(whole[begin * self.num_ranks : end * self.num_ranks])
                sent = [piece[rank :: self.num_ranks] for rank in range(self.num_ranks)]
            splits = tf.constant([len(rows) for rows in sent], tf.int32)
            received, _ = hvd.alltoall(
                tf.constant(np.concatenate(sent)), splits, name="hvtrain.table_rows"
            )
            value[begin:end].assign(received)


def rows_of(variable: Any) -> Rows | None:
    """Returns which rows of a sharded table a variable or slot holds; None if it belongs to no such table."""
    part = getattr(variable, "rank_part", None)
    return part if isinstance(part, Rows) else None


def distribute_whole(variables: Sequence[Any]) -> None:
    """Distributes whole tables and slots that rank 0 has in the attribute `whole` of variables (every rank)."""
    parts = [variable for variable in variables if hasattr(variable, "rank_part")]
    if not parts or hvd.size() == 1:
        return
    are_set = hvd.broadcast_object(
        [hasattr(part, "whole") for part in parts], 0, name="hvtrain.whole"
    )
    for part, is_set in zip(parts, are_set):
        if is_set:
            part.rank_part.scatter(part, vars(part).pop("whole", None))


def save_table(store: Any, table: ShardedTable, name: str) -> None:
    """Writes a table in pieces, as "0" in the layer's group of a weights file.

    Raises:
        MemoryError: Keras writes the file in memory, as it does for .keras, and the table does not fit.
    """
    # Assigning the table would copy all of it. The empty array makes Keras create the HDF5 group.
    store["0"] = np.empty(0)
    del store["0"]
    group = store._h5_entry_group
    free_bytes = resources.free_bytes()
    # The buffer is copied when it grows.
    if group.file.driver == "fileobj" and 2 * table.nbytes > free_bytes:
        raise MemoryError(
            f"table {name} takes {table.nbytes / 2**30:,.1f} GiB, and a .keras file is written in memory, of which "
            f"{free_bytes / 2**30:,.1f} GiB are free here; save the weights alone, as .weights.h5"
        )
    rows = group.create_dataset("0", table.shape, table.dtype)
    for position, piece in table.pieces():
        rows[position] = piece


def whole_spec(variable: Any) -> tf.TensorSpec:
    """Returns the shape and type of the whole table of which a variable holds rows."""
    return tf.TensorSpec(whole_shape(variable), variable.dtype)


def with_nan(gradient: Any, value: tf.Tensor) -> Any:
    """Adds 0 or NaN to a gradient. IndexedSlices get another row for a NaN, since they may have no row."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient + tf.cast(value, gradient.dtype)
    num_added = tf.cast(tf.math.is_nan(value), tf.int32)
    rows = tf.fill([num_added, *gradient.values.shape[1:]], tf.cast(value, gradient.dtype))
    indices = tf.zeros([num_added], gradient.indices.dtype)
    return tf.IndexedSlices(
        tf.concat([gradient.values, rows], axis=0),
        tf.concat([gradient.indices, indices], axis=0),
        gradient.dense_shape,
    )


def make_rows(
    rows: Rows, row_size: int, initializer: Any, seed: int, dtype: Any = "float32"
) -> tf.Tensor:
    """Returns a rank's initial rows [own, row_size]; each depends only on seed, table name and row number.

    Raises:
        ValueError: for an initializer whose values depend on anything else, such as the fan-in.
    """
    draw = _draw_function(initializer)
    digest = hashlib.sha256(f"{seed}/{rows.table}".encode()).digest()
    key = np.uint64(int.from_bytes(digest[:8], "little"))
    values = np.empty((rows.num_own, row_size), np.dtype(dtype))
    step = max(1, PIECE_BYTES // (8 * row_size))
    for begin in range(0, rows.num_own, step):
        piece = values[begin : begin + step]
        numbers = np.arange(begin, begin + len(piece), dtype=np.uint64) * np.uint64(rows.num_ranks)
        numbers += np.uint64(rows.rank)
        counters = numbers[:, None] * np.uint64(row_size) + np.arange(row_size, dtype=np.uint64)
        piece[:] = draw(_uniform(counters, key))
    return tf.constant(values)


def _uniform(counters: np.ndarray, key: np.uint64) -> np.ndarray:
    """Returns a uniform random number between 0 and 1 for each counter: SplitMix64 (Steele, Lea and Flood 2014)."""
    bits = counters * np.uint64(0x9E3779B97F4A7C15) + key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    # Never exactly 0 or 1, whose normal quantiles are infinite.
    return ((bits >> np.uint64(40)).astype(np.float64) + 0.5) / 2**24


def _draw_function(initializer: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function that turns uniform random numbers into an initializer's values."""
    initializers = keras.initializers
    initializer = initializers.get(initializer)
    if isinstance(initializer, initializers.RandomUniform):
        return lambda uniform: (
            initializer.minval + uniform * (initializer.maxval - initializer.minval)
        )
    if isinstance(initializer, initializers.RandomNormal):
        return lambda uniform: initializer.mean + initializer.stddev * ndtri(uniform)
    if isinstance(initializer, initializers.TruncatedNormal):
        # Truncated at two standard deviations, as in Keras.
        low = ndtr(-2.0)
        return lambda uniform: (
            initializer.mean + initializer.stddev * ndtri(low + uniform * (1 - 2 * low))
        )
    is_constant = isinstance(
        initializer, initializers.Zeros | initializers.Ones | initializers.Constant
    )
    # A Constant may hold a whole table.
    if is_constant and np.ndim(getattr(initializer, "value", 0)) == 0:
        constant = float(initializer((1,))[0])
        return lambda uniform: np.full_like(uniform, constant)
    raise ValueError(
        f"a sharded table cannot be initialized with {type(initializer).__name__}; choose uniform, normal, "
        "truncated_normal, zeros or ones"
    )


def check_size(rows: Rows, row_bytes: int) -> None:
    """Raises ValueError if this rank's rows do not fit into free host memory. Checks nothing if there is a GPU."""
    free_bytes = resources.free_bytes()
    num_bytes = rows.num_own * row_bytes
    if num_bytes > free_bytes and not tf.config.list_logical_devices("GPU"):
        raise ValueError(
            f"table {rows.table} needs {num_bytes / 2**30:,.0f} GiB on each of {rows.num_ranks} rank(s), and "
            f"{free_bytes / 2**30:,.0f} GiB are free here; use more hosts, or fewer rows"
        )
