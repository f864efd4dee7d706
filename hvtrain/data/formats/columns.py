"""The kind of each column of a table, inferred from all its cells, and kept for later tables.

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
from pyarrow import types

from hvtrain.data.formats.cell_texts import DATE_FORMATS, numbers_in, only, share, times_in, unit_in
from hvtrain.errors import DataError

log = logging.getLogger(__name__)
Item = TypeVar("Item")

# Texts that are read as gaps, the same as in pandas.read_csv.
GAPS = pa.array(
    [
        "",
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "<NA>",
        "N/A",
        "NA",
        "NULL",
        "NaN",
        "None",
        "n/a",
        "nan",
        "null",
    ]
)
# The share of cells that have to be numbers or dates, for the others to count as gaps.
MOSTLY = 0.9
SAMPLE_ROWS = 1000
# Rows of the sample that already rule out most formats of numbers and dates.
TRIAL_ROWS = 100
# In a file with types, up to this many distinct texts, or one per ten rows, are names even if they look like numbers.
FEW_TEXTS = 20
# Above this, whole numbers are not exact in float64, and are taken as names.
MAX_EXACT = 2**53
LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
DATE_PARTS = ("year", "month", "day", "weekday", "hour")
DAY_MICROSECONDS = 86_400e6
SECONDS_BETWEEN = 5.0


@dataclass(frozen=True)
class Column:
    """How a column is read, and what was fitted to its training rows. All values can be written as JSON."""

    name: str
    """The name of the feature: the column's, followed by the part of a date, if any."""
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
    """What replaces a gap: a name, or numbers [length]."""
    mean: Sequence[float] = ()
    variance: Sequence[float] = ()
    bins: Sequence[float] = ()
    names: Sequence[Any] = ()
    """All categories, in the order of their numbers in the model."""
    is_wide: bool = False
    """True if float32 might make different values equal."""

    @property
    def is_category(self) -> bool:
        return self.kind in ("name", "integer")

    @property
    def is_looked_up(self) -> bool:
        """True if the feature is the number of a category or of a bin."""
        return self.is_category or bool(self.bins)


class Cells(NamedTuple):
    """The cells of a column as the model takes them."""

    values: Any
    """Numbers [rows, length], NaN in gaps; or an Arrow array of names or integers, null in gaps."""
    odd: Sequence[str] = ()
    """Texts where a number or a date was expected. They are gaps too."""

    @property
    def is_gap(self) -> np.ndarray:
        if isinstance(self.values, pa.Array):
            return np.asarray(self.values.is_null())
        is_nan = np.isnan(self.values)
        # Nearly all columns have one number in a cell; any() takes 20 times as long as isnan().
        return is_nan[:, 0] if is_nan.shape[1] == 1 else is_nan.any(axis=1)


def with_progress(items: Sequence[Item], label: str, unit: str = "columns") -> Iterator[Item]:
    """Yields the items, and logs every few seconds how many are done; short work logs nothing."""
    logged_at = time.monotonic()
    for num_done, item in enumerate(items):
        if time.monotonic() - logged_at >= SECONDS_BETWEEN:
            logged_at = time.monotonic()
            log.info("%s, %s of %s %s", label, f"{num_done:,}", f"{len(items):,}", unit)
        yield item


def one_array(values: pa.ChunkedArray) -> pa.Array:
    """Returns a column's values without chunks or an extension type."""
    # One chunk needs no copy.
    array = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def plain(values: pa.ChunkedArray) -> pa.Array:
    """Returns one array of numbers, dates, lists, or text with gaps as null. Times and durations become seconds."""
    array = one_array(values)
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()

    kind = array.type
    if types.is_null(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        array = array.cast(pa.string())
    elif types.is_decimal(kind) or types.is_float16(kind):
        array = array.cast(pa.float64())
    elif types.is_time(kind) or types.is_duration(kind):
        microseconds = pa.time64("us") if types.is_time(kind) else pa.duration("us")
        array = pc.divide(
            array.cast(microseconds, safe=False).cast(pa.int64()).cast(pa.float64()), 1e6
        )
    if not types.is_string(array.type):
        return array

    array = pc.utf8_trim_whitespace(array)
    return only(array, pc.invert(pc.is_in(array, GAPS)))


def infer(
    name: str, values: pa.Array, number_formats: Sequence[tuple[str, str]], is_typed: bool
) -> Column | str:
    """Infers a column from all its cells; for a column that cannot be used, returns the reason instead.

    Args:
        name: name of the column.
        values: its cells, from plain().
        number_formats: those of the file, from cell_texts.number_formats().
        is_typed: True for a file whose columns have types, where text is meant to be text.
    """
    column = Column(name, name, "name")
    kind = values.type
    if values.null_count == len(values):
        return "empty"
    if types.is_string(kind):
        if is_typed and pc.count_distinct(values).as_py() <= max(FEW_TEXTS, len(values) // 10):
            return column
        return _infer_text(column, values.drop_null(), number_formats)
    if types.is_boolean(kind):
        return column
    if types.is_integer(kind):
        bounds = pc.min_max(values).as_py()
        is_exact = max(abs(bounds["min"]), abs(bounds["max"])) <= MAX_EXACT
        return replace(column, kind="number") if is_exact else column
    if types.is_floating(kind):
        if pc.all(pc.is_nan(values)).as_py():
            return "empty"
        return replace(column, kind="number")
    if types.is_temporal(kind):
        return replace(column, kind="date")
    if not _is_vector(kind):
        return f"of the type {kind}"
    lengths = pc.unique(pc.list_value_length(values).drop_null()).to_pylist()
    if len(lengths) != 1:
        return f"lists of {min(lengths)} to {max(lengths)} numbers"
    return replace(column, kind="vector", length=lengths[0])


def _is_vector(kind: pa.DataType) -> bool:
    """True for lists of numbers."""
    return isinstance(kind, LISTS) and (
        types.is_integer(kind.value_type) or types.is_floating(kind.value_type)
    )


def _infer_text(
    column: Column, text: pa.Array, number_formats: Sequence[tuple[str, str]]
) -> Column:
    # 007 is a code; as a number it would become 7.
    from_zero = text.filter(pc.starts_with(text, "0"))
    if pc.any(pc.match_substring_regex(from_zero, r"^0\d+$")).as_py():
        return column

    sample = text[:: max(1, len(text) // SAMPLE_ROWS)]
    unit = unit_in(sample, MOSTLY)
    if unit.isalpha() and pc.count_distinct(text).as_py() <= FEW_TEXTS:
        # "4 doors" and "1 star" are names.
        unit = ""
    number = replace(column, kind="number", unit=unit)
    numbers = [
        replace(number, decimal=decimal, thousands=thousands)
        for decimal, thousands in number_formats
    ]
    dates = [replace(column, kind="date", date_format=date_format) for date_format in DATE_FORMATS]
    for candidates in (numbers, dates):
        best = _best_format(candidates, sample, text)
        if best is not None:
            return best
    return column


def _best_format(candidates: Sequence[Column], sample: pa.Array, text: pa.Array) -> Column | None:
    """Returns the format that reads the most cells, on a tie the first; None if none reads at least MOSTLY."""
    best = None
    best_share = 0.0
    trial = sample[:: max(1, len(sample) // TRIAL_ROWS)]
    for candidate in candidates:
        # The whole text is read only in the few formats that may fit.
        if min(_share_read(cells, candidate) for cells in (trial, sample)) < MOSTLY / 2:
            continue
        share_read = _share_read(text, candidate)
        if share_read >= MOSTLY and share_read > best_share:
            best = candidate
            best_share = share_read
        if share_read == 1:
            break
    return best


def _share_read(text: pa.Array, column: Column) -> float:
    return share(_parsed(text, column).is_valid())


def _parsed(text: pa.Array, column: Column) -> pa.Array:
    """Returns the numbers or times that the column's format finds in text."""
    if column.kind == "date":
        return times_in(text, column.date_format)
    return numbers_in(text, column.decimal, column.thousands, column.unit)


def read(column: Column, values: pa.Array, where: str) -> Cells:
    """Reads the cells of a column in the same way as those of the training table.

    Args:
        column: the column, from infer().
        values: its cells, from plain().
        where: the file, for messages.

    Raises:
        DataError: The cells are of another kind than the column.
    """
    if column.kind == "vector":
        return Cells(_vectors_in(values, column, where))
    if types.is_nested(values.type) or types.is_binary(values.type):
        raise _other_kind(column, values, where)
    if column.kind == "name":
        return Cells(_names_in(values, column.names))

    parsed = values
    odd = []
    if types.is_string(values.type):
        parsed = _parsed(values, column)
        odd = pc.unique(values.filter(parsed.is_null())).drop_null().to_pylist()
    is_time = types.is_temporal(parsed.type)
    # A column without any cells has no type of its own; one with only odd cells is of another kind.
    is_empty = values.null_count == len(values)
    if not is_empty and (parsed.null_count == len(parsed) or is_time != (column.kind == "date")):
        raise _other_kind(column, values, where)

    if column.kind == "integer" and types.is_integer(parsed.type):
        return Cells(parsed.cast(pa.int64()), odd)
    if is_time:
        parsed = _date_part(parsed.cast(pa.timestamp("us"), safe=False), column.part)
    if not types.is_float32(parsed.type):
        parsed = parsed.cast(pa.float64(), safe=False)
    numbers = np.asarray(parsed)
    if column.kind == "integer":
        return Cells(_integers_in(numbers, column, where), odd)
    # Infinite numbers have no mean, so they are gaps too.
    is_infinite = np.isinf(numbers)
    if is_infinite.any():
        odd += map(str, np.unique(numbers[is_infinite]))
        numbers = np.where(is_infinite, np.nan, numbers)
    return Cells(numbers[:, None], odd)


def _other_kind(column: Column, values: pa.Array, where: str) -> DataError:
    example = next(iter(values.drop_null()[:1].to_pylist()), None)
    return DataError(
        f"{where}: the column {column.source} holds {example!r} and is to be {column.feature}; "
        f"string_categorical takes names"
    )


def _names_in(values: pa.Array, known: Sequence[str]) -> pa.Array:
    """Returns the cells as text; a number or truth value is spelled like the known name that equals it."""
    is_truth = types.is_boolean(values.type)
    if types.is_floating(values.type):
        values = pc.if_else(pc.is_finite(values), values, None)
        # pandas, for one, turns whole numbers into floats in a column with gaps.
        if pc.all(pc.equal(values, pc.floor(values))).as_py():
            values = values.cast(pa.int64())
    values = values.cast(pa.string())
    if is_truth:
        values = pc.utf8_capitalize(values)
    if not known or not len(values):
        return values

    spellings = {_key(name): name for name in known}
    exact = {*known}
    encoded = values.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    names = [name if name in exact else spellings.get(_key(name), name) for name in names]
    return pa.array(names, pa.string()).take(encoded.indices)


def _key(name: str) -> str:
    """Returns a key that is equal for different programs' spellings of a name.

    >>> _key("7.0") == _key("7"), _key("TRUE") == _key("True"), _key("Yes") == _key("yes")
    (True, True, False)
    """
    if name.lower() in ("true", "false"):
        return name.lower()
    return re.sub(r"^([+-]?\d+)\.0+$", r"\1", name)


def _vectors_in(values: pa.Array, column: Column, where: str) -> np.ndarray:
    numbers = np.full((len(values), column.length), np.nan)
    lists = values.drop_null()
    if not len(lists):
        return numbers
    if not _is_vector(lists.type):
        raise DataError(
            f"{where}: the column {column.source} holds {lists.type}, and lists of numbers are needed"
        )
    lengths = pc.unique(pc.list_value_length(lists)).to_pylist()
    if lengths != [column.length]:
        raise DataError(
            f"{where}: the column {column.source} holds lists of {lengths} numbers, not {column.length}"
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
    return pc.divide(times.cast(pa.int64()).cast(pa.float64()), DAY_MICROSECONDS)


def _integers_in(numbers: np.ndarray, column: Column, where: str) -> pa.Array:
    """Returns integers, null in gaps. Raises DataError for other numbers: as a category, 1.5 would become 1."""
    is_gap = ~np.isfinite(numbers)
    whole = np.where(is_gap, 0, np.round(numbers))
    wrong = ~is_gap & ((whole != numbers) | (np.abs(whole) > MAX_EXACT))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{where}: row {row} has {numbers[row]:g} as {column.source}, which takes integers; fix it, or choose "
            "float_discretized"
        )
    return pa.array(whole.astype(np.int64), mask=is_gap)
