"""Finds Parquet files, counts the rows of their row groups, and reads a row group as arrays."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from hvtrain.data.description import listed
from hvtrain.data.formats.folders import files_below
from hvtrain.errors import DataError, first_line
from hvtrain.system.storage.cache import remote_file

SUFFIXES = (".parquet", ".pq")
# A file with a pixel above this cannot have the range of a file whose pixels are at most 1.
MIN_LARGE_PIXEL = 30


class RowGroup(NamedTuple):
    """A part of a Parquet file that is read as a whole."""

    path: str
    number: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.path}, row group {self.number}"


class Columns(NamedTuple):
    """The columns of images and labels, and their contents. `record.field` names the field of a struct."""

    image: str
    label: str
    image_shape: tuple[int, int, int]
    """Height, width, channels."""
    num_classes: int
    class_names: tuple[str, ...] = ()
    """The name of each class, if labels are text."""


def files_of(path: Path) -> list[Path]:
    """Lists the Parquet files in a folder, sorted; for a Parquet file, only the file itself."""
    # Spark and others write a folder named like a file, such as train.parquet.
    paths = [path] if path.is_file() else files_below(path)
    return [file for file in paths if file.suffix.lower() in SUFFIXES]


def open_parquet(path: str | Path) -> pq.ParquetFile:
    """Opens a Parquet file on this host or in object storage."""
    remote = remote_file(path)
    return pq.ParquetFile(remote.open_unbuffered() if remote else path)


def read_footer(path: Path) -> tuple[list[RowGroup], pa.Schema]:
    """Returns a file's row groups that hold rows, and its schema; reads only the footer.

    Raises:
        DataError: The file is damaged.
    """
    try:
        with open_parquet(path) as file:
            metadata = file.metadata
            schema = file.schema_arrow
            groups = [
                RowGroup(str(path), index, metadata.row_group(index).num_rows)
                for index in range(metadata.num_row_groups)
            ]
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is not a Parquet file, or is damaged: {first_line(error)}"
        ) from error
    # Groups without rows are legal, and there is nothing to read in them.
    return [group for group in groups if group.num_rows], schema


def pixel_type(path: Path, schema: pa.Schema, columns: Columns) -> pa.DataType:
    """Checks the types of both columns, and returns the type of the pixels or encoded images.

    Raises:
        DataError: A column is missing or has an unsuitable type.
    """
    # The schema comes from the footer, so a wrong column is refused before any row is read.
    image = type_of(path, schema, columns.image)
    label = type_of(path, schema, columns.label)
    if not types.is_integer(label) and not is_text(label):
        raise DataError(
            f"{path}: column {columns.label} is {label}; labels must be whole numbers or text"
        )

    pixel = image if is_encoded(image) else getattr(image, "value_type", pa.null())
    if not (is_encoded(pixel) or types.is_integer(pixel) or types.is_floating(pixel)):
        raise DataError(
            f"{path}: column {columns.image} is {image}; encoded images (binary) or lists of pixels are needed"
        )
    return pixel


def is_text(data_type: pa.DataType) -> bool:
    """True for strings, and for text categories as pandas writes them."""
    value_type = getattr(data_type, "value_type", data_type)
    is_list = types.is_nested(data_type)
    return not is_list and (types.is_string(value_type) or types.is_large_string(value_type))


def label_names(paths: Iterable[str], columns: Columns) -> set[str]:
    """Returns the distinct labels in files whose labels are text. Reads only the column of labels.

    Raises:
        DataError: A file is damaged.
    """
    names: set[str] = set()
    for path in paths:
        try:
            with open_parquet(path) as file:
                table = file.read(columns=[columns.label], use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path} cannot be read: {first_line(error)}; write it again"
            ) from error
        names.update(_column(table, columns.label).unique().drop_null().to_pylist())
    return names


def value_range(path: Path, columns: Columns) -> tuple[float, float] | None:
    """Returns the smallest and the largest pixel of a file from the statistics in its footer; None without them."""
    extremes = []
    with open_parquet(path) as file:
        metadata = file.metadata
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            is_image = column.path_in_schema.startswith(f"{columns.image}.")
            statistics = column.statistics
            # Statistics of float16 are bytes, and those of a text column named image.name are strings.
            if is_image and isinstance(getattr(statistics, "min", None), int | float):
                extremes += [float(statistics.min), float(statistics.max)]
    return (min(extremes), max(extremes)) if extremes else None


def check_ranges(ranges: Mapping[Path, tuple[float, float]]) -> None:
    """Raises DataError if value_range() shows that some files hold pixels of 0 ... 1 and others of 0 ... 255."""
    small = [path for path, (_, high) in ranges.items() if 0 < high <= 1]
    large = [path for path, (_, high) in ranges.items() if high > MIN_LARGE_PIXEL]
    if small and large:
        raise DataError(
            f"{small[0]} holds pixels up to {ranges[small[0]][1]:g} and {large[0]} up to "
            f"{ranges[large[0]][1]:g}; write both with the same range"
        )


def is_encoded(data_type: pa.DataType) -> bool:
    return types.is_binary(data_type) or types.is_large_binary(data_type)


def read_group(group: RowGroup, columns: Columns) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Reads the images and labels of a row group.

    Returns:
        Encoded images as objects [n], or pixels [n, h, w, c]; labels int32 [n], -1 in unusable rows; and the
        problem of each unusable row, by its index in the row group.

    Raises:
        DataError: The row group cannot be read at all, or has changed.
    """
    try:
        with open_parquet(group.path) as file:
            # One thread: the cores are divided among the ranks of a host,
            # and pyarrow would take them all.
            names = [columns.image, columns.label]
            table = file.read_row_group(group.number, columns=names, use_threads=False)
    except (OSError, IndexError, pa.ArrowException) as error:
        raise DataError(f"{group} cannot be read: {first_line(error)}") from error
    # Batches were planned from the footer's counts when the data set was opened.
    if table.num_rows != group.num_rows:
        raise DataError(
            f"{group} has {table.num_rows} rows and had {group.num_rows} before; it changed during the run"
        )

    # An unusable row keeps its place, with the label -1. So batches are cut as planned, and the
    # source replaces or leaves out such rows. If a row has several problems, the first is kept.
    problems: dict[int, str] = {}
    labels = _classes(_column(table, columns.label), columns, problems)
    images = _column(table, columns.image)
    for row in np.flatnonzero(pc.is_null(images)):
        problems.setdefault(int(row), f"{columns.image} is null")
    if hasattr(images.type, "value_type"):
        pixels = _pixels(images, columns, problems)
    else:
        pixels = images.fill_null(b"").to_numpy()

    labels[list(problems)] = -1
    return pixels, labels, problems


def _classes(labels: pa.ChunkedArray, columns: Columns, problems: dict[int, str]) -> np.ndarray:
    """Turns labels into class indices, int32 [n]; labels that are not classes become -1 and are added to `problems`."""
    if columns.class_names:
        # Files may hold large strings, or categories as pandas writes them.
        labels = labels.cast(pa.string())
        classes = pa.array(columns.class_names)
        problem = f"is none of {listed(columns.class_names)}"
    else:
        # The cast turns large uint64 labels into negative ones, never into a class.
        labels = labels.cast(pa.int64(), safe=False)
        classes = pa.array(range(columns.num_classes))
        problem = f"is outside 0 ... {columns.num_classes - 1}"
    indices = pc.index_in(labels, classes).fill_null(-1).to_numpy().astype(np.int32)
    for row in np.flatnonzero(indices < 0):
        label = labels[row].as_py()
        problems[int(row)] = (
            f"{columns.label} is null" if label is None else f"label {label} {problem}"
        )
    return indices


def _pixels(images: pa.ChunkedArray, columns: Columns, problems: dict[int, str]) -> np.ndarray:
    """Turns lists of numbers into pixels [n, h, w, c], and adds unusable rows to `problems`.

    A list of the wrong length becomes zeros.
    """
    num_pixels = int(np.prod(columns.image_shape))
    lengths = pc.list_value_length(images).fill_null(0).to_numpy()
    shape = " x ".join(map(str, columns.image_shape))
    is_whole = lengths == num_pixels
    for row in np.flatnonzero(~is_whole):
        problems.setdefault(
            int(row),
            f"{columns.image} has length {lengths[row]}; image_shape {shape} needs {num_pixels}",
        )

    # list_flatten() drops null rows, and a row of another length would shift all rows after it.
    if not is_whole.all():  # filter() copies.
        images = images.filter(pa.array(is_whole))
    flat = pc.list_flatten(images)
    is_unusable = ~pc.is_finite(flat).fill_null(False).to_numpy().reshape(-1, num_pixels)
    for row in np.flatnonzero(is_whole)[is_unusable.any(axis=1)]:
        problems.setdefault(int(row), "a pixel is null, NaN or infinite")

    values = flat.fill_null(0).to_numpy().reshape(-1, *columns.image_shape)
    if is_whole.all():
        return values
    pixels = np.zeros([len(lengths), *columns.image_shape], values.dtype)
    pixels[is_whole] = values
    return pixels


def _column(table: pa.Table, column: str) -> pa.ChunkedArray:
    """Returns a column, or the field of a struct; the field is null where an enclosing struct is null."""
    # A column whose own name has dots takes precedence over a field.
    return table[column] if column in table.column_names else _flatten_structs(table)[column]


def _flatten_structs(table: pa.Table) -> pa.Table:
    """Replaces the structs of a table with their fields, named `record.field`."""
    while any(map(types.is_struct, table.schema.types)):
        table = table.flatten()
    return table


def type_of(path: Path, schema: pa.Schema, column: str) -> pa.DataType:
    """Returns the type of a column, or of the field of a struct. Raises DataError if it is missing."""
    table = schema.empty_table()
    names = _flatten_structs(table).column_names
    if column not in (*names, *schema.names):
        raise DataError(f"{path} has no column {column}; it has {', '.join(names)}")
    return _column(table, column).type
