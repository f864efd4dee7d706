"""Features of a table: statistics of its columns in float64, and the Keras layers that hold them.

The layers are those of keras.utils.FeatureSpace, in its order. It would adapt each column by itself,
in float32 and in batches of 32 rows. A loaded table is encoded by NumPy, column by column, to the same
bits as by the layers: 100 columns of 50 names took 17 s of CPU time with one-hot layers, and 9 s so.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf
from scipy import stats

from hvtrain.data.formats.columns import Cells, Column, with_progress
from hvtrain.data.formats.schema import Schema
from hvtrain.data.formats.table_phrases import odd_texts
from hvtrain.errors import ConfigError, DataError

FILLING = ("median", "most_frequent", "indicator")
"""Treatments of gaps that put something in their place."""
NUM_BINS = 32
"""Of float_discretized, as in FeatureSpace."""
CROSS_BINS = 32
"""Of crosses, as in FeatureSpace."""
WIDE_RATIO = 64
"""Numbers that are so many standard deviations large lose more than six bits in float32."""
MAX_INPUTS = 200
"""More columns of numbers are one input of the model: Keras takes 5 ms for each input, and once more
for each copy of the model."""
LINE_FEATURES = 16
"""Features that are written together: of a row, they are one line of the processor's cache."""
NUMBERS = "numbers"
# Not Keras's [UNK]: no name that a table may have.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# Names that Keras gives to what stands beside the inputs in a model.
TAKEN = re.compile(r"(features|where|isnan|take|cast|logical_not|layer|mlp|numbers)(_\d+)?$")


def fit(column: Column, cells: Cells, rows: np.ndarray) -> Column:
    """Returns the column with the statistics of its training rows, by number."""
    if column.is_category:
        return _fit_categories(column, cells.values.take(pa.array(rows)))

    numbers = np.asarray(cells.values[rows], np.float64)
    if column.missing in FILLING:
        fill = _fill(numbers, column.missing)
        numbers = np.where(np.isnan(numbers), fill, numbers)
        column = replace(column, fill=fill.tolist())

    # Of a constant the mean can be rounded; a new value is then as far from it as it is.
    lowest = numbers.min(axis=0)
    highest = numbers.max(axis=0)
    is_constant = lowest == highest
    mean = np.where(is_constant, lowest, numbers.mean(axis=0))
    variance = np.where(is_constant, 0.0, numbers.var(axis=0))
    is_wide = ~is_constant & (np.maximum(-lowest, highest) > WIDE_RATIO * np.sqrt(variance))
    column = replace(column, is_wide=bool(is_wide.any()))
    if column.feature == "float_normalized":
        return replace(column, mean=mean.tolist(), variance=variance.tolist())
    if column.feature == "float_discretized":
        bounds = np.quantile(numbers, np.linspace(0, 1, NUM_BINS + 1)[1:-1])
        return replace(column, bins=np.unique(bounds).tolist())
    return column


def _fill(numbers: np.ndarray, missing: str) -> np.ndarray:
    known = numbers[~np.isnan(numbers).any(axis=1)]
    if not len(known):
        return np.zeros(numbers.shape[1])
    if missing == "most_frequent":
        return stats.mode(known).mode
    return np.median(known, axis=0)


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
    elif column.missing in FILLING:
        fill = ordered[:1]
    return replace(column, fill=fill, names=ordered)


def filled(column: Column, cells: Cells, where: str, rows: np.ndarray | None = None) -> Any:
    """Returns the cells without gaps; those of numbers stay NaN, which the model fills.

    Args:
        column: fitted.
        cells: of the column.
        where: the file, which begins the message.
        rows: that are used, by number; None: all.

    Raises:
        DataError: There are gaps, and nothing to fill them with.
    """
    is_gap = cells.is_gap
    # Nobody looks at the rows that are left out.
    if not is_gap.any() or (rows is not None and not is_gap[rows].any()):
        return cells.values
    if not len(column.fill):
        raise refused_gaps(column, cells, where)
    return pc.fill_null(cells.values, column.fill[0]) if column.is_category else cells.values


def refused_gaps(column: Column, cells: Cells, where: str) -> DataError:
    """Describes gaps that nothing fills."""
    is_gap = cells.is_gap
    examples = ", ".join(odd_texts(cells))
    odd = f", among them {examples}" if examples else ""
    return DataError(
        f"{where}: row {np.argmax(is_gap)} has no {column.source} (rows without it: {is_gap.sum()}{odd}); fill or drop "
        "them, or train with dataset.missing=median, most_frequent, indicator or drop"
    )


class TableFeatures:
    """Turns the columns of a fitted schema into features, float32 [rows, features]."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        # Sorted, as FeatureSpace has them.
        self.columns = sorted(schema.columns, key=lambda column: column.name)
        self._numbers = [column for column in self.columns if not column.is_looked_up]
        self.has_block = len(self._numbers) > MAX_INPUTS
        self._types = {column.name: _type(column) for column in self.columns}
        if self.has_block and any(column.is_wide for column in self._numbers):
            # One input has one type.
            self._types |= {column.name: "float64" for column in self._numbers}
        self.inputs = dict(sorted(self._named_inputs()))

        self._layer_numbers = itertools.count()
        self._lookups = {column.name: self._lookup(column) for column in self.columns if column.is_looked_up}
        self._crosses = {
            pair: self._layer(keras.layers.HashedCrossing, num_bins=CROSS_BINS)
            for pair in sorted(map(tuple, schema.crosses), key="_X_".join)
        }
        sizes: dict[Any, int] = {column.name: self._num_features(column) for column in self.columns}
        self.category_sizes = [sizes[name] for name in self._lookups]
        if schema.has_ids and not (self._numbers and self._lookups):
            raise ConfigError("dataset.category_ids needs columns of numbers and of names; leave it out")
        sizes |= dict.fromkeys(self._crosses, CROSS_BINS)
        self.size = sum(sizes.values())
        # Which features are those of a column, by its name, or of a cross.
        stops = itertools.accumulate(sizes.values())
        self._spans = {name: range(stop - sizes[name], stop) for name, stop in zip(sizes, stops)}
        self._model: keras.Model | None = None

    def _layer(self, kind: Any, **options: Any) -> Any:
        # Keras's own names could be those of columns.
        return kind(name=f"layer_{next(self._layer_numbers)}", **options)

    def _lookup(self, column: Column) -> Any:
        """Returns a layer from cells to the numbers of their categories."""
        if column.bins:
            return self._layer(keras.layers.Discretization, bin_boundaries=list(column.bins))
        if column.feature == "string_hashed":
            # An id of its own for gaps; one-hot features have none.
            mask = "" if self.schema.has_ids else None
            return self._layer(keras.layers.Hashing, num_bins=self._num_features(column), mask_value=mask)
        if column.kind == "name":
            return self._layer(keras.layers.StringLookup, vocabulary=list(column.names), oov_token=UNKNOWN)
        # Keras takes -1 for unknown integers, which may be a category.
        unknown = min(column.names, default=0) - 1
        return self._layer(keras.layers.IntegerLookup, vocabulary=list(column.names), oov_token=unknown)

    def _num_features(self, column: Column) -> int:
        if column.bins:
            return len(column.bins) + 1
        if column.feature == "string_hashed":
            return self.schema.hash_buckets + self.schema.has_ids
        if column.is_category:
            # Those that training did not have share the first number.
            return len(column.names) + 1
        return column.length * (2 if column.missing == "indicator" else 1)

    def _first_ids(self) -> np.ndarray:
        """Where each column's ids begin in the space of all."""
        return np.cumsum([0, *self.category_sizes])[:-1]

    def _named_inputs(self) -> Iterator[tuple[str, Sequence[Column]]]:
        """Names of the model's inputs, with their columns. Keras takes no / in them."""
        if self.has_block:
            yield NUMBERS, self._numbers
        names: set[str] = set()
        for column in self.columns:
            if self.has_block and not column.is_looked_up:
                continue
            name = column.name.replace("/", "_")
            while name in names or TAKEN.match(name):
                name += "_"
            names.add(name)
            yield name, [column]

    def spec(self) -> dict[str, tf.TensorSpec]:
        """One example as the model takes it, by the names of its inputs."""
        spec = {}
        for name, columns in self.inputs.items():
            length = sum(column.length for column in columns)
            spec[name] = tf.TensorSpec((length,), self._types[columns[0].name], name)
        return spec

    def raw(self, values: Mapping[str, Any], rows: np.ndarray) -> dict[str, np.ndarray]:
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
                numbers = [values[column.name][rows] for column in columns]
                raw[name] = np.concatenate(numbers, axis=1, dtype=self._types[columns[0].name])
        return raw

    def encode(self, values: Mapping[str, Any], rows: np.ndarray, where: str) -> Any:
        """Returns the features of some rows; see raw(). `where` is the table, for lines of progress."""
        if self.schema.has_ids:
            numbers = [self._encoded(column, values, rows) for column in self._numbers]
            codes = [self._codes(column, values, rows) for column in self.columns if column.is_looked_up]
            ids = np.concatenate(codes, axis=1) + self._first_ids()
            return {"numbers": np.concatenate(numbers, axis=1, dtype=np.float32), "categories": ids.astype(np.int32)}
        features = np.empty((len(rows), self.size), np.float32)
        columns = with_progress(self.columns, f"{where}: features")
        for _, group in itertools.groupby(columns, lambda column: self._spans[column.name].start // LINE_FEATURES):
            pieces = {column.name: self._encoded(column, values, rows) for column in group}
            start = self._spans[next(iter(pieces))].start
            block = np.concatenate([*pieces.values()], axis=1, dtype=np.float32)
            features[:, start : start + block.shape[1]] = block
        by_name = {column.name: column for column in self.columns}
        for pair, crossing in self._crosses.items():
            codes = crossing([self._codes(by_name[name], values, rows) for name in pair])
            span = self._spans[pair]
            features[:, span.start : span.stop] = _one_hot(codes.numpy(), len(span))
        return features

    def _encoded(self, column: Column, values: Mapping[str, Any], rows: np.ndarray) -> np.ndarray:
        """Returns the features of a column; beside normalized numbers where gaps were, if they are flagged."""
        if column.is_looked_up:
            return _one_hot(self._codes(column, values, rows), len(self._spans[column.name]))
        dtype = self._types[column.name]
        numbers = values[column.name][rows].astype(dtype)
        is_gap = np.isnan(numbers)
        if column.fill:
            numbers = np.where(is_gap, np.asarray(column.fill, dtype), numbers)
        if column.feature == "float_log":
            numbers = np.log1p(np.maximum(numbers, 0))
        # The layer's configuration is in float32, whatever its type.
        mean, variance = _statistics(column).astype(np.float32).astype(dtype)
        numbers = (numbers - mean) / np.maximum(np.sqrt(variance), keras.config.epsilon())
        if column.missing == "indicator":
            return np.concatenate([numbers, is_gap], axis=1)
        return numbers

    def _codes(self, column: Column, values: Mapping[str, Any], rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of categories, int64 [rows, 1]."""
        cells = values[column.name]
        if not column.is_category:
            return self._look_up(column, tf.constant(cells[rows].astype(self._types[column.name]))).numpy()
        # Each category is looked up once.
        encoded = cells.take(pa.array(rows)).dictionary_encode()
        distinct = encoded.dictionary.to_numpy(zero_copy_only=False)
        numbers = self._look_up(column, tf.constant(distinct[:, np.newaxis])).numpy()
        return numbers[encoded.indices.to_numpy()]

    def _look_up(self, column: Column, cells: Any) -> Any:
        if column.bins and column.fill:
            fill = np.asarray(column.fill, self._types[column.name])
            cells = keras.ops.where(keras.ops.isnan(cells), fill, cells)
        return self._lookups[column.name](cells)

    def model(self) -> keras.Model:
        """Keras's own layers alone, from the inputs by name to features."""
        if self._model is None:
            inputs = {}
            for name, spec in self.spec().items():
                inputs[name] = keras.Input(tuple(spec.shape), dtype=spec.dtype.name, name=name)
            self._model = keras.Model(inputs, self._features(inputs), name="features")
        return self._model

    def _features(self, inputs: Mapping[str, Any]) -> Any:
        # Parts of the features, and which features are in them.
        pieces: list[tuple[Any, Sequence[int]]] = []
        codes: dict[Any, Any] = {}
        for name, columns in self.inputs.items():
            if columns[0].is_looked_up:
                codes[columns[0].name] = self._look_up(columns[0], inputs[name])
            else:
                pieces += self._normalized(inputs[name], columns)
        for pair, crossing in self._crosses.items():
            codes[pair] = crossing([codes[name] for name in pair])
        ids = [] if not self.schema.has_ids else [codes.pop(name) for name in self._lookups]
        for name, numbers in codes.items():
            span = self._spans[name]
            one_hot = {"output_mode": "multi_hot", "dtype": "float32"}
            encoder = self._layer(keras.layers.CategoryEncoding, num_tokens=len(span), **one_hot)
            pieces.append((encoder(numbers), span))

        pieces.sort(key=lambda piece: piece[1][0])
        features = pieces[0][0]
        if len(pieces) > 1:
            features = self._layer(keras.layers.Concatenate)([piece for piece, _ in pieces])
        places = [index for _, indices in pieces for index in indices]
        if places != sorted(places):
            # Columns of other kinds stand between those of a single input.
            features = keras.ops.take(features, np.argsort(places), axis=-1)
        if not ids:
            return features
        categories = keras.ops.concatenate(ids, axis=1) + self._first_ids()
        return {"numbers": features, "categories": keras.ops.cast(categories, "int32")}

    def _normalized(self, numbers: Any, columns: Sequence[Column]) -> Iterator[tuple[Any, Sequence[int]]]:
        """Yields normalized numbers of columns that are one input, then where they had gaps."""
        ops = keras.ops
        dtype = self._types[columns[0].name]
        owners = [column for column in columns for _ in range(column.length)]
        places = [index for column in columns for index in self._spans[column.name][: column.length]]
        fill = [value for column in columns for value in column.fill or [np.nan] * column.length]
        is_gap = None
        if not np.isnan(fill).all():
            is_gap = ops.isnan(numbers)
            numbers = ops.where(is_gap, np.asarray([fill], dtype), numbers)
        is_log = np.array([[column.feature == "float_log" for column in owners]])
        if is_log.any():
            numbers = ops.where(is_log, ops.log1p(ops.maximum(numbers, 0)), numbers)
        mean, variance = np.concatenate([_statistics(column) for column in columns], axis=1).tolist()
        numbers = self._layer(keras.layers.Normalization, mean=mean, variance=variance, dtype=dtype)(numbers)
        yield ops.cast(numbers, "float32"), places

        flagged = [index for index, column in enumerate(owners) if column.missing == "indicator"]
        if flagged:
            flags = ops.cast(ops.take(is_gap, np.asarray(flagged), axis=-1), "float32")
            yield flags, [places[index] + owners[index].length for index in flagged]


def _one_hot(codes: np.ndarray, num_codes: int) -> np.ndarray:
    one_hot = np.zeros((len(codes), num_codes), bool)
    np.put_along_axis(one_hot, codes, True, axis=1)
    return one_hot


def _type(column: Column) -> str:
    """Returns the type of the model's input."""
    if column.is_category:
        return "string" if column.kind == "name" else "int64"
    return "float64" if column.is_wide else "float32"


def _statistics(column: Column) -> np.ndarray:
    """Returns the mean and variance that normalize numbers, [2, length]."""
    if not column.mean:
        # The feature "float" stays as it is.
        return np.repeat([[0.0], [1.0]], column.length, axis=1)
    # Constants are moved to 0, and a new value is as far from it as from them.
    return np.array([column.mean, np.where(column.variance, column.variance, 1.0)])
