"""Parquet files: where they lie, the rows of each row group, and one row group as arrays."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hvtrain.data.source import LEAVE_OUT
from hvtrain.errors import DataError


@dataclass(frozen=True, order=True)
class RowGroup:
    """A part of a Parquet file that is read as a whole."""

    path: str
    number: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.path}, row group {self.number}"


@dataclass(frozen=True)
class Columns:
    """The two columns that are read, and the values allowed. `record.field` names the field of a struct."""

    image: str
    label: str
    image_shape: tuple[int, int, int]
    num_classes: int


class Rows(NamedTuple):
    """The content of a row group."""

    images: np.ndarray
    """Encoded images as objects [n], or pixels [n, h, w, c]."""
    labels: np.ndarray
    """int32 [n]; -1 in rows that cannot be used."""
    wrong: dict[int, str]
    """The rows that cannot be used, and why."""


def find_files(place: Path, split: str) -> list[Path]:
    """The Parquet files of a split by name: PLACE/SPLIT*.parquet, and all in the folder PLACE/SPLIT.

    Spark and others write a folder of that name instead of a file; names that begin with _ or . are not data.
    A place that is a file is the training part.
    """
    if place.is_file():
        return [place] if split == "train" else []
    found = []
    for path in sorted({place / split, *place.glob(f"{split}*.parquet")}):
        inside = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
        found += [file for file in inside if not any(part[0] in "_." for part in file.relative_to(place).parts)]
    return found


def read_footer(path: Path) -> tuple[list[RowGroup], pa.Schema]:
    """The row groups that hold rows, and the columns. Raises DataError if the file is damaged."""
    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
            rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    except (OSError, pa.ArrowException) as error:
        what = f"is no Parquet file, or a damaged one: {_first_line(error)}"
        raise DataError(f"{path} {what}; write it again, {LEAVE_OUT}") from error
    return [RowGroup(str(path), number, count) for number, count in enumerate(rows) if count], schema


def pixel_type(path: Path, schema: pa.Schema, columns: Columns) -> pa.DataType:
    """The type of the pixels, or of the bytes that encode them. Raises DataError if a column is missing or wrong."""
    image, label = _type_of(path, schema, columns.image), _type_of(path, schema, columns.label)
    if not pa.types.is_integer(label):
        raise DataError(f"{path}: column {columns.label} is {label}; labels must be whole numbers")
    pixel = image if is_encoded(image) else getattr(image, "value_type", pa.null())
    if not (is_encoded(pixel) or pa.types.is_integer(pixel) or pa.types.is_floating(pixel)):
        needed = "encoded images (binary) or lists of pixels are needed"
        raise DataError(f"{path}: column {columns.image} is {image}; {needed}")
    return pixel


def is_encoded(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def read_group(group: RowGroup, columns: Columns) -> Rows:
    """The rows of a row group. Raises DataError if it cannot be read at all."""
    try:
        with pq.ParquetFile(group.path) as file:
            # One thread: the cores are shared out among the ranks of a host, and pyarrow would take them all.
            table = file.read_row_group(group.number, columns=[columns.image, columns.label], use_threads=False)
    except (OSError, IndexError, pa.ArrowException) as error:
        raise DataError(f"{group} cannot be read: {_first_line(error)}") from error
    if table.num_rows != group.num_rows:
        raise DataError(f"{group} has {table.num_rows} rows and had {group.num_rows} before; it changed during the run")
    wrong: dict[int, str] = {}
    images, labels = _column(table, columns.image), _column(table, columns.label)
    _refuse(wrong, pc.is_null(labels), f"{columns.label} is null")
    values = labels.fill_null(0).to_numpy()
    for row in np.flatnonzero((values < 0) | (values >= columns.num_classes)):
        wrong[int(row)] = f"label {values[row]} is outside 0 ... {columns.num_classes - 1}"
    _refuse(wrong, pc.is_null(images), f"{columns.image} is null")
    is_list = hasattr(images.type, "value_type")
    pixels = _pixels(images, columns, wrong) if is_list else images.fill_null(b"").to_numpy()
    values = values.astype(np.int32)
    values[np.fromiter(wrong, np.int64)] = -1
    return Rows(pixels, values, wrong)


def _pixels(images: pa.ChunkedArray, columns: Columns, wrong: dict[int, str]) -> np.ndarray:
    """Pixels [n, h, w, c]; zeros in rows with too few or too many numbers."""
    num_pixels = int(np.prod(columns.image_shape))
    lengths = pc.list_value_length(images).fill_null(0).to_numpy()
    shape = " x ".join(map(str, columns.image_shape))
    for row in np.flatnonzero(lengths != num_pixels):
        wrong.setdefault(int(row), f"{lengths[row]} numbers in {columns.image}; image_shape {shape} needs {num_pixels}")
    whole = np.flatnonzero((lengths == num_pixels) & ~pc.is_null(images).to_numpy())
    if len(whole) < len(images):
        images = images.take(pa.array(whole))
    flat = pc.list_flatten(images)
    for row in np.unique(np.flatnonzero(pc.is_null(flat, nan_is_null=True).to_numpy()) // num_pixels):
        wrong.setdefault(int(whole[row]), "a pixel is null or NaN")
    values = flat.fill_null(0).to_numpy().reshape(-1, *columns.image_shape)
    if len(whole) == len(lengths):
        return values
    pixels = np.zeros([len(lengths), *columns.image_shape], values.dtype)
    pixels[whole] = values
    return pixels


def _refuse(wrong: dict[int, str], rows: pa.ChunkedArray, what: str) -> None:
    for row in np.flatnonzero(rows.to_numpy()):
        wrong.setdefault(int(row), what)


def _path(names: list[str], column: str) -> list[str]:
    """A column whose own name has dots comes before a field of a struct."""
    return [column] if column in names else column.split(".")


def _column(table: pa.Table, column: str) -> pa.ChunkedArray:
    name, *fields = _path(table.column_names, column)
    return pc.struct_field(table[name], fields) if fields else table[name]


def _type_of(path: Path, schema: pa.Schema, column: str) -> pa.DataType:
    known: pa.Schema | pa.StructType = schema
    found = None
    for name in _path(schema.names, column):
        names = [field.name for field in known] if isinstance(known, pa.Schema | pa.StructType) else []
        if name not in names:
            raise DataError(f"{path} has no column {column}; it has {', '.join(_names(schema))}")
        found = known.field(name).type
        known = found
    return found


def _names(schema: pa.Schema) -> Iterator[str]:
    """All columns, and the fields of those that are structs."""
    for field in schema:
        fields = [inner.name for inner in field.type] if pa.types.is_struct(field.type) else []
        yield from [f"{field.name}.{name}" for name in fields] or [field.name]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
