"""Reads CSV and Parquet tables, for dataset=table, for columns of text, and for predict input=.

The first bytes of a file decide its format, not its name. The cells of a CSV file stay text, since only
all cells of a column together can tell numbers from names; see columns.py.
"""

import bz2
import csv
import gzip
import io
import lzma
import re
import zipfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from hvtrain.data.formats.folders import files_below, split_of
from hvtrain.data.manifest import user_path
from hvtrain.errors import DataError, UserError, first_line

NAME = re.compile(r".+\.(csv|tsv|tab|parquet|pq)(\.(gz|bz2|xz|zip))?", re.IGNORECASE)
COMPRESSIONS = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\0": lzma.decompress,
}
# The first bytes of files that people mistake for tables.
OTHER_FORMATS = {
    b"ARROW1\0": "a Feather file",
    b"ORC": "an ORC file",
    b"\xd0\xcf\x11\xe0": "an old Excel file",
    b"\x89HDF": "an HDF5 file",
    b"SQLite format 3\0": "a database",
    b"<?xml": "XML",
    b'{"': "JSON",
    b'[{"': "JSON",
    b"<!": "a web page",
    b"<html": "a web page",
}
DELIMITERS = ",;\t|"
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
# The names of all columns must fit into the sample; tables of genes have 60,000.
SAMPLE_CHARACTERS = 2**20
SAMPLE_ROWS = 100
# The share of rows that must have the same number of cells; a few may be malformed.
MOSTLY = 0.9
# Letters of Western languages that are not ASCII stand mostly alone; in words of other alphabets
# they follow each other. This is the longest that such runs may be in Windows-1252, on average.
LONGEST_RUNS = 2
# Arrow needs each row to fit into a block, and a row may hold the text of a whole book.
BLOCK_BYTES = 2**26
READ_BYTES = 2**18
# Parquet columns read at once. For a table of 5,000 columns and 1.9 GB, Arrow takes 6.2 GB of
# memory to read all at once, and 3.3 GB in blocks of this size (pyarrow 26).
COLUMNS_AT_ONCE = 100
# A quote in a cell as Spark writes it. For CSV, the cell ends there, or goes on unquoted.
ESCAPED_QUOTE = re.compile(r'"[^"\n]*\\"[^",;|\r\n]')
# By default the csv module refuses cells of more than 131,072 characters, but texts may be longer.
csv.field_size_limit(2**30)


class Layout(NamedTuple):
    """The layout of a CSV file, if `delimiter` separates its cells."""

    delimiter: str
    fit: tuple[bool, bool, float, int]
    """How well the delimiter fits; the largest fits best.

    True if most rows have the same width and several cells, True if the first line has a name for each column, the
    share of rows with that width, and the width in cells.
    """
    names: list[str]
    num_lines: int
    """The number of lines before the first row."""


def is_table(path: Path) -> bool:
    """True for a path with the suffix of a table, compressed or not."""
    return NAME.fullmatch(path.name) is not None


def table_files(location: str | Path, setting: str) -> list[tuple[Path, dict[str, str]]]:
    """Lists the files of a table, each with the columns in its folders' names, such as year=2024/a.parquet.

    Args:
        location: a file, a folder with tables in it, or a glob pattern.
        setting: the setting that names it, for messages.

    Raises:
        DataError: There is no table, or a folder for dataset.file also holds those of other splits.
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
        by_split = {split_of(file.relative_to(path)): file for file in reversed(files)}
        if setting == "dataset.file" and len(by_split) > 1 and by_split.keys() - {"", "train"}:
            names = sorted(str(file.relative_to(path)) for file in by_split.values())
            raise DataError(
                f"{setting}={location} holds tables of several splits ({', '.join(names)}), which would all be trained "
                "on; give dataset.file, dataset.validation_file and dataset.test_file one each"
            )
    elif base != path:
        files = [file for file in base.glob(str(path.relative_to(base))) if file.is_file()]
    if not files:
        raise DataError(
            f"{setting}={location} names no table; give a .csv or .parquet file, or a folder of them"
        )
    return [(file, dict(_partitions(file.relative_to(base)))) for file in sorted(files)]


def _partitions(file: Path) -> Iterator[tuple[str, str]]:
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
        locations: as in table_files(), one or several.
        setting: the setting that names them, for messages.
        column: the only column that is needed; a Parquet file's other columns are not read. None: all.
        text_format: delimiter and encoding of CSV files. None: detected from the file.

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
                table = table.append_column(name, pa.repeat(value, table.num_rows))
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


def _read(path: Path, column: str | None, **text_format: str | None) -> pa.Table:
    if path.stat().st_size == 0:
        raise ValueError("it is empty")
    stored = pa.memory_map(str(path)).read_buffer()
    data = _decompressed(stored)
    begin = data[:16].to_pybytes()
    for mark, kind in OTHER_FORMATS.items():
        if begin.startswith(mark):
            raise DataError(f"{path} is {kind}, and CSV or Parquet is needed; convert it")
    if not begin.startswith(b"PAR1"):
        return _read_csv(data, **text_format)

    # By path: the pages of the memory map would count as this process's memory once read.
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
        some = needed[start : start + COLUMNS_AT_ONCE]
        block = file.read(some)
        # Asked for a column `a`, pyarrow also returns a column `a.b`.
        columns |= {name: block[name] for name in some}
    return pa.table(columns)


def _decompressed(data: pa.Buffer) -> pa.Buffer:
    """Decompresses a file's bytes; returns them unchanged if they are not compressed."""
    start = data[:6].to_pybytes()
    for mark, decompress in COMPRESSIONS.items():
        if start.startswith(mark):
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
        return _decompressed(pa.py_buffer(archive.read(names[0])))


def _read_csv(
    data: pa.Buffer, delimiter: str | None = None, encoding: str | None = None
) -> pa.Table:
    data = _as_utf8(data, encoding)
    sample = data[: 4 * SAMPLE_CHARACTERS].to_pybytes().decode(errors="ignore")[:SAMPLE_CHARACTERS]
    layout = _find_layout(sample, len(sample.encode()) < len(data), delimiter)
    if layout.delimiter != "\t" and ESCAPED_QUOTE.search(sample):
        raise ValueError('a quote in a cell is written as \\", and "" is needed')

    # Numbers stand in for names, since two columns may share a name, or have none.
    types = {str(number): pa.string() for number in range(len(layout.names))}
    quote: Any = '"'
    if layout.delimiter == "\t" and re.search(b'"', data):
        # Corpora such as GLUE have tabs, and quotes that are part of the text: a cell that begins
        # with one would hide all rows up to the next quote.
        lines = io.TextIOWrapper(pa.BufferReader(data), "utf-8", newline="")
        try:
            deque(csv.reader(lines, delimiter="\t", strict=True), maxlen=0)
        except csv.Error:
            quote = False
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(data),
            pa.csv.ReadOptions(
                column_names=list(types), skip_rows=layout.num_lines, block_size=BLOCK_BYTES
            ),
            # Quoted texts may span several lines.
            pa.csv.ParseOptions(
                delimiter=layout.delimiter, quote_char=quote, newlines_in_values=True
            ),
            pa.csv.ConvertOptions(column_types=types),
        )
    except pa.ArrowInvalid as error:
        if "Empty CSV file" not in str(error):
            raise
        # The file has names, but no rows.
        table = pa.schema(types).empty_table()
    if table.num_rows:
        # Files that were joined as text repeat their names; that of an index is empty.
        is_header = pc.equal(table[-1], layout.names[-1])
        for column, name in zip(table, layout.names):
            if pc.any(is_header).as_py():
                is_header = pc.and_(is_header, pc.is_in(column, pa.array([name, ""])))
        row = pc.index(is_header, True).as_py()
        if row >= 0 and len(layout.names) > 1:
            raise ValueError(f"row {row} repeats the names of the columns")
        # Arrow takes an unclosed quote in the last column for a cell with all rows after it.
        last = table[-1][-1].as_py()
        if "\n" in last and not data[-4096:].to_pybytes().rstrip().endswith(b'"'):
            raise ValueError('a cell in its last column begins with a quote (") that is not closed')
    return table.rename_columns(layout.names)


def _as_utf8(data: pa.Buffer, encoding: str | None) -> pa.Buffer:
    """Returns the text of a file in UTF-8, without a byte order mark."""
    head = data[:4096].to_pybytes()
    for mark, name in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            encoding = name
    if encoding is None and head.count(0) > len(head) // 4:
        # In UTF-16, every other byte of Latin text is 0.
        encoding = "utf-16-be" if head[0] == 0 else "utf-16-le"
    if encoding is not None:
        return pa.py_buffer(data.to_pybytes().decode(encoding).encode())

    # A cast of the whole file as one string checks its UTF-8 without a copy.
    offsets = pa.array([0, len(data)], pa.int64()).buffers()[1]
    whole = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, data])
    try:
        whole.cast(pa.large_string())
    except pa.ArrowInvalid:
        return pa.py_buffer(_from_windows(data.to_pybytes()).encode())
    return data


def _from_windows(text: bytes) -> str:
    """Decodes text that is not UTF-8, as Windows-1252.

    Raises ValueError if all but a few bytes are UTF-8, or if they look like words in no Latin letters.
    """
    num_wrong = text.decode(errors="replace").count("\N{REPLACEMENT CHARACTER}")
    num_right = len(text.decode(errors="ignore")) - len(text.decode("ascii", errors="ignore"))
    if num_right > num_wrong:
        raise ValueError(f"{num_wrong} bytes are not UTF-8, and {num_right} other characters are")
    runs = re.findall(rb"[\x80-\xff]+", text)
    if sum(map(len, runs)) > LONGEST_RUNS * len(runs):
        raise ValueError(
            "it is neither UTF-8 nor, by its letters, Windows-1252; write it in UTF-8 or, for dataset=table, "
            "set dataset.encoding"
        )
    try:
        return text.decode("cp1252")
    except UnicodeDecodeError:
        # Windows-1252 leaves five bytes undefined; Latin-1 defines all.
        return text.decode("latin-1")


def _find_layout(sample: str, is_cut: bool, delimiter: str | None) -> Layout:
    """Finds the layout that fits a file's first characters best.

    Args:
        is_cut: True if the file has more.
        delimiter: The user's choice; None: one of DELIMITERS.
    """
    num_before = 0
    begin, _, rest = sample.partition("\n")
    begin = begin.strip(" \r")
    # Excel writes the delimiter on a line of its own, such as sep=;
    if begin.lower().startswith("sep=") and len(begin) == 5:
        delimiter = delimiter or begin[4]
        sample = rest
        num_before = 1

    # If rows begin with # as well, it does not mark comments.
    has_comments = sample.startswith("#") and not sample.splitlines()[-1].startswith("#")
    while True:
        layouts = [_layout(sample, is_cut, candidate) for candidate in delimiter or DELIMITERS]
        best = max(layouts, key=lambda layout: layout.fit)
        rest = sample.partition("\n")[2]
        # Comments are skipped, except for the last if it names the columns, as NumPy writes it.
        if not has_comments or not sample.startswith("#"):
            break
        _, is_header, *_ = best.fit
        if is_header and not rest.startswith("#"):
            break
        sample = rest
        num_before += 1
    names = best.names
    if not names:
        raise ValueError("its first lines are empty")
    names[0] = names[0].removeprefix("# ")
    names = [name.strip() or f"Unnamed: {index}" for index, name in enumerate(names)]
    return best._replace(names=names, num_lines=num_before + best.num_lines)


def _layout(sample: str, is_cut: bool, delimiter: str) -> Layout:
    """Returns the layout of a file's first characters with a delimiter."""
    reader = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
    # Empty lines before the header are skipped.
    names = next(filter(None, reader), [])
    num_lines = reader.line_num

    rows = [row for row in islice(reader, SAMPLE_ROWS) if row]
    if is_cut and len(rows) < SAMPLE_ROWS:
        # The sample may end within the last row.
        rows = rows[:-1]
    # A header without rows fits itself.
    width, count = Counter(map(len, rows or [names])).most_common(1)[0]
    # In rows such as 1,5;2,5 under a;b, commas are as regular, but the header has none.
    share = count / max(len(rows), 1)
    ends_with_delimiter = width == len(names) + 1 and all(not row[-1].strip() for row in rows)
    is_header = width == len(names) or ends_with_delimiter
    fit = (width > 1 and share >= MOSTLY, is_header, share, width)

    if ends_with_delimiter:
        names = [*names, ""]
    elif width == len(names) + 1:
        # Each row begins with its name, as R writes it.
        names = ["", *names]
    elif width == len(names) - 1 and not names[-1].strip():
        names = names[:-1]
    return Layout(delimiter, fit, names, num_lines)
