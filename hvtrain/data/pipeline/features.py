"""Turns the columns of a table into features, with statistics in float64 and Keras layers that hold them.

The layers are those of keras.utils.FeatureSpace, in its order. FeatureSpace itself would adapt each
column separately, in float32 and in batches of 32 rows. The same layers encode a loaded table, part
by part: 100,000 rows with 100 columns of 50 names take 6.8 s of CPU time (2 busy cores, 2026-11-27).
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf
from scipy import stats
from tensorflow import TensorSpec, nest

from hvtrain.data.formats.columns import Cells, Column, with_progress
from hvtrain.data.formats.schema import Schema
from hvtrain.data.formats.table_phrases import odd_texts
from hvtrain.data.source import symbolic
from hvtrain.errors import ConfigError, DataError

# The values of `missing` that fill gaps.
FILLING = ("median", "most_frequent", "indicator")
# Bins of float_discretized, as in FeatureSpace.
NUM_BINS = 32
# Numbers larger than this many standard deviations lose more than six bits in float32.
WIDE_RATIO = 64
# If there are more columns of numbers than this, they share one input of the model: Keras takes 5
# ms for each input, and again for each copy of the model.
MAX_INPUTS = 200
# Number of feature values that one call computes from a loaded table: 128 MB, and as much again for each layer.
ENCODED_AT_ONCE = 2**25
NUMBERS = "numbers"
# The token for unknown names. Keras's default, [UNK], could be a name in a table.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# Names that Keras gives to parts of a model other than its inputs.
RESERVED_NAMES = re.compile(
    r"(features|where|isnan|take|cast|maximum|log1p|concatenate|add|subtract|true_divide|discretization|hashing"
    r"|string_lookup|integer_lookup|category_encoding|search_sorted|reshape|mlp|numbers)(_\d+)?$"
)


def fit(column: Column, cells: Cells, rows: np.ndarray) -> Column:
    """Returns the column with statistics of its training rows, whose indices are `rows`.

    Raises DataError if all of them have gaps.
    """
    if cells.is_gap[rows].all():
        raise DataError(
            f"the column {column.source} has a gap in every training row; add it to dataset.drop"
        )
    if column.is_category:
        return _fit_categories(column, cells.values.take(pa.array(rows)))

    numbers = np.asarray(cells.values[rows], np.float64)
    if column.missing in FILLING:
        fill = _fill_values(numbers, column.missing)
        numbers = np.where(np.isnan(numbers), fill, numbers)
        column = replace(column, fill=fill.tolist())

    # The computed mean of a constant column may be rounded. With the constant
    # itself, new values keep their exact distance from it.
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


def _fill_values(numbers: np.ndarray, missing: str) -> np.ndarray:
    known = numbers[~np.isnan(numbers).any(axis=1)]
    if missing == "most_frequent":
        return stats.mode(known).mode
    return np.median(known, axis=0)


def _fit_categories(column: Column, values: pa.Array) -> Column:
    counted = pc.value_counts(values.drop_null())
    names = counted.field("values").to_pylist()
    counts = counted.field("counts").to_pylist()
    # Keras's order of a vocabulary: the most frequent first, and equally frequent ones by name,
    # descending. NumPy is not used to sort: its arrays give each name as much space as the longest.
    ordered = [name for _, name in sorted(zip(counts, names), reverse=True)]
    fill = []
    if column.missing == "indicator":
        # Gaps form a category of their own.
        fill = [""]
        ordered.append("")
    elif column.missing in FILLING:
        fill = ordered[:1]
    return replace(column, fill=fill, names=ordered)


def fill_gaps(column: Column, cells: Cells, location: str, rows: Any = slice(None)) -> Any:
    """Returns the cells with their gaps filled; gaps in numbers stay NaN, and the model fills them.

    Args:
        column: The fitted column.
        cells: Its cells.
        location: The file, for messages.
        rows: Indices of the rows that are used; by default all.

    Raises:
        DataError: There are gaps, and nothing to fill them with.
    """
    # Gaps in rows that are left out do not matter.
    if not cells.is_gap[rows].any():
        return cells.values
    if not column.fill:
        raise gap_error(column, cells, location, rows)
    return pc.fill_null(cells.values, column.fill[0]) if column.is_category else cells.values


def gap_error(column: Column, cells: Cells, location: str, rows: Any = slice(None)) -> DataError:
    """Makes the error about gaps in the given rows that nothing fills."""
    is_gap = np.zeros_like(cells.is_gap)
    is_gap[rows] = cells.is_gap[rows]
    odd = f"; unreadable cells: {odd_texts(cells)}" if cells.odd else ""
    return DataError(
        f"{location}: row {np.argmax(is_gap)} has no {column.source} (rows without it: {is_gap.sum()}{odd}); fill or "
        "drop them, or train with dataset.missing=median, most_frequent, indicator or drop (each of which drops rows "
        "without a target)"
    )


class TableFeatures:
    """Turns the columns of a fitted schema into features, float32 [rows, features].

    With category ids, the features are {"numbers": float32 [rows, n], "categories": int32 [rows, m]}.

    Raises:
        ConfigError: The schema has category ids, but no columns of numbers, or none of categories.
    """

    def __init__(self, schema: Schema) -> None:
        # Sorted by name, as in FeatureSpace. self.schema keeps this order, which the shared input
        # follows.
        self.columns = sorted(schema.columns, key=lambda column: column.name)
        self.schema = replace(schema, columns=self.columns)
        self._numbers = [column for column in self.columns if not column.is_looked_up]
        self.has_shared_input = len(self._numbers) > MAX_INPUTS
        self._types = {column.name: _type(column) for column in self.columns}
        if self.has_shared_input and any(column.is_wide for column in self._numbers):
            # All columns of one input have the same type.
            self._types |= {column.name: "float64" for column in self._numbers}
        self.inputs = dict(sorted(self._named_inputs()))

        self._lookups: dict[str, Any] = {}
        sizes = {}
        for column in self.columns:
            if column.is_looked_up:
                self._lookups[column.name], sizes[column.name] = self._lookup(column)
            else:
                sizes[column.name] = column.length * (2 if column.missing == "indicator" else 1)
        self.category_sizes = [sizes[name] for name in self._lookups]
        if schema.has_ids and not (self._numbers and self._lookups):
            present = "numbers" if self._numbers else "categories"
            raise ConfigError(
                f"dataset.category_ids needs columns of numbers and of categories, but the table has only {present}; "
                "leave it out"
            )
        # Each column's indices among the features.
        stops = itertools.accumulate(sizes.values())
        self._spans = {name: range(stop - sizes[name], stop) for name, stop in zip(sizes, stops)}

    def _lookup(self, column: Column) -> tuple[Any, int]:
        """Returns a layer that maps cells to category indices, and the number of categories."""
        if column.bins:
            num_bins = len(column.bins) + 1
            if column.is_wide:
                return partial(_exact_bins, np.array(column.bins)), num_bins
            # In a graph, a mixed precision's policy would round the cells first.
            return keras.layers.Discretization(column.bins, dtype="float32"), num_bins
        if column.feature == "string_hashed":
            # Gaps have an id of their own, but no one-hot feature.
            mask = "" if self.schema.has_ids else None
            num_bins = self.schema.hash_buckets + self.schema.has_ids
            return keras.layers.Hashing(num_bins=num_bins, mask_value=mask), num_bins

        # Categories that did not occur in training share the first index.
        num_categories = len(column.names) + 1
        layer_class = keras.layers.StringLookup
        unknown: Any = UNKNOWN
        if column.kind == "integer":
            layer_class = keras.layers.IntegerLookup
            # Keras's default for unknown integers, -1, may be a category.
            unknown = min(column.names, default=0) - 1
        return layer_class(vocabulary=column.names, oov_token=unknown), num_categories

    def _named_inputs(self) -> Iterator[tuple[str, Sequence[Column]]]:
        """Yields the names of the model's inputs, each with its columns. Keras allows no / in names."""
        if self.has_shared_input:
            yield NUMBERS, self._numbers
        names = set()
        for column in self.columns:
            if self.has_shared_input and not column.is_looked_up:
                continue
            name = column.name.replace("/", "_")
            while name in names or RESERVED_NAMES.match(name):
                name += "_"
            names.add(name)
            yield name, [column]

    def spec(self) -> dict[str, TensorSpec]:
        """Returns the spec of one example as the model takes it, by the names of its inputs."""
        return {
            name: TensorSpec(
                (sum(column.length for column in columns),), self._types[columns[0].name], name
            )
            for name, columns in self.inputs.items()
        }

    def raw(self, values: Mapping[str, Any], rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns some rows as the model takes them.

        Args:
            values: Cells.values of all columns, by name.
            rows: Indices of the rows, int64.
        """
        raw = {}
        for name, columns in self.inputs.items():
            if columns[0].is_category:
                cells = values[columns[0].name].take(pa.array(rows))
                raw[name] = np.asarray(cells)[:, None]
            else:
                numbers = [values[column.name][rows] for column in columns]
                raw[name] = np.concatenate(numbers, axis=1, dtype=self._types[columns[0].name])
        return raw

    def encode(self, values: Mapping[str, Any], rows: np.ndarray, location: str) -> Any:
        """Returns the features of some rows; see raw(). `location` names the table in progress messages."""
        features = nest.map_structure(
            lambda part: np.empty((len(rows), part.shape[1]), part.dtype), self.model.output
        )
        width = sum(part.shape[1] for part in nest.flatten(features))
        num_rows = max(1, ENCODED_AT_ONCE // width)
        for start in with_progress(range(0, len(rows), num_rows), f"{location}: features, part"):
            part = slice(start, start + num_rows)
            with tf.device("CPU:0"):
                raw = nest.map_structure(tf.constant, self.raw(values, rows[part]))
                encoded = self.model(raw)
            for whole, piece in zip(nest.flatten(features), nest.flatten(encoded)):
                whole[part] = piece
        return features

    @cached_property
    def model(self) -> keras.Model:
        """The model that maps inputs, by name, to features, made only of Keras's own layers."""
        inputs = symbolic(self.spec())
        return keras.Model(inputs, self._features(inputs), name="features")

    def _features(self, inputs: Mapping[str, Any]) -> Any:
        # Pieces of the features, each with its indices among all features.
        pieces: list[tuple[Any, Sequence[int]]] = []
        codes = {}
        for name, columns in self.inputs.items():
            cells = inputs[name]
            column = columns[0]
            if not column.is_looked_up:
                pieces += self._normalize(cells, columns)
                continue
            if column.bins and column.fill:
                fill = np.asarray(column.fill, self._types[column.name])
                cells = keras.ops.where(keras.ops.isnan(cells), fill, cells)
            codes[column.name] = self._lookups[column.name](cells)
        if not self.schema.has_ids:
            for name, indices in codes.items():
                span = self._spans[name]
                encoder = keras.layers.CategoryEncoding(
                    num_tokens=len(span), output_mode="multi_hot", dtype="float32"
                )
                pieces.append((encoder(indices), span))

        pieces.sort(key=lambda piece: piece[1][0])
        features = keras.ops.concatenate([piece for piece, _ in pieces], axis=1)
        places = [index for _, indices in pieces for index in indices]
        if places != sorted(places):
            # The columns of the shared input are not adjacent among the features.
            features = keras.ops.take(features, np.argsort(places), axis=-1)
        if not self.schema.has_ids:
            return features
        # All columns share one range of ids.
        first_ids = np.cumsum([0, *self.category_sizes])[:-1]
        categories = (
            keras.ops.concatenate([codes[name] for name in self._lookups], axis=1) + first_ids
        )
        return {NUMBERS: features, "categories": keras.ops.cast(categories, "int32")}

    def _normalize(
        self, numbers: Any, columns: Sequence[Column]
    ) -> Iterator[tuple[Any, Sequence[int]]]:
        """Yields an input's normalized numbers, then flags for their gaps, each with its feature indices."""
        ops = keras.ops
        dtype = self._types[columns[0].name]
        owners = [column for column in columns for _ in range(column.length)]
        places = [
            index for column in columns for index in self._spans[column.name][: column.length]
        ]
        fill = [value for column in columns for value in column.fill or [np.nan] * column.length]
        is_gap = None
        if not np.isnan(fill).all():
            is_gap = ops.isnan(numbers)
            numbers = ops.where(is_gap, np.asarray([fill], dtype), numbers)
        is_log = np.array([[column.feature == "float_log" for column in owners]])
        if is_log.any():
            numbers = ops.where(is_log, ops.log1p(ops.maximum(numbers, 0)), numbers)
        mean, variance = np.concatenate([_statistics(column) for column in columns], axis=1)
        # Keras's Normalization rounds a float64 mean to float32, and replaces scales below 1e-7.
        numbers = (numbers - mean.astype(dtype)) / np.sqrt(variance).astype(dtype)
        yield ops.cast(numbers, "float32"), places

        flagged = [index for index, column in enumerate(owners) if column.missing == "indicator"]
        if flagged:
            flags = ops.cast(ops.take(is_gap, np.asarray(flagged), axis=-1), "float32")
            yield flags, [places[index] + owners[index].length for index in flagged]


def _exact_bins(boundaries: np.ndarray, numbers: Any) -> Any:
    """Returns the bin of each float64 number, [rows, 1]; Discretization would round the boundaries to float32."""
    ops = keras.ops
    bins = ops.searchsorted(boundaries, ops.reshape(numbers, (-1,)), side="right")
    return ops.reshape(bins, (-1, 1))


def _type(column: Column) -> str:
    """Returns the type of a column in the model's input."""
    if column.is_category:
        return "string" if column.kind == "name" else "int64"
    return "float64" if column.is_wide else "float32"


def _statistics(column: Column) -> np.ndarray:
    """Returns the mean and the variance that normalize a column of numbers, [2, length]."""
    if not column.mean:
        # Features such as "float" are not normalized.
        return np.repeat([[0.0], [1.0]], column.length, axis=1)
    # A constant column becomes 0, and new values keep their distance from the constant.
    return np.array([column.mean, np.where(column.variance, column.variance, 1.0)])
