"""Parquet files: their paths on disk, the rows of each row group, and one row group as arrays."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hvtrain.data.description import listed
from hvtrain.data.formats.folders import SPLIT_NAMES, left_out, split_files, visible
from hvtrain.data.source import LEAVE_OUT
from hvtrain.errors import DataError

SUFFIXES = (".parquet", ".pq")
RANGE_FACTOR = 30
"""Pixels up to 1 in one file and above this in another are of two ranges."""


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
    """The two columns that are read, and their values. `record.field` names the field of a struct."""

    image: str
    label: str
    image_shape: tuple[int, int, int]
    num_classes: int
    class_names: tuple[str, ...] = ()
    """By class, if labels are text."""


class Rows(NamedTuple):
    """The content of a row group."""

    images: np.ndarray
    """Encoded images as objects [n], or pixels [n, h, w, c]."""
    labels: np.ndarray
    """int32 [n]; -1 in unusable rows."""
    problems: dict[int, str]
    """The problem of each unusable row."""


def find_files(folder: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """Finds the Parquet files of each split by name.

    They are FOLDER/SPLIT*.parquet, and all in the folder FOLDER/SPLIT. If `folder` is a file, it is
    the training split.

    Returns:
        The files by split, and a warning about those of no split, if there are any.
    """
    if folder.is_file():
        return {"train": [folder]}, []

    entries = [path for path in visible(folder) if path.suffix.lower() in SUFFIXES]
    names = {name for aliases in SPLIT_NAMES.values() for name in aliases}
    entries += [path for path in folder.glob("*") if path.name.lower() in names]
    splits = split_files(entries)
    used = [path for paths in splits.values() for path in paths]
    return {split: _parts(folder, paths) for split, paths in splits.items()}, left_out(entries, used)


def _parts(folder: Path, paths: Iterable[Path]) -> list[Path]:
    files = []
    for path in paths:
        # Spark and others write a folder of that name instead of a file.
        parts = [path] if path.is_file() else sorted(path.rglob("*"))
        for part in parts:
            # Names that begin with _ or . are those of logs and unfinished files.
            names = part.relative_to(folder).parts
            is_data = part == path or part.suffix.lower() in SUFFIXES
            if is_data and part.is_file() and not any(name.startswith(("_", ".")) for name in names):
                files.append(part)
    return files


def read_footer(path: Path) -> tuple[list[RowGroup], pa.Schema]:
    """Reads the row groups that hold rows, and the schema.

    Raises:
        DataError: The file is damaged.
    """
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            schema = file.schema_arrow
            indices = range(metadata.num_row_groups)
            counts = [metadata.row_group(index).num_rows for index in indices]
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is not a Parquet file, or is damaged: {_first_line(error)}; write it again, {LEAVE_OUT}"
        ) from error
    # Groups without rows are legal, and there is nothing to read in them.
    groups = [RowGroup(str(path), index, count) for index, count in enumerate(counts) if count]
    return groups, schema


def pixel_type(path: Path, schema: pa.Schema, columns: Columns) -> pa.DataType:
    """The type of the pixels, or of the bytes that encode them.

    Raises:
        DataError: A column is missing or has a type that does not fit.
    """
    # The footer holds the types, so a wrong column is refused before any row is read.
    image = _type_of(path, schema, columns.image)
    label = _type_of(path, schema, columns.label)
    if not pa.types.is_integer(label) and not is_text(label):
        raise DataError(f"{path}: column {columns.label} is {label}; labels must be whole numbers or text")

    pixel = image if is_encoded(image) else getattr(image, "value_type", pa.null())
    if not (is_encoded(pixel) or pa.types.is_integer(pixel) or pa.types.is_floating(pixel)):
        raise DataError(
            f"{path}: column {columns.image} is {image}; encoded images (binary) or lists of pixels are needed"
        )
    return pixel


def is_text(data_type: pa.DataType) -> bool:
    """True for strings, and for categories as pandas writes them."""
    value_type = getattr(data_type, "value_type", data_type)
    is_list = pa.types.is_nested(data_type)
    return not is_list and (pa.types.is_string(value_type) or pa.types.is_large_string(value_type))


def label_type(path: Path, columns: Columns) -> pa.DataType:
    return _type_of(path, pq.read_schema(path), columns.label)


def read_labels(paths: Iterable[str], columns: Columns) -> pa.ChunkedArray:
    """Reads the labels of some files, and no other column.

    Raises:
        DataError: A file is damaged.
    """
    chunks: list[pa.Array] = []
    for path in paths:
        try:
            table = pq.ParquetFile(path).read(columns=[columns.label], use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {_first_line(error)}; write it again, {LEAVE_OUT}") from error
        chunks += _plain(_column(table, columns.label)).chunks
    return pa.chunked_array(chunks)


def value_range(path: Path, columns: Columns) -> tuple[float, float] | None:
    """The smallest and the largest pixel of a file by the statistics in its footer, if it has any."""
    lows = []
    highs = []
    metadata = pq.read_metadata(path)
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            is_image = column.path_in_schema.startswith(f"{columns.image}.")
            if is_image and column.statistics is not None and column.statistics.has_min_max:
                lows.append(float(column.statistics.min))
                highs.append(float(column.statistics.max))
    return (min(lows), max(highs)) if lows else None


def check_ranges(ranges: Mapping[Path, tuple[float, float]]) -> None:
    """Raises DataError if files hold pixels of 0 ... 1 and of 0 ... 255, by their value_range()."""
    small = [path for path, (_, high) in ranges.items() if 0 < high <= 1]
    large = [path for path, (_, high) in ranges.items() if high > RANGE_FACTOR]
    if small and large:
        raise DataError(
            f"{small[0]} holds pixels up to {ranges[small[0]][1]:g} and {large[0]} up to "
            f"{ranges[large[0]][1]:g}; write both in one range"
        )


def is_encoded(data_type: pa.DataType) -> bool:
    return pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type)


def read_group(group: RowGroup, columns: Columns) -> Rows:
    """Reads a row group.

    Raises:
        DataError: It cannot be read at all.
    """
    try:
        with pq.ParquetFile(group.path) as file:
            # One thread: the cores are shared out among the ranks of a host, and pyarrow would take
            # them all.
            names = [columns.image, columns.label]
            table = file.read_row_group(group.number, columns=names, use_threads=False)
    except (OSError, IndexError, pa.ArrowException) as error:
        raise DataError(f"{group} cannot be read: {_first_line(error)}") from error
    # Batches were planned with the footer's counts, when the data set was opened.
    if table.num_rows != group.num_rows:
        raise DataError(f"{group} has {table.num_rows} rows and had {group.num_rows} before; it changed during the run")

    # A row that cannot be used keeps its place, with the label -1. Batches are then cut as planned,
    # and the source replaces or leaves out such rows. Of several problems the first is kept.
    problems: dict[int, str] = {}
    images = _column(table, columns.image)
    labels = _plain(_column(table, columns.label))

    _note(problems, pc.is_null(labels), f"{columns.label} is null")
    if columns.class_names:
        values = pc.index_in(labels, pa.array(columns.class_names, labels.type)).fill_null(-1).to_numpy()
        for row in np.flatnonzero(values < 0):
            problems.setdefault(int(row), f"label {labels[row]} is none of {listed(columns.class_names)}")
    else:
        values = labels.fill_null(0).to_numpy()
        for row in np.flatnonzero((values < 0) | (values >= columns.num_classes)):
            problems[int(row)] = f"label {values[row]} is outside 0 ... {columns.num_classes - 1}"

    _note(problems, pc.is_null(images), f"{columns.image} is null")
    if hasattr(images.type, "value_type"):
        pixels = _pixels(images, columns, problems)
    else:
        pixels = images.fill_null(b"").to_numpy()

    values = values.astype(np.int32)
    values[list(problems)] = -1
    return Rows(pixels, values, problems)


def _pixels(images: pa.ChunkedArray, columns: Columns, problems: dict[int, str]) -> np.ndarray:
    """Turns lists of numbers into pixels [n, h, w, c], with zeros in rows of another length."""
    num_pixels = int(np.prod(columns.image_shape))
    lengths = pc.list_value_length(images).fill_null(0).to_numpy()
    shape = " x ".join(map(str, columns.image_shape))
    for row in np.flatnonzero(lengths != num_pixels):
        problems.setdefault(
            int(row),
            f"{lengths[row]} numbers in {columns.image}; image_shape {shape} needs {num_pixels}",
        )

    # list_flatten() leaves out null rows, and rows of another length would shift all after them.
    whole_rows = np.flatnonzero((lengths == num_pixels) & ~pc.is_null(images).to_numpy())
    if len(whole_rows) < len(images):  # take() copies.
        images = images.take(pa.array(whole_rows))
    flat = pc.list_flatten(images)
    is_missing = pc.is_null(flat, nan_is_null=True).to_numpy()
    for index in np.unique(np.flatnonzero(is_missing) // num_pixels):
        problems.setdefault(int(whole_rows[index]), "a pixel is null or NaN")

    values = flat.fill_null(0).to_numpy().reshape(-1, *columns.image_shape)
    if len(whole_rows) == len(lengths):
        return values
    pixels = np.zeros([len(lengths), *columns.image_shape], values.dtype)
    pixels[whole_rows] = values
    return pixels


def _note(problems: dict[int, str], rows: pa.ChunkedArray, problem: str) -> None:
    """Notes the problem of rows, unless they have one already."""
    for row in np.flatnonzero(rows.to_numpy()):
        problems.setdefault(int(row), problem)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns the texts of a column that pandas wrote as categories; other columns as they are."""
    is_categories = pa.types.is_dictionary(column.type)
    return column.cast(column.type.value_type) if is_categories else column


def _column(table: pa.Table, column: str) -> pa.ChunkedArray:
    """A column, or the field of a struct; its parents' nulls count as its own."""
    if column in table.column_names:
        return table[column]
    name, *fields = column.split(".")
    return pc.struct_field(table[name], fields)


def _type_of(path: Path, schema: pa.Schema, column: str) -> pa.DataType:
    """The type of a column, or of the field of a struct. Raises DataError if there is none."""
    fields = dict(_fields(schema))
    # A column whose own name has dots comes before a field.
    types = {**fields, **{field.name: field.type for field in schema}}
    if column not in types:
        raise DataError(f"{path} has no column {column}; it has {', '.join(fields)}")
    return types[column]


def _fields(parent: Iterable[pa.Field], prefix: str = "") -> Iterator[tuple[str, pa.DataType]]:
    """Names and types of all columns; instead of a struct, those of its fields."""
    for field in parent:
        if pa.types.is_struct(field.type):
            yield from _fields(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field.type


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
