"""Features of a table: statistics of its columns in float64, and the Keras layers that hold them.

The layers are those of keras.utils.FeatureSpace, in its order. It would adapt each column by itself,
in float32 and in batches of 32 rows.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from hvtrain.data.formats.columns import Cells, Column
from hvtrain.errors import DataError

NUM_BINS = 32
"""Of float_discretized, as in FeatureSpace."""
CROSS_BINS = 32
"""Of crosses, as in FeatureSpace."""
HASH_BINS = 1000
WIDE_RATIO = 64
"""Numbers that are so many standard deviations large lose more than six bits in float32."""
MAX_INPUTS = 200
"""More columns of numbers are one input of the model: Keras takes 5 ms for each input, and once more
for each copy of the model."""
BLOCK_BYTES = 2**26
NUMBERS = "numbers"
# Not Keras's [UNK]: no name that a table may have.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# Names that Keras gives to what stands beside the inputs in a model.
TAKEN = re.compile(r"(features|where|isnan|take|cast|logical_not|layer|mlp|numbers)(_\d+)?$")


def fit(column: Column, cells: Cells) -> Column:
    """Returns the column with the statistics of its training rows."""
    if column.is_category:
        return _fit_categories(column, cells.values)

    numbers = np.asarray(cells.values, np.float64)
    fill: list[float] = []
    if column.missing in ("median", "most_frequent", "indicator"):
        known = numbers[~cells.is_gap]
        if not len(known):
            known = np.zeros((1, column.length))
        fill = np.median(known, axis=0).tolist()
        if column.missing == "most_frequent":
            fill = _most_frequent(known)
        numbers = np.where(np.isnan(numbers), fill, numbers)

    # Of a constant the mean can be rounded; a new value is then as far from it as it is.
    is_constant = numbers.min(axis=0) == numbers.max(axis=0)
    mean = np.where(is_constant, numbers[0], numbers.mean(axis=0))
    variance = np.where(is_constant, 1.0, numbers.var(axis=0))
    is_wide = ~is_constant & (np.abs(numbers).max(axis=0) > WIDE_RATIO * np.sqrt(variance))
    column = replace(column, fill=fill, is_wide=bool(is_wide.any()))
    if column.feature == "float_normalized":
        return replace(column, mean=mean.tolist(), variance=variance.tolist())
    if column.feature == "float_discretized":
        bounds = np.quantile(numbers, np.linspace(0, 1, NUM_BINS + 1)[1:-1])
        return replace(column, bins=np.unique(bounds).tolist())
    return column


def _most_frequent(numbers: np.ndarray) -> list[float]:
    fill = []
    for values in numbers.T:
        distinct, counts = np.unique(values, return_counts=True)
        fill.append(float(distinct[counts.argmax()]))
    return fill


def _fit_categories(column: Column, values: pa.Array) -> Column:
    counted = pc.value_counts(values.drop_null())
    names = counted.field("values").to_pylist()
    counts = counted.field("counts").to_numpy()
    # As Keras orders a vocabulary: the most frequent first, and of equal ones the last by name.
    order = np.lexsort((np.array(names), counts))[::-1]
    ordered = [names[index] for index in order]
    fill: list[Any] = []
    if column.missing == "indicator":
        # A gap is a category like the others.
        fill = [""]
        ordered.append("")
    elif column.missing in ("median", "most_frequent"):
        fill = ordered[:1]
    return replace(column, fill=fill, names=ordered)


def filled(column: Column, cells: Cells, where: str, rows: np.ndarray | None = None) -> Any:
    """Returns the cells without gaps; those of numbers stay NaN, which the model fills.

    Args:
        column: fitted.
        cells: of the column.
        where: the file, which begins the message.
        rows: that are used; None: all.

    Raises:
        DataError: There are gaps, and nothing to fill them with.
    """
    if not cells.is_gap.any():
        return cells.values
    is_used = rows is None or cells.is_gap[rows].any()
    if is_used and not len(column.fill):
        raise refused_gaps(column, cells, where)
    if not column.is_category:
        return cells.values
    if is_used:
        return pc.fill_null(cells.values, column.fill[0])
    # Nobody looks at the rows that are left out.
    return pc.fill_null(cells.values, pa.scalar("0").cast(cells.values.type))


def refused_gaps(column: Column, cells: Cells, where: str) -> DataError:
    """Describes gaps that nothing fills."""
    row = int(np.argmax(cells.is_gap))
    count = int(cells.is_gap.sum())
    examples = ", ".join(repr(text) for text in cells.odd[:3])
    odd = f", among them {examples}" if examples else ""
    return DataError(
        f"{where}: row {row} has no {column.source} (rows without it: {count}{odd}); fill or drop them, or train with "
        "dataset.missing=median, most_frequent, indicator or drop"
    )


class TableFeatures:
    """Turns columns into features, float32 [rows, features].

    Args:
        columns: fitted.
        crosses: pairs of categories whose combinations are features too.
    """

    def __init__(self, columns: Sequence[Column], crosses: Sequence[tuple[str, ...]] = ()) -> None:
        # Sorted, as FeatureSpace has them.
        self.columns = sorted(columns, key=lambda column: column.name)
        self._crosses = sorted(crosses, key="_X_".join)
        self._numbers = [column for column in self.columns if not _is_looked_up(column)]
        self.has_block = len(self._numbers) > MAX_INPUTS
        is_wide = self.has_block and any(column.is_wide for column in self._numbers)
        self._groups: dict[str, list[Column]] = {"float32": [], "float64": []}
        for column in self._numbers:
            self._groups["float64" if is_wide or column.is_wide else "float32"].append(column)

        self._layer_numbers = itertools.count()
        self._lookups = {column.name: self._lookup(column) for column in self.columns if _is_looked_up(column)}
        self._encoders = {
            column.name: self._one_hot(_num_categories(column))
            for column in self.columns
            if column.name in self._lookups
        }
        self._normalizations = {dtype: self._normalization(dtype) for dtype in self._groups}
        self._crossings = [self._layer(keras.layers.HashedCrossing, num_bins=CROSS_BINS) for _ in self._crosses]
        self._cross_encoders = [self._one_hot(CROSS_BINS) for _ in self._crosses]

        self.inputs = dict(sorted(self._named_inputs()))
        self.size = sum(map(_num_features, self.columns)) + CROSS_BINS * len(self._crosses)
        self._model: keras.Model | None = None

    def _layer(self, kind: Any, **options: Any) -> Any:
        # Keras's own names could be those of columns.
        return kind(name=f"layer_{next(self._layer_numbers)}", **options)

    def _one_hot(self, num_tokens: int) -> Any:
        return self._layer(
            keras.layers.CategoryEncoding,
            num_tokens=num_tokens,
            output_mode="multi_hot",
            dtype="float32",
        )

    def _lookup(self, column: Column) -> Any:
        """Returns a layer from cells to the numbers of their categories."""
        if column.bins:
            return self._layer(keras.layers.Discretization, bin_boundaries=list(column.bins))
        if column.feature == "string_hashed":
            return self._layer(keras.layers.Hashing, num_bins=HASH_BINS)
        if column.kind == "name":
            return self._layer(keras.layers.StringLookup, vocabulary=list(column.names), oov_token=UNKNOWN)
        # Keras takes -1 for unknown integers, which may be a category.
        unknown = min(column.names, default=0) - 1
        return self._layer(keras.layers.IntegerLookup, vocabulary=list(column.names), oov_token=unknown)

    def _normalization(self, dtype: str) -> Any:
        columns = self._groups[dtype]
        if not columns:
            return None
        # The feature "float" stays as it is.
        mean = [value for column in columns for value in column.mean or [0.0] * column.length]
        variance = [value for column in columns for value in column.variance or [1.0] * column.length]
        return self._layer(keras.layers.Normalization, mean=mean, variance=variance, dtype=dtype)

    def _named_inputs(self) -> Iterator[tuple[str, list[Column]]]:
        """Names of the model's inputs, with their columns. Keras takes no / in them."""
        if self.has_block:
            yield NUMBERS, self._numbers
        names: set[str] = set()
        for column in self.columns:
            if self.has_block and column.name not in self._lookups:
                continue
            name = column.name.replace("/", "_")
            while name in names or TAKEN.match(name):
                name += "_"
            names.add(name)
            yield name, [column]

    def dtype(self, columns: Sequence[Column]) -> str:
        """The type of an input that has these columns."""
        if columns[0].is_category:
            return "string" if columns[0].kind == "name" else "int64"
        return "float64" if any(column.is_wide for column in columns) else "float32"

    def spec(self) -> dict[str, tf.TensorSpec]:
        """One example as the model takes it, by the names of its inputs."""
        spec = {}
        for name, columns in self.inputs.items():
            length = sum(column.length for column in columns)
            spec[name] = tf.TensorSpec((length,), self.dtype(columns), name)
        return spec

    def raw(self, values: Mapping[str, Any], rows: Any) -> dict[str, np.ndarray]:
        """Returns some rows as the model takes them.

        Args:
            values: of all columns by name, as Cells has them.
            rows: numbers of rows, int64.
        """
        raw = {}
        for name, columns in self.inputs.items():
            if columns[0].is_category:
                raw[name] = values[columns[0].name].take(pa.array(rows)).to_numpy(zero_copy_only=False)[:, np.newaxis]
            else:
                raw[name] = _stack(values, columns, rows, self.dtype(columns))
        return raw

    def model(self) -> keras.Model:
        """Keras's own layers alone, from the inputs by name to features."""
        if self._model is not None:
            return self._model
        inputs = {}
        for name, spec in self.spec().items():
            inputs[name] = keras.Input(tuple(spec.shape), dtype=spec.dtype.name, name=name)
        by_column = {columns[0].name: inputs[name] for name, columns in self.inputs.items()}
        blocks = {}
        for dtype, columns in self._groups.items():
            if self.has_block:
                blocks[dtype] = inputs[NUMBERS]
            elif columns:
                blocks[dtype] = self._joined([by_column[column.name] for column in columns], dtype)

        numbers = {}
        for column in self.columns:
            if column.name in self._lookups:
                numbers[column.name] = self._look_up(column, by_column[column.name])
        self._model = keras.Model(inputs, self._features(blocks, numbers), name="features")
        return self._model

    def encode(self, values: Mapping[str, Any], rows: np.ndarray, on_rows: Callable[[int], None]) -> np.ndarray:
        """Returns the features of some rows, by the layers of the model.

        Args:
            values: of all columns by name, as Cells has them.
            rows: numbers of rows, int64.
            on_rows: called with the number of rows that are done, after each block.
        """
        numbers = {}
        for column in self.columns:
            if column.name in self._lookups:
                numbers[column.name] = self._look_up_all(column, values[column.name])

        features = np.empty((len(rows), self.size), np.float32)
        # In blocks: the columns of a large table are not in memory twice.
        block_rows = max(1, BLOCK_BYTES // (8 * self.size))
        for start in range(0, len(rows), block_rows):
            block = rows[start : start + block_rows]
            blocks = {}
            for dtype, columns in self._groups.items():
                if columns:
                    blocks[dtype] = tf.constant(_stack(values, columns, block, dtype))
            some = {name: tf.constant(array[block]) for name, array in numbers.items()}
            features[start : start + len(block)] = self._features(blocks, some).numpy()
            on_rows(start + len(block))
        return features

    def _look_up(self, column: Column, cells: Any) -> Any:
        if column.bins and len(column.fill):
            fill = np.asarray(column.fill, self.dtype([column]))
            cells = keras.ops.where(keras.ops.isnan(cells), fill, cells)
        return self._lookups[column.name](cells)

    def _look_up_all(self, column: Column, values: Any) -> np.ndarray:
        """Returns the numbers of categories, int64 [rows, 1]."""
        if not column.is_category:
            dtype = "float64" if column.is_wide else "float32"
            return self._look_up(column, tf.constant(values.astype(dtype))).numpy()
        # Each category is looked up once.
        encoded = values.dictionary_encode()
        distinct = encoded.dictionary.to_numpy(zero_copy_only=False)
        numbers = self._look_up(column, tf.constant(distinct[:, np.newaxis])).numpy()
        return numbers[encoded.indices.to_numpy()]

    def _features(self, blocks: Mapping[str, Any], numbers: Mapping[str, Any]) -> Any:
        """Joins features in the order of the columns; on arrays, and on Keras's symbolic tensors.

        Args:
            blocks: columns of numbers side by side, by type.
            numbers: of categories, by column.
        """
        ops = keras.ops
        pieces = []
        # Names of the columns, or of crosses after them, for each feature of the pieces.
        owners: list[tuple[int, str]] = []
        for dtype, columns in self._groups.items():
            if not columns:
                continue
            block = blocks[dtype]
            lengths = [(0, column.name) for column in columns for _ in range(column.length)]
            fill = [value for column in columns for value in column.fill or [np.nan] * column.length]
            is_gap = None
            if not np.isnan(fill).all():
                is_gap = ops.isnan(block)
                block = ops.where(is_gap, np.asarray([fill], dtype), block)
            pieces.append(ops.cast(self._normalizations[dtype](block), "float32"))
            owners += lengths
            flagged = {column.name for column in columns if column.missing == "indicator"}
            positions = [index for index, (_, name) in enumerate(lengths) if name in flagged]
            if positions:
                pieces.append(ops.cast(ops.take(is_gap, np.asarray(positions), axis=-1), "float32"))
                owners += [lengths[index] for index in positions]

        for name, cells in numbers.items():
            pieces.append(self._encoders[name](cells))
            owners += [(0, name)] * pieces[-1].shape[-1]
        for pair, crossing, encoder in zip(self._crosses, self._crossings, self._cross_encoders):
            pieces.append(encoder(crossing([numbers[name] for name in pair])))
            owners += [(1, "_X_".join(pair))] * CROSS_BINS

        features = self._joined(pieces, "float32")
        order = sorted(range(len(owners)), key=owners.__getitem__)
        if order == list(range(len(owners))):
            return features
        return ops.take(features, np.asarray(order), axis=-1)

    def _joined(self, pieces: Sequence[Any], dtype: str) -> Any:
        if len(pieces) == 1:
            return pieces[0]
        return self._layer(keras.layers.Concatenate, dtype=dtype)(pieces)


def _is_looked_up(column: Column) -> bool:
    return column.is_category or bool(column.bins)


def _num_categories(column: Column) -> int:
    if column.bins:
        return len(column.bins) + 1
    # Those that training did not have share the first number.
    return HASH_BINS if column.feature == "string_hashed" else len(column.names) + 1


def _num_features(column: Column) -> int:
    if _is_looked_up(column):
        return _num_categories(column)
    return column.length * (2 if column.missing == "indicator" else 1)


def _stack(values: Mapping[str, Any], columns: Sequence[Column], rows: Any, dtype: str) -> np.ndarray:
    return np.concatenate([values[column.name][rows].astype(dtype, copy=False) for column in columns], axis=1)
