"""Embedding tables whose rows are sharded over the ranks, for tables larger than one host's memory.

A lookup sends each distinct id of a rank's batch to the rank that owns its row, which sends the row
back. Gradients go to the owner in the same way, and it sums them in the order of the ranks.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import index
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute

from hvtrain.checkpoint.store import ShardedTable
from hvtrain.keras.in_graph import in_every_step, positional_name, refuse_xla, tf_variable
from hvtrain.keras.optimizers import row_slots
from hvtrain.keras.process import is_elastic
from hvtrain.keras.table_rows import Rows, check_size, make_rows, rows_of, save_table
from hvtrain.step.joint_loss import subclass_under_its_name


class ShardedRows:
    """Mixin before keras.layers.Embedding that shards its rows. On a single rank it changes only the initial rows."""

    _hvtrain_seed = 0
    # The whole table, only on rank 0 and within whole_tables().
    _hvtrain_whole: ShardedTable | None = None
    name: str
    input_dim: int
    output_dim: int
    built: bool

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        layer: Any = self
        for option in (
            "embeddings_regularizer",
            "embeddings_constraint",
            "lora_rank",
            "quantization_mode",
        ):
            if getattr(layer, option, None) is not None:
                raise ValueError(
                    f"table {self.name} has {option}, which needs the whole table; leave it out"
                )
        rank, size = (hvd.rank(), hvd.size()) if hvd.is_initialized() else (0, 1)
        if size > 1 and is_elastic():
            raise ValueError(
                f"table {self.name} is sharded, and ranks of an elastic job may leave with their rows; use "
                "keras.layers.Embedding, or a job with a fixed number of ranks"
            )
        if size > 1 and layer.variable_dtype == "bfloat16":
            raise ValueError(
                f"table {self.name} has rows of bfloat16, which Horovod cannot exchange; choose float32 or float16"
            )
        rows = Rows(self.name, self.input_dim, rank, size)
        check_size(rows, self.output_dim * tf.as_dtype(layer.variable_dtype).size)

        def initial_rows(shape, dtype):
            return make_rows(
                rows, self.output_dim, layer.embeddings_initializer, self._hvtrain_seed, dtype
            )

        layer._embeddings = layer.add_weight(
            shape=(rows.num_own, self.output_dim), initializer=initial_rows, name="embeddings"
        )
        # A single rank broadcasts and saves the table like any other weight.
        if rows.num_ranks > 1:
            layer._embeddings.rank_part = rows
            layer.supports_jit = False
        self.built = True

    def enable_lora(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            f"table {self.name} is sharded, and LoRA needs the whole table; leave it out"
        )

    @property
    def embeddings(self) -> Any:
        """The whole table, on a single rank or on rank 0 within whole_tables().

        Raises:
            ValueError: otherwise, because the table is sharded and no other layer can share it.
        """
        if self._hvtrain_whole is not None:
            return self._hvtrain_whole
        rows = rows_of(self._embeddings)  # type: ignore[attr-defined]
        if rows is not None:
            raise ValueError(
                f"table {self.name} is sharded over {rows.num_ranks} ranks, so no other layer can use its weights; do "
                "not shard a table with tied weights"
            )
        return self._embeddings  # type: ignore[attr-defined]

    def call(self, inputs: Any) -> Any:
        """Returns the rows [..., output_dim] of integer ids [...] (every rank).

        Raises:
            ValueError: for ids that are not integers.
            tf.errors.InvalidArgumentError: for ids that are out of range, when the step runs.
        """
        ids = tf.convert_to_tensor(inputs)
        if not ids.dtype.is_integer:
            raise ValueError(
                f"table {self.name} got ids of type {ids.dtype.name}; it needs int32 or int64"
            )
        variable = self._embeddings  # type: ignore[attr-defined]
        flat = check_ids(tf.reshape(tf.cast(ids, tf.int64), [-1]), self.name, self.input_dim)
        if self._hvtrain_whole is not None:
            rows = tf.numpy_function(
                self._hvtrain_whole.__getitem__, [flat], tf_variable(variable).dtype
            )
        elif rows_of(variable) is None:
            rows = tf.gather(tf_variable(variable), flat)
        else:
            rows = look_up(variable, flat)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [self.output_dim]], axis=0))
        rows.set_shape([*ids.shape, self.output_dim])
        return tf.cast(rows, self.compute_dtype)  # type: ignore[attr-defined]

    def row_variables(self, optimizer: Any) -> list[Any]:
        """Returns the variables with a row for each row of the table: the table itself, and an optimizer's slots."""
        table = self._embeddings  # type: ignore[attr-defined]
        return [table, *row_slots(optimizer, table)]

    def get_config(self) -> dict[str, Any]:
        # Keras writes .h5 files straight from the variables, not through save_own_variables.
        is_h5 = get_global_attribute("use_legacy_config")
        if is_h5 and rows_of(getattr(self, "_embeddings", None)):
            raise ValueError(
                f"table {self.name} is sharded over the ranks, and an .h5 file would get only one rank's rows; save "
                "the model as .keras, or its weights as .weights.h5"
            )
        return super().get_config()  # type: ignore[misc]

    def save_own_variables(self, store: Any) -> None:
        variable = self._embeddings  # type: ignore[attr-defined]
        if self._hvtrain_whole is not None:
            save_table(store, self._hvtrain_whole, self.name)
        elif rows_of(variable):
            raise ValueError(
                f"table {self.name} is sharded over the ranks; save the model inside hvd.whole_tables(model), which "
                "every rank has to enter"
            )
        else:
            store["0"] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        variable = self._embeddings  # type: ignore[attr-defined]
        saved = store["0"]
        shape = (self.input_dim, self.output_dim)
        if saved.shape != shape:
            raise ValueError(
                f"table {self.name} has shape {shape}, but the file's table has {saved.shape}; build the layer with "
                "the input_dim and output_dim that were saved"
            )
        rows = rows_of(variable)
        variable.assign(saved[rows.rank :: rows.num_ranks] if rows else saved[:])


def check_ids(ids: tf.Tensor, table: str, num_rows: int) -> tf.Tensor:
    """Returns the ids. If one is out of range, the step fails with an error that wrong_ids recognizes."""
    in_range = tf.reduce_all((ids >= 0) & (ids < num_rows))
    message = f"table {table} has rows 0 to {num_rows - 1}, and the smallest and largest id are"
    extremes = [tf.reduce_min(ids), tf.reduce_max(ids)]
    with tf.control_dependencies([tf.debugging.Assert(in_range, [message, *extremes])]):
        return tf.identity(ids)


def wrong_ids(error: Exception) -> str | None:
    """Returns check_ids's message in one line if the error comes from check_ids, otherwise None."""
    match = re.search(
        r"(table \S+ has rows 0 to \d+), [^\]]*\] \[(-?\d+)\] \[(-?\d+)\]", str(error)
    )
    if not match:
        return None
    rows, smallest, largest = match.groups()
    return f"{rows}, but got ids from {smallest} to {largest}; add rows to the table, or check the data"


def look_up(variable: Any, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows [n, ...] of a sharded table for ids [n], with their gradient (every rank).

    The number of ids may differ between ranks, and may be 0.

    Raises:
        ValueError: if XLA compiles the step.
    """
    refuse_xla("a lookup in a sharded table")
    name = positional_name("table")
    num_ranks = rows_of(variable).num_ranks  # type: ignore[union-attr]
    options = {"ignore_name_scope": True}
    ids = in_every_step(ids)

    # tf.unique runs on the CPU only.
    with tf.device("/CPU:0"):
        unique, positions = tf.unique(ids)
        owners = tf.cast(unique % num_ranks, tf.int32)
        order = tf.argsort(owners, stable=True)
        counts = tf.math.bincount(owners, minlength=num_ranks, maxlength=num_ranks)
        # Maps each id to its position among the ids that are sent.
        positions = tf.gather(tf.math.invert_permutation(order), positions)
        requested, requested_counts = hvd.alltoall(
            tf.gather(unique, order), counts, name=f"{name}_ids", **options
        )
    own = tf.gather(tf_variable(variable), requested // num_ranks)

    @tf.custom_gradient
    def exchange(own):
        received, _ = hvd.alltoall(own, requested_counts, name=name, **options)
        # Keeps the exchange in the graph: unused operations are pruned from some graphs and not
        # from others, but an Assert never is.
        tf.debugging.Assert(tf.size(received) >= 0, [name])

        def gradient(upstream):
            summed = tf.math.unsorted_segment_sum(upstream, positions, tf.size(unique))
            return hvd.alltoall(summed, counts, name=f"{name}_gradient", **options)[0]

        return tf.gather(received, positions), gradient

    return exchange(own)


@keras.saving.register_keras_serializable(package="hvtrain")
class ShardedEmbedding(ShardedRows, keras.layers.Embedding):
    """An Embedding whose rows are sharded over the ranks of a job.

    Use it like keras.layers.Embedding, in a model that all ranks build and call in the same way: its
    lookups are collective, in training, evaluation and prediction. With DistributedOptimizer the
    gradients of its rows are those of the global batch, without further messages; in a loop of your
    own, take them with a plain tf.GradientTape. Broadcasts and checks of equal weights skip its rows.
    The initial values of row r depend only on the seed, the layer's name and r, and so are the same
    on any number of ranks.

    Features that are looked up in the same call share its messages.

    Args:
        input_dim: number of rows; ids are 0 to input_dim - 1. Or a list with the number of rows of each
            of several tables, one for each position along the last axis of the ids.
        output_dim: number of values in a row.
        embeddings_initializer: "uniform", "normal", "truncated_normal", "zeros", "ones", or the Keras
            object of one of these.
        combiner: "sum" or "mean" of the rows over the last axis of the ids; None: one row for each id.
        mask_zero: True if id 0 is padding; with a combiner it adds nothing.
        seed: determines the initial rows.
        options: those of keras.layers.Embedding.

    Call arguments:
        inputs: integer ids, [..., ids] with a combiner.
        weights: one for each id, in the shape of `inputs`; needs a combiner. "mean" divides by their sum.

    Raises:
        ValueError: a regularizer, a constraint, LoRA or quantization, which need the whole table; ids
            that are not integers; more rows than fit into memory; an elastic job.
        tf.errors.InvalidArgumentError: ids that are out of range.

    Example:
        users = hvd.ShardedEmbedding(100_000_000, 64, name="users")(user_ids)
    """

    def __init__(
        self,
        input_dim: int | Sequence[int],
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        combiner: str | None = None,
        mask_zero: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        # Numbers of rows are often NumPy integers, which Keras could not save.
        sizes = [index(number) for number in np.ravel(input_dim)]
        super().__init__(
            sum(sizes), output_dim, embeddings_initializer, mask_zero=mask_zero, **options
        )
        if min(sizes, default=0) < 1:
            raise ValueError(
                f"input_dim={sizes} has no table, or a table without rows; give each table at least 1 row"
            )
        self.table_sizes = sizes
        if combiner not in (None, "sum", "mean"):
            raise ValueError(f'combiner={combiner!r} is not "sum", "mean" or None')
        self.combiner = combiner
        self._hvtrain_seed = seed

    def call(self, inputs: Any, weights: Any = None) -> Any:
        rows = super().call(self._joined_ids(inputs) if len(self.table_sizes) > 1 else inputs)
        if self.combiner is None:
            if weights is not None:
                raise ValueError(
                    f'table {self.name} got weights and has no combiner; pass combiner="sum" or "mean"'
                )
            return rows
        weights = (
            tf.ones_like(inputs, rows.dtype) if weights is None else tf.cast(weights, rows.dtype)
        )
        if self.mask_zero:
            weights *= tf.cast(tf.not_equal(inputs, 0), rows.dtype)
        combined = tf.reduce_sum(rows * weights[..., tf.newaxis], axis=-2)
        if self.combiner == "sum":
            return combined
        return tf.math.divide_no_nan(combined, tf.reduce_sum(weights, axis=-1, keepdims=True))

    def _joined_ids(self, inputs: Any) -> tf.Tensor:
        """Returns the ids' row numbers in all tables laid end to end."""
        sizes = self.table_sizes
        if inputs.shape[-1] != len(sizes):
            raise ValueError(
                f"table {self.name} got ids of shape {tuple(inputs.shape)}, and holds {len(sizes)} tables; give an id "
                "for each along the last axis"
            )
        columns = tf.unstack(tf.cast(inputs, tf.int64), axis=-1)
        names = [f"{self.name}[{number}]" for number in range(len(sizes))]
        checked = [check_ids(*column) for column in zip(columns, names, sizes)]
        return tf.stack(checked, axis=-1) + tf.constant(
            [*accumulate(sizes, initial=0)][:-1], tf.int64
        )

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return None if self.combiner else super().compute_mask(inputs, mask)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        leading = input_shape[:-1] if self.combiner else input_shape
        return (*leading, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        sizes = self.table_sizes if len(self.table_sizes) > 1 else self.input_dim
        own = {"input_dim": sizes, "combiner": self.combiner, "seed": self._hvtrain_seed}
        return super().get_config() | own


@contextmanager
def sharding_embeddings(is_chosen: Callable[[Any], bool], seed: int = 0) -> Iterator[None]:
    """Shards the chosen keras.layers.Embedding layers that are built inside this context.

    Keras still saves them as plain Embedding layers.

    Raises:
        ValueError: a chosen layer is of a subclass that may share its weights, such as
            ReversibleEmbedding.
    """
    embedding_class = keras.layers.Embedding
    build = embedding_class.build

    def build_sharded(layer, input_shape=None):
        if layer.built or isinstance(layer, ShardedRows) or not is_chosen(layer):
            build(layer, input_shape)
            return
        if type(layer) is not embedding_class:
            raise ValueError(
                f"layer {layer.name} is a {type(layer).__name__}, which may share its weights; leave it out of the "
                "tables that are sharded"
            )
        layer.__class__ = subclass_under_its_name(embedding_class, ShardedRows, _hvtrain_seed=seed)
        ShardedRows.build(layer, input_shape)

    embedding_class.build = build_sharded
    try:
        yield
    finally:
        embedding_class.build = build


@contextmanager
def whole_tables(model: keras.Model, folder: Path | None = None) -> Iterator[None]:
    """Gathers whole tables on rank 0 for the duration of the context (every rank).

    Rank 0 can then save the model, and call it without the others. The tables are memory-mapped
    files, so they take disk space rather than memory.

    Args:
        model: a built model.
        folder: where rank 0 has space for the files; None: the system's temporary folder.

    Raises:
        StorageError: on all ranks, if a file cannot be written.
    """
    layers = sharded_layers(model)
    try:
        for layer in layers:
            variable = layer._embeddings
            layer._hvtrain_whole = variable.rank_part.gather(variable, folder)
        yield
    finally:
        for layer in layers:
            layer._hvtrain_whole = None


def sharded_layers(model: keras.Model) -> list[Any]:
    """Returns the layers of a built model whose tables are sharded over several ranks."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, ShardedRows)]
    return [layer for layer in layers if layer.built and rows_of(layer._embeddings)]  # type: ignore[attr-defined]
