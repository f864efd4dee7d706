"""Reads CSV and Parquet tables, for dataset=table, for columns of text, and for predict input=.

The first bytes of a file decide its format, not its name. The cells of a CSV file stay text, since only
all cells of a column together can tell numbers from names; see columns.py.
"""

import bz2
import gzip
import lzma
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet

from hvtrain.data.formats.csv_files import read_csv
from hvtrain.data.formats.folders import files_below, is_junk, split_of
from hvtrain.data.manifest import user_path
from hvtrain.errors import DataError, UserError, first_line

NAME = re.compile(r".+\.(csv|tsv|tab|parquet|pq)(\.(gz|bz2|xz|zst|zip))?", re.IGNORECASE)
COMPRESSIONS: dict[bytes, Callable[[pa.Buffer], Any]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\0": lzma.decompress,
    b"\x28\xb5\x2f\xfd": lambda data: pa.input_stream(data, compression="zstd").read(),
}
# The first bytes of files that people mistake for tables.
OTHER_FORMATS = {
    b"ARROW1\0": "a Feather file",
    b"ORC": "an ORC file",
    b"\xd0\xcf\x11\xe0": "an old Excel file",
    b"\x89HDF": "an HDF5 file",
    b"SQLite format 3\0": "a database",
    b"\x93NUMPY": "a NumPy array",
    b"<?xml": "XML",
    b'{"': "JSON",
    b'[{"': "JSON",
    b"<!": "a web page",
    b"<html": "a web page",
}
# The offset of the magic bytes in a tar header.
TAR_MAGIC_OFFSET = 257
# Marks the columns that come from the names of folders.
PARTITION = b"partition"
READ_BYTES = 2**18
# Number of Parquet columns in each read. For a table of 5,000 columns and 1.9 GB, Arrow takes 6.2 GB
# of memory to read all columns together, and 3.3 GB in blocks of this size (pyarrow 26).
COLUMNS_AT_ONCE = 100


def is_table(path: Path) -> bool:
    """True for a path with the suffix of a table, compressed or not."""
    return NAME.fullmatch(path.name) is not None


def table_files(location: str | Path, setting: str) -> list[tuple[Path, dict[str, str]]]:
    """Lists the files of a table, each with the columns in its folders' names, such as year=2024/a.parquet.

    Args:
        location: A file, a folder with tables in it, or a glob pattern.
        setting: The setting that names it, for messages.

    Raises:
        DataError: There is no table, or a folder for dataset.file also holds tables of other splits.
    """
    path = user_path(location)
    if path.is_file():
        return [(path, {})]

    # Only folders below `base` can name columns. Those above it say nothing about the rows.
    files = []
    base = path
    while {*str(base)} & {*"*?["}:
        base = base.parent
    if path.is_dir():
        base = path
        files = [file for file in files_below(path) if is_table(file)]
        if setting == "dataset.file":
            _refuse_other_splits([file.relative_to(path) for file in files], location)
    elif base != path:
        pattern = path.relative_to(base)
        names_hidden = any(part.startswith(".") and part != ".." for part in pattern.parts)
        # Unlike a shell's, these patterns match hidden files too, such as Jupyter's copies.
        files = [
            file
            for file in base.glob(str(pattern))
            if file.is_file()
            and (names_hidden or not any(map(is_junk, file.relative_to(base).parts)))
        ]
    if not files:
        raise DataError(
            f"{setting}={location} names no table; give a .csv or .parquet file, or a folder of them"
        )
    return [(file, dict(_partitions_of(file.relative_to(base)))) for file in sorted(files)]


def _refuse_other_splits(files: Sequence[Path], location: str | Path) -> None:
    """Raises DataError if the training table's files, by their names, include those of other splits."""
    by_split = {split_of(file): file for file in reversed(files)}
    if len(by_split) > 1 and by_split.keys() - {"", "train"}:
        names = ", ".join(sorted(map(str, by_split.values())))
        raise DataError(
            f"dataset.file={location} holds tables of several splits ({names}), which would all be trained on; "
            "give each split its own setting: dataset.file, dataset.validation_file or dataset.test_file"
        )


def _partitions_of(file: Path) -> Iterator[tuple[str, str]]:
    for part in file.parts[:-1]:
        if "=" in part:
            name, value = map(unquote, part.split("=", 1))
            yield name, value.replace("__HIVE_DEFAULT_PARTITION__", "")


def read_table(
    locations: str | Path | Sequence[str | Path],
    setting: str,
    column: str | None = None,
    **text_format: str | None,
) -> pa.Table:
    """Reads a table from one or several files, concatenating their rows.

    Args:
        locations: As in table_files(), one or several.
        setting: The setting that names them, for messages.
        column: The only column that is needed; a Parquet file's other columns are not read. None: all.
        text_format: Delimiter and encoding of CSV files. None: detected from the file.

    Raises:
        DataError: A file is missing, cannot be read, or has other columns than the first one.
    """
    if isinstance(locations, str | Path):
        locations = [locations]
    files = [file for location in locations for file in table_files(location, setting)]

    tables = []
    for path, partitions in files:
        try:
            table = _read(path, column, **text_format)
        except UserError:
            raise
        except Exception as error:  # Arrow, csv and decompression raise errors of many types.
            raise DataError(f"{path} cannot be read: {first_line(error)}; fix the file") from error
        for name, value in partitions.items():
            if name not in table.column_names:
                field = pa.field(name, pa.string(), metadata={PARTITION: b""})
                table = table.append_column(field, pa.repeat(value, table.num_rows))
        for name, count in Counter(table.column_names).items():
            if count > 1:
                raise DataError(f"{path} has {count} columns named {name}; rename them")
        tables.append(table)
        # The order of columns may differ between files.
        for name in sorted({*table.column_names} ^ {*tables[0].column_names}):
            lacking = files[0][0] if name in table.column_names else path
            raise DataError(
                f"{lacking} lacks the column {name}, which another file of the table has; add it"
            )

    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"the columns of the files of {setting} differ in type: {first_line(error)}; convert them"
        ) from error


def partitions_in(table: pa.Table) -> set[str]:
    """Returns the names of a table's columns that come from the names of folders, such as year=2024."""
    return {field.name for field in table.schema if PARTITION in (field.metadata or {})}


def _read(path: Path, column: str | None, **text_format: str | None) -> pa.Table:
    if path.stat().st_size == 0:
        raise ValueError("it is empty")
    stored = pa.memory_map(str(path)).read_buffer()
    data = _decompress(stored)
    begin = data[:16].to_pybytes()
    for magic, format_name in OTHER_FORMATS.items():
        if begin.startswith(magic):
            raise DataError(f"{path} is {format_name}, and CSV or Parquet is needed; convert it")
    if data[TAR_MAGIC_OFFSET : TAR_MAGIC_OFFSET + 5].to_pybytes() == b"ustar":
        raise DataError(f"{path} is a tar archive, and CSV or Parquet is needed; unpack it")
    if not begin.startswith(b"PAR1"):
        return read_csv(data, **text_format)

    # Read by path, since the pages of the memory map would count as this process's memory once read.
    source = str(path) if data is stored else pa.BufferReader(data)
    # Spark's timestamps would wrap around in nanoseconds: 9999-12-31 would be in 1816.
    file = pa.parquet.ParquetFile(source, buffer_size=READ_BYTES, coerce_int96_timestamp_unit="us")
    names = file.schema_arrow.names
    if (column is not None and column not in names) or len({*names}) < len(names):
        # The caller refuses such a table, and needs only its names.
        return file.schema_arrow.empty_table()
    columns: dict[str, pa.ChunkedArray] = {}
    needed = names if column is None else [column]
    for start in range(0, len(needed), COLUMNS_AT_ONCE):
        block_names = needed[start : start + COLUMNS_AT_ONCE]
        block = file.read(block_names)
        # Asked for a column `a`, pyarrow also returns a column `a.b`.
        columns |= {name: block[name] for name in block_names}
    return pa.table(columns)


def _decompress(data: pa.Buffer) -> pa.Buffer:
    """Decompresses a file's bytes; returns them unchanged if they are not compressed."""
    start = data[:6].to_pybytes()
    for magic, decompress in COMPRESSIONS.items():
        if start.startswith(magic):
            return pa.py_buffer(decompress(data))
    if not start.startswith(b"PK\x03\x04"):
        return data

    with zipfile.ZipFile(pa.BufferReader(data)) as archive:
        names = [
            name
            for name in archive.namelist()
            if is_table(Path(name)) and not name.startswith("__MACOSX")
        ]
        if len(names) != 1:
            raise ValueError(
                f"it is a zip or Excel file with {len(names)} CSV or Parquet tables instead of one"
            )
        return _decompress(pa.py_buffer(archive.read(names[0])))
