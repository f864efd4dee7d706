"""The schema of a table: which columns are features and what they are, the target, and what is left out.

It is inferred from the training table, kept in the run folder, and holds for every later table.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hvtrain.data.formats.cell_texts import has_decimal_commas
from hvtrain.data.formats.columns import DATE_PARTS, SAMPLE_ROWS, Cells, Column, infer, plain, read
from hvtrain.errors import ConfigError, DataError

KINDS = {
    "float": "number",
    "float_normalized": "number",
    "float_discretized": "number",
    "integer_categorical": "integer",
    "string_categorical": "name",
    "string_hashed": "name",
}
"""Features, and the kind of column that each takes. Dates and vectors are numbers too."""
MISSING = ("refuse", "drop", "median", "most_frequent", "indicator")
DATES = ("number", "parts", "drop")

INDEX_NAME = re.compile(r"Unnamed: \d+|__index_level_\d+__|")
ID_NAME = re.compile(r"(.*[_. -])?(id|uuid|guid|index|row_?number)", re.IGNORECASE)
FEW_NAMES = 20
"""So many names are features, however few rows there are."""
MAX_NAMES = 1000
"""More names of a column share as many features, by a hash."""
NEARLY_UNIQUE = 0.9
"""The share of rows with a name of their own from which a column teaches nothing."""
MAX_WHOLE_CLASSES = 100
"""More whole numbers than that are hardly classes."""
ROWS_PER_CLASS = 10
"""With fewer rows for each class, the target is hardly a class."""


@dataclass(frozen=True)
class Settings:
    """What the user has set about columns; see Table."""

    target: str
    target_is: str | None = None
    features: Mapping[str, str] | None = None
    crosses: Sequence[tuple[str, ...]] = ()
    missing: str | Mapping[str, str] = "refuse"
    drop: Sequence[str] = ()
    id: str | None = None
    dates: str = "number"
    decimal: str | None = None
    thousands: str | None = None

    def __post_init__(self) -> None:
        if self.target_is not in (None, "class", "number"):
            raise ConfigError(f"dataset.target_is={self.target_is} is not one of class, number, null")
        if self.dates not in DATES:
            raise ConfigError(f"dataset.dates={self.dates} is not one of {', '.join(DATES)}")
        for name, value, choices in (("decimal", self.decimal, ".,"), ("thousands", self.thousands, ",. '")):
            if value is not None and value not in choices:
                raise ConfigError(f"dataset.{name}={value!r} is not one of {' '.join(map(repr, choices))}")
        by_column = self.missing if isinstance(self.missing, Mapping) else {"": self.missing}
        for action in by_column.values():
            if action not in MISSING:
                raise ConfigError(f"dataset.missing={action} is not one of {', '.join(MISSING)}")

    def missing_of(self, name: str) -> str:
        if isinstance(self.missing, str):
            return self.missing
        return self.missing.get(name, "refuse")


@dataclass(frozen=True)
class Schema:
    """Columns of a table, by what they are to a model."""

    columns: Sequence[Column]
    target: Column
    classes: Sequence[str] = ()
    """Names of the target's classes; none: it is a number."""
    crosses: Sequence[Sequence[str]] = ()
    id: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Columns that are no features, and why."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Schema":
        fields = json.loads(text)
        columns = [Column(**column) for column in fields.pop("columns")]
        return cls(columns, Column(**fields.pop("target")), **fields)


def infer_schema(table: pa.Table, settings: Settings, name: str) -> Schema:
    """Returns what the columns of a training table are, without statistics.

    Args:
        table: as read_table() gives it.
        settings: of the user, which go before what the cells show.
        name: of the table, for messages.

    Raises:
        ConfigError: A setting does not fit the table.
        DataError: No column is left, or one that the user wants cannot be used.
    """
    arrays = {column: plain(table[column]) for column in _checked_names(table, settings, name)}
    inferred = _inferred(arrays, settings)

    target, classes = _infer_target(inferred.pop(settings.target), arrays.pop(settings.target), settings)
    columns: list[Column] = []
    left_out: dict[str, str] = {}
    for column, result in inferred.items():
        if settings.features is not None:
            columns += _parts(_as_set(column, result, settings, name), arrays[column], settings)
            continue
        reason = _reason_against(result, column, arrays[column], settings)
        if reason is not None:
            left_out[column] = reason
        elif isinstance(result, Column):
            columns += _parts(_by_default(result, arrays[column]), arrays[column], settings)

    if settings.id is not None:
        left_out[settings.id] = "dataset.id"
    if not columns:
        reasons = ", ".join(f"{column} ({reason})" for column, reason in left_out.items())
        raise DataError(f"{name} has no column to learn from but {settings.target}; left out: {reasons or 'none'}")
    _check_crosses(columns, settings)
    return Schema(columns, target, classes, [list(pair) for pair in settings.crosses], settings.id, left_out)


def _inferred(arrays: Mapping[str, pa.Array], settings: Settings) -> dict[str, Column | str]:
    """Returns infer() of each column, with the decimal sign of the file."""
    texts = [array for array in arrays.values() if pa.types.is_string(array.type)]
    # A file with types means its text to be text.
    is_typed = len(texts) < len(arrays)
    decimal = settings.decimal
    if decimal is None and has_decimal_commas(texts, SAMPLE_ROWS):
        decimal = ","

    results: dict[str, Column | str] = {}
    for name, array in arrays.items():
        result = infer(name, array, decimal, settings.thousands, is_typed)
        # A column may be written unlike the others of its file.
        if isinstance(result, Column) and result.kind == "name" and decimal != settings.decimal:
            result = infer(name, array, settings.decimal, settings.thousands, is_typed)
        results[name] = result
    return results


def _checked_names(table: pa.Table, settings: Settings, name: str) -> Iterator[str]:
    """Yields the columns that are looked at. Raises ConfigError for settings that name others."""
    names = table.column_names
    needed = {f"target={settings.target}": settings.target}
    needed |= {f"features.{column}": column for column in settings.features or ()}
    needed |= {f"drop={column}": column for column in settings.drop}
    if settings.id is not None:
        needed[f"id={settings.id}"] = settings.id
    if isinstance(settings.missing, Mapping):
        needed |= {f"missing.{column}": column for column in settings.missing}
    for setting, column in needed.items():
        if column not in names:
            raise ConfigError(f"dataset.{setting} is no column of {name}; it has {', '.join(names)}")

    for column, feature in (settings.features or {}).items():
        if feature not in KINDS:
            raise ConfigError(f"dataset.features.{column}={feature} is not one of {', '.join(KINDS)}")
        if feature == "integer_categorical" and settings.missing_of(column) == "indicator":
            raise ConfigError(f"dataset.missing.{column}=indicator needs names; make it string_categorical")

    unused = {*settings.drop, settings.id} - {settings.target}
    if settings.features is not None:
        unused = {*names} - {*settings.features, settings.target}
    # A gap in a column that is not used is no gap.
    yield from (column for column in names if column not in unused)


def _as_set(name: str, inferred: Column | str, settings: Settings, table: str) -> Column:
    """Returns a column as the user has set it."""
    feature = (settings.features or {})[name]
    kind = KINDS[feature]
    if isinstance(inferred, str):
        raise DataError(f"{table}: the column {name} is {inferred}; leave it out of dataset.features")
    if inferred.kind == "vector" and feature not in ("float", "float_normalized"):
        raise ConfigError(f"dataset.features.{name}={feature} takes no vectors; choose float or float_normalized")
    if kind == "number" and inferred.kind in ("date", "vector"):
        kind = inferred.kind
    return replace(inferred, kind=kind, feature=feature)


def _reason_against(inferred: Column | str, name: str, values: pa.Array, settings: Settings) -> str | None:
    """Returns why a column is no feature by default; None if it is one."""
    if INDEX_NAME.fullmatch(name):
        return "an index"
    if isinstance(inferred, str):
        return inferred
    if inferred.kind == "date" and settings.dates == "drop":
        return "a date"

    is_name = inferred.kind == "name"
    if not is_name and not (inferred.kind == "number" and ID_NAME.fullmatch(name)):
        return None
    num_filled = len(values) - values.null_count
    num_distinct = pc.count_distinct(values, mode="only_valid").as_py()
    if num_distinct <= FEW_NAMES:
        return None
    if num_distinct == num_filled:
        return "unique in every row"
    if is_name and num_distinct >= NEARLY_UNIQUE * num_filled:
        return f"{num_distinct:,} names in {num_filled:,} rows"
    return None


def _by_default(column: Column, values: pa.Array) -> Column:
    if column.kind != "name":
        return replace(column, feature="float_normalized")
    if pc.count_distinct(values, mode="only_valid").as_py() > MAX_NAMES:
        return replace(column, feature="string_hashed")
    return replace(column, feature="string_categorical")


def _parts(column: Column, values: pa.Array, settings: Settings) -> list[Column]:
    """Returns the column with its treatment of gaps; or, of a date, a column for each part of it."""
    column = replace(column, missing=settings.missing_of(column.name))
    if column.kind != "date" or settings.dates != "parts":
        return [column]
    parts = [replace(column, name=f"{column.name}.{part}", part=part) for part in DATE_PARTS]
    # Dates without times have no hour.
    hours = read(parts[-1], values, column.name).values
    if not np.nan_to_num(hours).any():
        parts.pop()
    return parts


def _check_crosses(columns: Sequence[Column], settings: Settings) -> None:
    categories = {column.name for column in columns if column.is_category}
    for name in (name for pair in settings.crosses for name in pair):
        if name not in categories:
            raise ConfigError(f"dataset.crosses names {name}, which is no categorical feature; make it one")


def _infer_target(inferred: Column | str, values: pa.Array, settings: Settings) -> tuple[Column, list[str]]:
    """Returns the target, and the names of its classes; none if it is a number."""
    name = settings.target
    if isinstance(inferred, str):
        raise ConfigError(f"dataset.target={name} is {inferred}; a column of names or numbers is needed")
    if inferred.kind == "vector":
        raise ConfigError(f"dataset.target={name} is a vector; a column of names or numbers is needed")

    is_whole = inferred.kind == "number" and _is_whole(inferred, values)
    # Fractions are numbers; names and whole numbers are classes.
    is_class = inferred.kind == "name" or is_whole
    if settings.target_is:
        is_class = settings.target_is == "class"
    if not is_class:
        if inferred.kind == "name":
            example = next(iter(values.drop_null()[:1].to_pylist()), None)
            raise ConfigError(f"dataset.target_is=number and the column {name} holds {example!r}")
        return replace(inferred, feature="float", missing=_target_missing(settings)), []

    column = replace(inferred, kind="name", feature="string_categorical", missing=_target_missing(settings))
    classes = pc.unique(read(column, values, name).values.drop_null()).to_pylist()
    # 10 comes after 9.
    classes.sort(key=float if inferred.kind == "number" else None)
    num_rows = len(values) - values.null_count
    limit = max(FEW_NAMES, num_rows // ROWS_PER_CLASS)
    if is_whole:
        limit = min(limit, MAX_WHOLE_CLASSES)
    if len(classes) > limit and settings.target_is is None:
        raise ConfigError(
            f"dataset.target={name} has {len(classes):,} values in {num_rows:,} rows, too many for classes; "
            "set dataset.target_is=number with task=regression, or dataset.target_is=class"
        )
    return replace(column, names=classes), classes


def _target_missing(settings: Settings) -> str:
    # Nobody learns from a row without a target.
    is_refused = settings.missing_of(settings.target) == "refuse"
    return "refuse" if is_refused else "drop"


def _is_whole(column: Column, values: pa.Array) -> bool:
    if pa.types.is_integer(values.type):
        return True
    if not pa.types.is_string(values.type) or column.unit:
        return False
    numbers = read(column, values, column.name).values
    has_sign = pc.any(pc.match_substring_regex(values, f"[{re.escape(column.decimal)}eE]")).as_py()
    return not has_sign and bool((numbers == np.floor(numbers))[~np.isnan(numbers)].all())


def read_cells(columns: Sequence[Column], table: pa.Table, where: str) -> dict[str, Cells]:
    """Reads columns of a table as the schema has them, by name.

    Raises:
        DataError: A column is missing, or holds something else than in training.
    """
    missing = sorted({column.source for column in columns} - {*table.column_names})
    if missing:
        raise DataError(f"{where} lacks the column {', '.join(missing)}; it has {', '.join(table.column_names)}")
    cells = {}
    # The parts of a date share a column of the file.
    arrays = {source: plain(table[source]) for source in {column.source for column in columns}}
    for column in columns:
        try:
            cells[column.name] = read(column, arrays[column.source], where)
        except pa.ArrowException as error:
            problem = str(error).splitlines()[0]
            raise DataError(f"{where}: the column {column.source} cannot be read: {problem}; fix the file") from error
    return cells


def unknown_share(column: Column, values: Any) -> float:
    """Returns the share of cells whose name the training table did not have."""
    if not column.is_category or column.feature == "string_hashed" or not len(values):
        return 0.0
    known = pc.is_in(values, pa.array(column.names, values.type))
    return 1 - pc.mean(pc.or_(known, values.is_null()).cast(pa.float64())).as_py()
