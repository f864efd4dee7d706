"""Infers the kind of a table's column from all its cells, and reads that column in later tables.

A column is a number, a name (a category), a date, or a vector of numbers. infer() decides once, on
the training table. read() then reads that column of any table in the same way, or refuses it.
"""

import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from pyarrow import types

from hvtrain.data.formats.cell_texts import (
    DATE_FORMATS,
    DATE_LIKE,
    MOSTLY,
    SAMPLE_ROWS,
    has_choices,
    keep_where,
    numbers_in,
    share,
    times_in,
    unit_in,
)
from hvtrain.errors import DataError

log = logging.getLogger(__name__)
Item = TypeVar("Item")

# Texts that are read as gaps, as in pandas.read_csv; Arrow's list lacks two of them.
GAPS = pa.array([*pa.csv.ConvertOptions().null_values, "<NA>", "None"])
# About this many rows of a sample rule out most number and date formats.
TRIAL_ROWS = 100
# In a file with types, up to this many distinct texts (or a tenth of the number of rows, if that
# is more) are names even if they look like numbers.
FEW_TEXTS = 20
# float64 cannot represent every whole number above this, so columns with
# larger ones are taken as names.
MAX_EXACT = 2**53
LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
DATE_PARTS = ("year", "month", "day", "weekday", "hour")
DAY_MICROSECONDS = 86_400e6
# Interval between lines of progress in the log.
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class Column:
    """Describes how to read a column, and holds the values fitted to its training rows. Serializable as JSON."""

    name: str
    """The name of the feature: the column's name, with the part of a date appended, if any."""
    source: str
    """The name of the column in the file."""
    kind: str
    """number, integer, name, date or vector."""
    feature: str = ""
    """FeatureSpace's term for the feature, such as float_normalized."""
    missing: str = "refuse"
    """The treatment of gaps."""
    decimal: str = "."
    thousands: str = ""
    unit: str = ""
    date_format: str = ""
    """For strptime; empty: ISO 8601."""
    part: str = ""
    """One of DATE_PARTS; empty: the days since 1970-01-01."""
    length: int = 1
    """The number of values in a cell."""

    fill: Sequence[Any] = ()
    """The replacement for a gap: a name, or numbers [length]."""
    mean: Sequence[float] = ()
    variance: Sequence[float] = ()
    bins: Sequence[float] = ()
    names: Sequence[Any] = ()
    """All categories, in the order of their numbers in the model."""
    is_wide: bool = False
    """True if distinct values might become equal in float32."""

    @property
    def is_category(self) -> bool:
        return self.kind in ("name", "integer")

    @property
    def is_looked_up(self) -> bool:
        """True if the feature is the index of a category or a bin."""
        return self.is_category or bool(self.bins)


class Cells(NamedTuple):
    """The parsed cells of a column."""

    values: Any
    """Numbers [rows, length], NaN in gaps; or an Arrow array of names or integers, null in gaps."""
    odd: Sequence[str] = ()
    """Distinct texts, and infinities, where a number or a date was expected. In `values` they are gaps."""

    @property
    def is_gap(self) -> np.ndarray:
        """Gaps as bool [rows]; a vector with any gap counts as one."""
        if isinstance(self.values, pa.Array):
            return np.asarray(self.values.is_null())
        is_nan = np.isnan(self.values)
        # Nearly all columns have one number in a cell; any() takes 20 times as long as isnan().
        return is_nan[:, 0] if is_nan.shape[1] == 1 else is_nan.any(axis=1)


def with_progress(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Yields the items, logging every few seconds how many are done; quick work logs nothing."""
    logged_at = time.monotonic()
    for num_done, item in enumerate(items):
        if time.monotonic() - logged_at >= PROGRESS_SECONDS:
            logged_at = time.monotonic()
            log.info("%s, %s of %s", label, f"{num_done:,}", f"{len(items):,}")
        yield item


def one_array(values: pa.ChunkedArray) -> pa.Array:
    """Returns a column's values as a single array, without an extension type."""
    # One chunk needs no copy.
    array = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def plain(values: pa.ChunkedArray) -> pa.Array:
    """Converts a column to one array of numbers, dates, lists or trimmed text, with the texts of GAPS as null.

    Times and durations become seconds.
    """
    array = one_array(values)
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()

    dtype = array.type
    if types.is_null(dtype) or types.is_large_string(dtype) or types.is_string_view(dtype):
        array = array.cast(pa.string())
    elif types.is_decimal(dtype) or types.is_float16(dtype):
        array = array.cast(pa.float64())
    elif types.is_time(dtype) or types.is_duration(dtype):
        microseconds = pa.time64("us") if types.is_time(dtype) else pa.duration("us")
        array = pc.divide(array.cast(microseconds, safe=False).cast(pa.int64()), 1e6)
    if not types.is_string(array.type):
        return array

    array = pc.utf8_trim_whitespace(array)
    return keep_where(array, pc.invert(pc.is_in(array, GAPS)))


def infer(
    name: str, values: pa.Array, number_formats: Sequence[tuple[str, str]], is_typed: bool
) -> Column | str:
    """Infers from all cells how to read a column; returns the reason as text if the column cannot be used.

    Args:
        name: Name of the column.
        values: Its cells, from plain().
        number_formats: The formats to try, from cell_texts.number_formats().
        is_typed: True for a file whose columns have types, where text is meant to be text.
    """
    column = Column(name, name, "name")
    dtype = values.type
    if values.null_count == len(values):
        return "empty"
    if types.is_string(dtype):
        if is_typed and pc.count_distinct(values).as_py() <= max(FEW_TEXTS, len(values) // 10):
            return column
        return _infer_text(column, values.drop_null(), number_formats)
    if types.is_boolean(dtype):
        return column
    if types.is_integer(dtype):
        largest = max(map(abs, pc.min_max(values).as_py().values()))
        return replace(column, kind="number") if largest <= MAX_EXACT else column
    if types.is_floating(dtype):
        if pc.all(pc.is_nan(values)).as_py():
            return "empty"
        return replace(column, kind="number")
    if types.is_temporal(dtype):
        return replace(column, kind="date")
    if not _is_vector(dtype):
        return f"of the type {dtype}"
    lengths = pc.unique(pc.list_value_length(values).drop_null()).to_pylist()
    if len(lengths) != 1 or not lengths[0]:
        return f"a list of {min(lengths)} to {max(lengths)} numbers"
    return replace(column, kind="vector", length=lengths[0])


def _is_vector(dtype: pa.DataType) -> bool:
    """True for lists of numbers."""
    return isinstance(dtype, LISTS) and (
        types.is_integer(dtype.value_type) or types.is_floating(dtype.value_type)
    )


def _infer_text(
    column: Column, text: pa.Array, number_formats: Sequence[tuple[str, str]]
) -> Column:
    # 007 is a code; as a number it would become 7.
    with_zero = text.filter(pc.starts_with(text, "0"))
    if pc.any(pc.match_substring_regex(with_zero, r"^0\d+$")).as_py():
        return column
    # With a decimal comma, the two choices 1,2 would become the number 1.2.
    if has_choices(text) or _lose_digits(text):
        return column

    sample = text[:: max(1, len(text) // SAMPLE_ROWS)]
    unit = unit_in(sample)
    if unit.isalpha() and pc.count_distinct(text).as_py() <= FEW_TEXTS:
        # "4 doors" and "1 star" are names: without a unit, they do not parse as numbers.
        unit = ""
    numbers = [
        replace(column, kind="number", unit=unit, decimal=decimal, thousands=thousands)
        for decimal, thousands in number_formats
    ]
    formats = DATE_FORMATS if share(pc.match_substring_regex(sample, DATE_LIKE)) >= 0.5 else ()
    dates = [replace(column, kind="date", date_format=date_format) for date_format in formats]
    return _best_format(numbers, sample, text) or _best_format(dates, sample, text) or column


def _lose_digits(text: pa.Array) -> bool:
    """True if float64 would make different whole numbers equal, as it does with IDs of 17 digits."""
    long = text.filter(pc.greater_equal(pc.binary_length(text), 16))
    whole = pc.unique(long.filter(pc.match_substring_regex(long, r"^[+-]?\d+$"))).to_pylist()
    return len(set(map(float, whole))) < len(whole)


def _best_format(candidates: Sequence[Column], sample: pa.Array, text: pa.Array) -> Column | None:
    """Returns the candidate that parses the most cells, the first on a tie; None if none parses at least MOSTLY."""
    best = None
    best_share = 0.0
    trial = sample[:: max(1, len(sample) // TRIAL_ROWS)]
    for candidate in candidates:
        # The whole text is parsed only in the few formats that may fit; half the
        # share allows for an unlucky sample.
        if _share_read(trial, candidate) < MOSTLY / 2:
            continue
        share_read = _share_read(text, candidate)
        if share_read >= MOSTLY and share_read > best_share:
            best = candidate
            best_share = share_read
        if share_read == 1:
            break
    return best


def _share_read(text: pa.Array, column: Column) -> float:
    return share(_parse(text, column).is_valid())


def _parse(text: pa.Array, column: Column) -> pa.Array:
    """Parses text as numbers or times in the column's format; null where it does not match."""
    if column.kind == "date":
        return times_in(text, column.date_format)
    return numbers_in(text, column.decimal, column.thousands, column.unit)


def read(column: Column, values: pa.Array, location: str) -> Cells:
    """Reads the cells of a column in the same way as in the training table.

    Args:
        column: The column, from infer().
        values: Its cells, from plain().
        location: The file, for messages.

    Raises:
        DataError: The cells are not of the column's kind.
        pyarrow.ArrowException: A cell cannot be converted.
    """
    if column.kind == "vector":
        return Cells(_vectors_in(values, column, location))
    if types.is_nested(values.type) or types.is_binary(values.type):
        raise _wrong_kind_error(column, values, location)
    if column.kind == "name":
        return Cells(_names_in(values, column.names))

    parsed = values
    odd = []
    if types.is_string(values.type):
        parsed = _parse(values, column)
        odd = pc.unique(values.filter(parsed.is_null())).drop_null().to_pylist()
    is_time = types.is_temporal(parsed.type)
    # A column of nothing but gaps fits any kind; one in which no cell
    # can be parsed is of another kind.
    is_empty = values.null_count == len(values)
    if not is_empty and (parsed.null_count == len(parsed) or is_time != (column.kind == "date")):
        raise _wrong_kind_error(column, values, location)

    if column.kind == "integer" and types.is_integer(parsed.type):
        return Cells(parsed.cast(pa.int64()), odd)
    if is_time:
        parsed = _date_part(parsed.cast(pa.timestamp("us"), safe=False), column.part)
    if not types.is_float32(parsed.type):
        parsed = parsed.cast(pa.float64(), safe=False)
    numbers = np.asarray(parsed)
    if column.kind == "integer":
        return Cells(_integers_in(numbers, column, location), odd)
    # One infinite number would make the mean infinite, so infinities are gaps too.
    is_infinite = np.isinf(numbers)
    if is_infinite.any():
        odd += map(str, np.unique(numbers[is_infinite]))
        numbers = np.where(is_infinite, np.nan, numbers)
    return Cells(numbers[:, None], odd)


def _wrong_kind_error(column: Column, values: pa.Array, location: str) -> DataError:
    example = next(iter(values.drop_null()[:1].to_pylist()), None)
    problem = f"{location}: the column {column.source} holds {example!r}, which cannot be read as"
    if column.kind == "name":
        return DataError(f"{problem} a name; fix the file")
    return DataError(
        f"{problem} {column.feature}; fix the file, or choose string_categorical, which takes names"
    )


def _names_in(values: pa.Array, known: Sequence[str]) -> pa.Array:
    """Returns the cells as text, with numbers and truth values spelled like the known name they equal."""
    is_truth = types.is_boolean(values.type)
    if types.is_floating(values.type):
        values = keep_where(values, pc.is_finite(values))
        # pandas, for example, stores whole numbers as floats in a column with gaps.
        if pc.all(pc.equal(values, pc.floor(values))).as_py():
            values = values.cast(pa.int64())
    values = values.cast(pa.string())
    if is_truth:
        values = pc.utf8_capitalize(values)
    if not known:
        return values

    spellings = {_key(name): name for name in known}
    exact = {*known}
    encoded = values.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    names = [name if name in exact else spellings.get(_key(name), name) for name in names]
    return pa.array(names, pa.string()).take(encoded.indices)


def _key(name: str) -> str:
    """Returns a key that is the same for all spellings of a name that programs use.

    >>> _key("7.0") == _key("7"), _key("TRUE") == _key("True"), _key("Yes") == _key("yes")
    (True, True, False)
    """
    if name.lower() in ("true", "false"):
        return name.lower()
    return re.sub(r"^([+-]?\d+)\.0+$", r"\1", name)


def _vectors_in(values: pa.Array, column: Column, location: str) -> np.ndarray:
    numbers = np.full((len(values), column.length), np.nan)
    lists = values.drop_null()
    if not len(lists):
        return numbers
    lengths = []
    if _is_vector(lists.type):
        lengths = pc.unique(pc.list_value_length(lists)).to_pylist()
    if lengths != [column.length]:
        content = f"lists of {lengths} numbers" if lengths else lists.type
        raise DataError(
            f"{location}: the column {column.source} holds {content}; lists of {column.length} numbers are needed"
        )
    flat = np.asarray(lists.flatten().cast(pa.float64(), safe=False))
    numbers[np.asarray(values.is_valid())] = flat.reshape(-1, column.length)
    numbers[np.isinf(numbers)] = np.nan
    return numbers


def _date_part(times: pa.Array, part: str) -> pa.Array:
    if part == "weekday":
        return pc.day_of_week(times)
    if part:
        return getattr(pc, part)(times)
    return pc.divide(times.cast(pa.int64()), DAY_MICROSECONDS)


def _integers_in(numbers: np.ndarray, column: Column, location: str) -> pa.Array:
    """Returns integers, null in gaps. Raises DataError for fractions, and for numbers beyond MAX_EXACT."""
    is_gap = ~np.isfinite(numbers)
    whole = np.where(is_gap, 0, np.round(numbers))
    wrong = ~is_gap & ((whole != numbers) | (np.abs(whole) > MAX_EXACT))
    if wrong.any():
        row = np.argmax(wrong)
        raise DataError(
            f"{location}: row {row} has {numbers[row]:g} as {column.source}, which takes integers; fix it, or "
            "choose float_discretized"
        )
    return pa.array(whole.astype(np.int64), mask=is_gap)
