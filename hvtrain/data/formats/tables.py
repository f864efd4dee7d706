"""The one reader of CSV and Parquet tables: for dataset=table, for columns of text, and for predict input=.

A file is what its first bytes say, whatever its name. The cells of a CSV file stay text, since only
all cells of a column together tell numbers from names; see columns.py.
"""

import bz2
import csv
import gzip
import io
import lzma
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from hvtrain.data.manifest import user_path
from hvtrain.errors import DataError

SUFFIXES = (".csv", ".tsv", ".tab", ".parquet", ".pq")
COMPRESSIONS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\0": lzma.decompress,
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
DELIMITERS = ",;\t|"
# UTF-32 before UTF-16, whose mark begins like it.
MARKS = {
    b"\xef\xbb\xbf": "utf-8",
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
# What a damaged file, or an encoding that is none, raises in Arrow and in Python's own modules.
UNREADABLE = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    csv.Error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)
SAMPLE_CHARACTERS = 2**18
SAMPLE_ROWS = 100
# A row that is too long is an error of the file, and not of its delimiter.
MOSTLY = 0.9
# A row has to fit into a block; a text of a whole book is a row too.
BLOCK_BYTES = 2**26
READ_BYTES = 2**18
COLUMNS_AT_ONCE = 100
"""Of Parquet. Arrow keeps what it needs to read 5,000 columns at once: 6.2 GB for a table of 1.9 GB, and
3.3 GB in blocks (pyarrow 26)."""

# The csv module refuses cells of more than 131,072 characters, which texts may have.
csv.field_size_limit(2**30)


@dataclass(frozen=True)
class TextFormat:
    """How a CSV file is written; None: as the file shows it."""

    delimiter: str | None = None
    encoding: str | None = None


def is_table(path: Path) -> bool:
    """True if a file has the suffix of a table, compressed or not."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in SUFFIXES


def table_files(location: str | Path, setting: str) -> list[tuple[Path, dict[str, str]]]:
    """The files of a table, with what their folders' names say: year=2024/a.parquet is of the year 2024.

    Args:
        location: a file, a folder with tables in it, or a pattern with * and ?.
        setting: which names it, for messages.

    Raises:
        DataError: There is none.
    """
    path = user_path(location)
    if path.is_file():
        return [(path, {})]

    if path.is_dir():
        files = [file for file in path.rglob("*") if _is_part(file, path)]
    elif {*str(path)} & {*"*?["}:
        files = [file for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file()]
    else:
        files = []
    if not files:
        raise DataError(f"{setting}={location} is no file; give a .csv or .parquet file, or a folder of them")
    return [(file, dict(_partitions(file))) for file in sorted(files)]


def _is_part(file: Path, folder: Path) -> bool:
    # Spark and others leave _SUCCESS and .part.crc files among the tables.
    return file.is_file() and is_table(file) and not any(part[0] in "._" for part in file.relative_to(folder).parts)


def _partitions(file: Path) -> Iterator[tuple[str, str]]:
    for part in file.parts[:-1]:
        name, equals, value = part.partition("=")
        if equals:
            yield unquote(name), unquote(value).replace("__HIVE_DEFAULT_PARTITION__", "")


def read_table(
    locations: str | Path | Sequence[str | Path],
    setting: str,
    text_format: TextFormat = TextFormat(),
    column: str | None = None,
) -> pa.Table:
    """Reads one table from one file or several, whose rows follow one another.

    Args:
        locations: as in table_files(), one or several.
        setting: which names them, for messages.
        text_format: of CSV files.
        column: the only column that is needed, which a Parquet file then reads alone, if it has it.

    Raises:
        DataError: A file is missing, cannot be read, or has other columns than the first one.
    """
    if isinstance(locations, str | Path):
        locations = [locations]
    files = [file for location in locations for file in table_files(location, setting)]

    tables: list[pa.Table] = []
    for path, partitions in files:
        try:
            table = _read(path, text_format, column)
        except UNREADABLE as error:
            raise DataError(f"{path} cannot be read: {_first_line(error)}; fix the file") from error
        for name, value in partitions.items():
            if name not in table.column_names:
                table = table.append_column(name, pa.array([value] * table.num_rows, pa.string()))
        for name, count in Counter(table.column_names).items():
            if count > 1:
                raise DataError(f"{path} has {count} columns of the name {name}; rename them")
        tables.append(table)
        # In whatever order.
        for name in sorted({*table.column_names} ^ {*tables[0].column_names}):
            lacking = files[0][0] if name in table.column_names else path
            raise DataError(f"{lacking} lacks the column {name}, which another file of the table has; add it")

    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(f"the files of {setting} have unlike columns: {_first_line(error)}; convert them") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _read(path: Path, text_format: TextFormat, column: str | None) -> pa.Table:
    if path.stat().st_size == 0:
        raise ValueError("it is empty")
    stored = pa.memory_map(str(path)).read_buffer()
    data = _decompressed(stored)
    if data[:4].to_pybytes() != b"PAR1":
        return _read_csv(data, text_format)

    # Pages of a mapped file that were read would count as memory of this process.
    source = str(path) if data is stored else pa.BufferReader(data)
    file = pa.parquet.ParquetFile(source, buffer_size=READ_BYTES)
    names = file.schema_arrow.names
    if (column is not None and column not in names) or len({*names}) < len(names):
        # Its names say which columns there are.
        return file.schema_arrow.empty_table()
    columns: dict[str, pa.ChunkedArray] = {}
    needed = names if column is None else [column]
    for start in range(0, len(needed), COLUMNS_AT_ONCE):
        some = needed[start : start + COLUMNS_AT_ONCE]
        block = file.read(some)
        # Asked for a, pyarrow also gives a column a.b.
        columns |= {name: block[name] for name in some}
    return pa.table(columns)


def _decompressed(data: pa.Buffer) -> pa.Buffer:
    """The bytes of a compressed file; those of other files as they are."""
    start = data[:6].to_pybytes()
    for mark, decompress in COMPRESSIONS.items():
        if start.startswith(mark):
            return pa.py_buffer(decompress(data))
    if not start.startswith(b"PK\x03\x04"):
        return data

    with zipfile.ZipFile(pa.BufferReader(data)) as archive:
        names = [name for name in archive.namelist() if is_table(Path(name)) and not name.startswith("__MACOSX")]
        if len(names) != 1:
            raise ValueError(f"it is a zip file with {len(names)} tables instead of one")
        return _decompressed(pa.py_buffer(archive.read(names[0])))


def _read_csv(data: pa.Buffer, text_format: TextFormat) -> pa.Table:
    data = _as_utf8(data, text_format.encoding)
    sample = data[: 4 * SAMPLE_CHARACTERS].to_pybytes().decode(errors="ignore")[:SAMPLE_CHARACTERS]
    names, num_lines, delimiter = _header(sample, len(sample.encode()) < len(data), text_format.delimiter)

    # Numbers instead of names: two columns may have the same name, or none.
    numbers = [str(number) for number in range(len(names))]
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(data),
            pa.csv.ReadOptions(column_names=numbers, skip_rows=num_lines, block_size=BLOCK_BYTES),
            # Texts in quotes may have several lines.
            pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            pa.csv.ConvertOptions(column_types=dict.fromkeys(numbers, pa.string())),
        )
    except pa.ArrowInvalid as error:
        if "Empty CSV file" not in str(error):
            raise
        # Names, and no rows.
        table = pa.table({number: pa.array([], pa.string()) for number in numbers})
    return table.rename_columns(names)


def _as_utf8(data: pa.Buffer, encoding: str | None) -> pa.Buffer:
    """The text of a file in UTF-8, without a byte order mark."""
    start = data[:4].to_pybytes()
    for mark, name in MARKS.items():
        if start.startswith(mark):
            if name == "utf-8":
                return data[len(mark) :]
            encoding = name
            break

    head = data[:4096].to_pybytes()
    if encoding is None and head.count(0) > len(head) // 4:
        # Every other byte of Latin letters in UTF-16 is 0.
        encoding = "utf-16-be" if head[0] == 0 else "utf-16-le"
    if encoding is not None:
        return pa.py_buffer(data.to_pybytes().decode(encoding).encode())

    # Arrow checks UTF-8 without a copy.
    offsets = pa.array([0, len(data)], pa.int64()).buffers()[1]
    whole = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, data])
    try:
        whole.cast(pa.large_string())
    except pa.ArrowInvalid:
        return pa.py_buffer(_from_windows(data.to_pybytes()).encode())
    return data


def _from_windows(text: bytes) -> str:
    """Decodes text that is not UTF-8. Raises ValueError if it is UTF-8 but for a few bytes."""
    num_wrong = text.decode(errors="replace").count("\N{REPLACEMENT CHARACTER}")
    num_right = len(text.decode(errors="ignore")) - len(text.decode("ascii", errors="ignore"))
    if num_right > num_wrong:
        raise ValueError(f"{num_wrong} bytes are not UTF-8, and {num_right} other characters are")
    try:
        return text.decode("cp1252")
    except UnicodeDecodeError:
        # Windows-1252 has five bytes that are no characters.
        return text.decode("latin-1")


def _header(sample: str, is_cut: bool, delimiter: str | None) -> tuple[list[str], int, str]:
    """Returns the names of the columns, the number of lines that they take, and the delimiter."""
    num_before = 0
    first_line, _, rest = sample.partition("\n")
    # Excel writes the delimiter into a line of its own.
    if first_line.strip().lower().startswith("sep=") and len(first_line.strip()) == 5:
        delimiter = delimiter or first_line.strip()[4]
        sample = rest
        num_before = 1

    layouts = [_layout(sample, is_cut, candidate) for candidate in delimiter or DELIMITERS]
    best = max(layouts, key=lambda layout: layout[0])
    _, names, num_lines, delimiter = best
    if not names:
        raise ValueError("its first lines are empty")
    names = [name.strip() or f"Unnamed: {index}" for index, name in enumerate(names)]
    return names, num_before + num_lines, delimiter


def _layout(sample: str, is_cut: bool, delimiter: str) -> tuple[Any, list[str], int, str]:
    """Returns how well a delimiter fits, and the names and lines of the header."""
    reader = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
    names: list[str] = []
    while not names:
        try:
            names = next(reader)
        except StopIteration:
            break
    num_lines = reader.line_num

    rows = [row for row in islice(reader, SAMPLE_ROWS) if row]
    if is_cut and len(rows) < SAMPLE_ROWS:
        # The last row ends with the sample.
        rows = rows[:-1]
    # A header alone fits itself.
    width, count = Counter(map(len, rows or [names])).most_common(1)[0]
    # 1,5;2,5 under a;b has as many commas in each row, but not in the header.
    share = count / max(len(rows), 1)
    fit = (width > 1 and share >= MOSTLY, width == len(names), share, width)

    if width == len(names) + 1 and all(not row[-1].strip() for row in rows):
        # A comma ends each row.
        names = [*names, ""]
    elif width == len(names) + 1:
        # The rows have names, as R writes them.
        names = ["", *names]
    elif width == len(names) - 1 and not names[-1].strip():
        names = names[:-1]
    return fit, names, num_lines, delimiter
