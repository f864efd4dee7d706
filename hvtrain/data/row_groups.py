"""Parquet files as files: where they lie, the rows of each row group, and one row group as arrays. No TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hvtrain.errors import DataError


@dataclass(frozen=True)
class RowGroup:
    """A piece of a Parquet file that is read as a whole."""

    path: str
    number: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.path}, row group {self.number}"


@dataclass(frozen=True)
class Columns:
    """The two columns that are read, and what they may hold. `record.field` names the field of a struct."""

    image: str
    label: str
    image_shape: tuple[int, int, int]
    num_classes: int


def find_files(place: Path, split: str) -> list[Path]:
    """The Parquet files of a split by name: PLACE/SPLIT*.parquet, and all in the folder PLACE/SPLIT.

    Spark and others write a folder of that name instead of a file; what begins with _ or . is theirs, not data.
    A place that is a file is the training part.
    """
    if place.is_file():
        return [place] if split == "train" else []
    found = []
    for path in sorted({place / split, *place.glob(f"{split}*.parquet")}):
        inside = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
        found += [file for file in inside if not any(part[0] in "_." for part in file.relative_to(place).parts)]
    return found


def read_footer(path: Path, columns: Columns) -> tuple[list[RowGroup], pa.DataType]:
    """The row groups that hold rows, and the type of their pixels, or of the bytes that encode them.

    Raises DataError for a file that is damaged, or whose rows lack a column.
    """
    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
            rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            groups = [RowGroup(str(path), number, count) for number, count in enumerate(rows) if count]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is no Parquet file, or a damaged one: {_first_line(error)}; write it again") from error
    if not groups:
        return [], pa.null()
    image, label = _type_of(path, schema, columns.image), _type_of(path, schema, columns.label)
    if not pa.types.is_integer(label):
        raise DataError(f"{path}: column {columns.label} is {label}; labels must be whole numbers")
    pixel = image if is_encoded(image) else getattr(image, "value_type", pa.null())
    if not (is_encoded(pixel) or pa.types.is_integer(pixel) or pa.types.is_floating(pixel)):
        raise DataError(
            f"{path}: column {columns.image} is {image}; encoded images (binary) or lists of pixels are needed"
        )
    return groups, pixel


def is_encoded(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def read_group(group: RowGroup, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels int32 [n] of a row group: encoded ones as objects [n], pixels as they are [n, h, w, c].

    Raises DataError with the file, the row group and the row at fault.
    """
    try:
        with pq.ParquetFile(group.path) as file:
            # One thread: the cores are shared out among the ranks of a host, and pyarrow would take them all.
            table = file.read_row_group(group.number, columns=[columns.image, columns.label], use_threads=False)
    except (OSError, IndexError, pa.ArrowException) as error:
        raise DataError(f"{group} cannot be read: {_first_line(error)}; write the file again") from error
    if table.num_rows != group.num_rows:
        raise DataError(
            f"{group} has {table.num_rows} rows and had {group.num_rows} before; leave files alone in a run"
        )
    labels = _column(table, columns.label)
    _refuse(group, pc.is_null(labels), f"{columns.label} is null; drop that row")
    labels = labels.to_numpy()
    outside = (labels < 0) | (labels >= columns.num_classes)
    for row in np.flatnonzero(outside)[:1]:
        raise DataError(
            f"{group}, row {row}: label {labels[row]} is outside 0 ... {columns.num_classes - 1}; "
            "mend the labels or say how many classes there are"
        )
    images = _column(table, columns.image)
    _refuse(group, pc.is_null(images), f"{columns.image} is null; drop that row")
    is_list = hasattr(images.type, "value_type")
    return _pixels(group, images, columns) if is_list else images.to_numpy(), labels.astype(np.int32)


def _pixels(group: RowGroup, images: pa.ChunkedArray, columns: Columns) -> np.ndarray:
    num_pixels = int(np.prod(columns.image_shape))
    lengths = pc.list_value_length(images)
    shape = " x ".join(map(str, columns.image_shape))
    for row in np.flatnonzero(lengths.to_numpy() != num_pixels)[:1]:
        raise DataError(
            f"{group}, row {row}: {lengths[row]} numbers in {columns.image}; image_shape {shape} needs {num_pixels}"
        )
    flat = pc.list_flatten(images)
    wrong = pc.is_null(flat, nan_is_null=True)
    for place in np.flatnonzero(wrong.to_numpy())[:1]:
        raise DataError(f"{group}, row {place // num_pixels}: a pixel is null or NaN; mend or drop that row")
    return flat.to_numpy().reshape(-1, *columns.image_shape)


def _refuse(group: RowGroup, wrong: pa.ChunkedArray, what: str) -> None:
    for row in np.flatnonzero(wrong.to_numpy())[:1]:
        raise DataError(f"{group}, row {row}: {what}")


def _path(names: list[str], column: str) -> list[str]:
    """A column whose own name has dots comes before a field."""
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
