"""The schema of a table: its feature columns and their kinds, the target, and the columns left out.

It is inferred from the training table, kept in the run folder, and applied to every later table.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hvtrain.config.validate import check_choice, check_least, check_mapping
from hvtrain.data.formats.cell_texts import number_formats, share, sort_by_value
from hvtrain.data.formats.columns import (
    DATE_PARTS,
    Cells,
    Column,
    infer,
    plain,
    read,
    with_progress,
)
from hvtrain.errors import ConfigError, DataError, first_line

# The kind of column that each feature takes. Dates and vectors count as numbers.
KINDS = {
    "float": "number",
    "float_normalized": "number",
    "float_log": "number",
    "float_discretized": "number",
    "integer_categorical": "integer",
    "string_categorical": "name",
    "string_hashed": "name",
}
MISSING = ("refuse", "drop", "median", "most_frequent", "indicator")
DATES = ("number", "parts", "drop")

# pandas writes its index to columns with these names; a column without a name is usually an index.
INDEX_NAME = re.compile(r"Unnamed: \d+|__index_level_\d+__|")
ID_NAME = re.compile(
    r"(.*([_. -]|(?-i:[a-z](?=[A-Z]))))?(id|uuid|guid|index|row_?number)", re.IGNORECASE
)
# A column with at most this many distinct names is always a feature, however few rows there are.
FEW_NAMES = 20
# A column with more distinct names is hashed.
MAX_NAMES = 1000
# A column whose distinct names reach this share of its filled rows is left out:
# nothing can be learned from it.
NEARLY_UNIQUE = 0.9
# Whole numbers with more distinct values than this are unlikely to be classes.
MAX_WHOLE_CLASSES = 100
# A target with fewer rows per distinct value than this is unlikely to be a class.
ROWS_PER_CLASS = 10


@dataclass(frozen=True)
class Settings:
    """The user's settings for columns.

    Attributes:
        target: The column to predict. Names and whole numbers are classes; other numbers stay numbers.
        features: Columns to use, and how, in the terms of FeatureSpace: {age: float_normalized,
            city: string_categorical}; null: all but the target, numbers normalized and names as
            categories.
        target_is: "class" or "number"; null: by the column's type.
        missing: One of MISSING for all gaps, or one for each column ("refuse" for those not named): {age: median,
            city: indicator}. All but "refuse" leave out rows without a target.
        drop: Columns to leave out.
        id: A column that is not a feature, but is shown beside each prediction.
        dates: "number", the days since 1970-01-01; "parts", which are year, month, day, weekday and hour; or "drop".
        decimal, thousands: Decimal sign and thousands separator in text; null: inferred from the cells.
        log_numbers: Without `features`, numbers become float_log, which is log(1 + x), or 0 for negative x,
            instead of float_normalized.
        category_ids: Categories are ids for embedding tables instead of one-hot. The inputs are
            then {"numbers": float32 [n], "categories": int32 [m]}, with the ids of all columns in
            one range; the fact category_sizes has the number of ids of each column.
        hash_buckets: Number of buckets into which a column of more than MAX_NAMES names is hashed.

    Raises:
        ConfigError: A setting is out of range or is not one of its choices.
    """

    target: str
    features: Mapping[str, str] | None = None
    target_is: str | None = None
    missing: str | Mapping[str, str] = "refuse"
    drop: Sequence[str] = ()
    id: str | None = None
    dates: str = "number"
    decimal: str | None = None
    thousands: str | None = None
    log_numbers: bool = False
    category_ids: bool = False
    hash_buckets: int = 1000

    def __post_init__(self) -> None:
        by_column = self.missing if isinstance(self.missing, Mapping) else {"": self.missing}
        for action in by_column.values():
            check_choice("dataset.missing", action, MISSING)
        check_mapping("dataset.features", self.features, "{age: float_normalized}")
        for column, feature in (self.features or {}).items():
            check_choice(f"dataset.features.{column}", feature, KINDS)
        check_choice("dataset.target_is", self.target_is or "null", ("class", "number", "null"))
        check_choice("dataset.dates", self.dates, DATES)
        check_least("dataset.hash_buckets", self.hash_buckets, 1)
        if not number_formats((), self.decimal, self.thousands):
            raise ConfigError(
                f"dataset.decimal={self.decimal!r} and dataset.thousands={self.thousands!r} fit no number; give '.' "
                "or ',' as decimal, and another of '.', ',', ' ' and \"'\" as thousands"
            )

    def uses(self, name: str) -> bool:
        """True for a column that becomes a feature or the target if its cells allow it."""
        if name == self.target:
            return True
        if self.features is not None:
            return name in self.features
        return name not in self.drop and name != self.id

    def missing_of(self, name: str) -> str:
        if isinstance(self.missing, str):
            return self.missing
        return self.missing.get(name, "refuse")


@dataclass(frozen=True)
class Schema:
    """The columns of a table and their roles in training a model."""

    columns: Sequence[Column]
    target: Column
    classes: Sequence[str]
    """Names of the target's classes; empty if it is a number."""
    left_out: Mapping[str, str]
    """Columns that are not features, each with the reason."""
    has_ids: bool
    """True if categories are ids in a separate input; otherwise they are one-hot."""
    hash_buckets: int

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Schema":
        fields = json.loads(text)
        columns = [Column(**column) for column in fields.pop("columns")]
        return cls(columns, Column(**fields.pop("target")), **fields)


def plain_columns(table: pa.Table) -> dict[str, pa.Array]:
    """Returns the columns by name, converted by plain()."""
    return {name: plain(table[name]) for name in table.column_names}


def infer_schema(
    arrays: Mapping[str, pa.Array],
    settings: Settings,
    name: str,
    partitions: Collection[str] = (),
) -> Schema:
    """Infers the schema of a training table, without the statistics of its columns.

    Args:
        arrays: The columns, from plain_columns().
        settings: The user's settings, which take precedence over what the cells show.
        name: Name of the table, for messages.
        partitions: The columns that come from the names of folders, which have no types.

    Raises:
        ConfigError: A setting does not fit the table.
        DataError: No column is left, one that the user chose cannot be used, or the target is the same in every row.
    """
    _check_names(arrays, settings, name)
    used = {column: array for column, array in arrays.items() if settings.uses(column)}

    texts = [array for array in used.values() if pa.types.is_string(array.type)]
    # In a file with types, text columns are meant to be text.
    is_typed = len(texts) < len(used)
    formats = number_formats(texts, settings.decimal, settings.thousands)
    inferred = {
        column: infer(column, used[column], formats, is_typed and column not in partitions)
        for column in with_progress(list(used), f"{name}: kinds of columns")
    }

    target, classes = _infer_target(
        inferred.pop(settings.target), used.pop(settings.target), settings
    )
    columns = []
    left_out = {}
    for column, array in used.items():
        result = _with_feature(inferred[column], column, array, settings, name)
        if isinstance(result, Column):
            columns += _parts(result, array, settings)
        else:
            left_out[column] = result
    if settings.id is not None:
        left_out[settings.id] = "dataset.id"
    if not columns:
        reasons = ", ".join(f"{column} ({reason})" for column, reason in left_out.items())
        raise DataError(
            f"{name} has no column to learn from but {settings.target}; left out: {reasons or 'none'}; "
            "add columns, or choose left-out ones in dataset.features"
        )

    return Schema(
        columns,
        target,
        classes,
        left_out=left_out,
        has_ids=settings.category_ids,
        hash_buckets=settings.hash_buckets,
    )


def _check_names(names: Collection[str], settings: Settings, table: str) -> None:
    """Raises ConfigError for settings that name columns missing from the table."""
    needed: dict[str, Collection[str]] = {
        "target=": [settings.target],
        "drop=": settings.drop,
        "features.": settings.features or (),
    }
    if settings.id is not None:
        needed["id="] = [settings.id]
    if isinstance(settings.missing, Mapping):
        needed["missing."] = settings.missing
    for setting, columns in needed.items():
        for column in columns:
            if column not in names:
                raise ConfigError(
                    f"dataset.{setting}{column} is not a column of {table}; it has {', '.join(names)}"
                )


def _with_feature(
    inferred: Column | str, name: str, values: pa.Array, settings: Settings, table: str
) -> Column | str:
    """Returns a column with the user's or the default feature, or the reason why it is left out."""
    if settings.features is None:
        return _with_default_feature(inferred, name, values, settings)

    feature = settings.features[name]
    if isinstance(inferred, str):
        raise DataError(
            f"{table}: the column {name} is {inferred}; leave it out of dataset.features"
        )
    if inferred.kind == "vector" and feature not in ("float", "float_normalized"):
        raise ConfigError(
            f"dataset.features.{name}={feature} cannot take vectors; choose float or float_normalized"
        )
    takes_flag = feature not in ("integer_categorical", "float_discretized")
    if settings.missing_of(name) == "indicator" and not takes_flag:
        raise ConfigError(
            f"dataset.missing.{name}=indicator does not go with {feature}; choose median or another feature"
        )
    kind = KINDS[feature]
    if kind == "number" and inferred.kind in ("date", "vector"):
        kind = inferred.kind
    return replace(inferred, kind=kind, feature=feature)


def _with_default_feature(
    inferred: Column | str, name: str, values: pa.Array, settings: Settings
) -> Column | str:
    """Returns the same as _with_feature(), for settings that choose no features."""
    if INDEX_NAME.fullmatch(name):
        return "an index"
    if isinstance(inferred, str):
        return inferred
    if inferred.kind == "date" and settings.dates == "drop":
        return "a date"

    is_name = inferred.kind == "name"
    is_number = inferred.kind == "number"
    if is_name or (is_number and ID_NAME.fullmatch(name) and _is_whole(inferred, values)):
        num_filled = len(values) - values.null_count
        num_distinct = pc.count_distinct(values).as_py()
        if num_distinct > FEW_NAMES:
            if num_distinct == num_filled:
                return "unique in every row"
            if is_name and num_distinct >= NEARLY_UNIQUE * num_filled:
                return f"{num_distinct:,} names in {num_filled:,} rows"
    if is_name:
        is_hashed = num_distinct > MAX_NAMES
        return replace(inferred, feature="string_hashed" if is_hashed else "string_categorical")
    is_log = settings.log_numbers and is_number
    return replace(inferred, feature="float_log" if is_log else "float_normalized")


def _parts(column: Column, values: pa.Array, settings: Settings) -> list[Column]:
    """Sets a column's treatment of gaps; with dates=parts, returns a column for each part of a date."""
    column = replace(column, missing=settings.missing_of(column.name))
    if column.kind != "date" or settings.dates != "parts":
        return [column]
    parts = [replace(column, name=f"{column.name}.{part}", part=part) for part in DATE_PARTS]
    # Dates without times have no hour.
    hours = read(parts[-1], values, column.name).values
    if not np.nan_to_num(hours).any():
        parts.pop()
    return parts


def _infer_target(
    inferred: Column | str, values: pa.Array, settings: Settings
) -> tuple[Column, list[str]]:
    """Returns the target, and the names of its classes; no names if it is a number."""
    name = settings.target
    # A row without a target is useless for training.
    missing = "refuse" if settings.missing_of(name) == "refuse" else "drop"
    if isinstance(inferred, str) or inferred.kind == "vector":
        kind = inferred if isinstance(inferred, str) else "a vector"
        raise ConfigError(
            f"dataset.target={name} is {kind}; a column of names or numbers is needed"
        )

    example = values.drop_null()[0].as_py()
    if pc.count_distinct(values).as_py() == 1:
        raise DataError(
            f"dataset.target={name} is {example!r} in every row, and nothing can be learned from it; "
            "choose another column"
        )
    is_whole = inferred.kind == "number" and _is_whole(inferred, values)
    # Fractions are numbers; names and whole numbers are classes.
    is_class = inferred.kind == "name" or is_whole
    if settings.target_is:
        is_class = settings.target_is == "class"
    if not is_class:
        if inferred.kind == "name":
            raise ConfigError(
                f"dataset.target_is=number, but the column {name} holds {example!r}; choose dataset.target_is=class"
            )
        return replace(inferred, feature="float", missing=missing), []

    column = replace(inferred, kind="name", feature="string_categorical", missing=missing)
    classes = sorted(pc.unique(read(column, values, name).values.drop_null()).to_pylist())
    if inferred.kind == "number":
        classes = sort_by_value(classes, inferred.decimal, inferred.thousands, inferred.unit)
    num_rows = len(values) - values.null_count
    limit = max(FEW_NAMES, num_rows // ROWS_PER_CLASS)
    if is_whole:
        limit = min(limit, MAX_WHOLE_CLASSES)
    if len(classes) > limit and settings.target_is is None:
        raise ConfigError(
            f"dataset.target={name} has {len(classes):,} values in {num_rows:,} rows, too many for classes; "
            "set dataset.target_is=class to use them anyway or, for numbers, dataset.target_is=number with "
            "task=regression"
        )
    return replace(column, names=classes), classes


def _is_whole(column: Column, values: pa.Array) -> bool:
    if not pa.types.is_string(values.type):
        return pa.types.is_integer(values.type)
    fractions = pc.match_substring_regex(values, f"[{re.escape(column.decimal)}eE]")
    return not column.unit and not pc.any(fractions).as_py()


def read_cells(
    columns: Sequence[Column], arrays: Mapping[str, pa.Array], location: str
) -> dict[str, Cells]:
    """Reads a table's columns as the schema says, and returns their cells by column name.

    Args:
        columns: Columns of the schema.
        arrays: The table's columns, from plain_columns().
        location: The file, for messages.

    Raises:
        DataError: A column is missing, or is not of the kind that it was in training.
    """
    missing = sorted({column.source for column in columns} - arrays.keys())
    if missing:
        noun = "column" if len(missing) == 1 else "columns"
        raise DataError(
            f"{location} lacks the {noun} {', '.join(missing)}; it has {', '.join(arrays)}"
        )
    cells = {}
    for column in with_progress(columns, f"{location}: cells of columns"):
        try:
            cells[column.name] = read(column, arrays[column.source], location)
        except pa.ArrowException as error:
            raise DataError(
                f"{location}: the column {column.source} cannot be read: {first_line(error)}; fix the file"
            ) from error
    return cells


def unknown_shares(columns: Sequence[Column], values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the share of each column's cells whose category did not occur in training, without shares of 0."""
    shares = {}
    for column in columns:
        if column.is_category and column.feature != "string_hashed":
            cells = values[column.name]
            is_known = pc.is_in(cells, pa.array([*column.names, None], cells.type))
            shares[column.name] = share(pc.invert(is_known))
    return {name: unknown for name, unknown in shares.items() if unknown}
