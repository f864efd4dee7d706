"""Reads real-world CSV files: detects their encoding, delimiter, header and quotes."""

import csv
import io
import re
from collections import Counter, deque
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from hvtrain.system.text import counted

DELIMITERS = ",;\t|"
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
# The names of all columns must fit into the sample; gene tables have 60,000 columns.
SAMPLE_CHARACTERS = 2**20
SAMPLE_ROWS = 100
# The share of rows that must have the same number of cells; a few may be malformed.
MOSTLY = 0.9
# The largest mean length of a run of letters that are not ASCII, in Windows-1252. In Western languages,
# such letters mostly stand alone; in other alphabets, they follow each other.
MAX_MEAN_RUN = 2
# Arrow needs each row to fit into a block, and a row may hold the text of a whole book.
BLOCK_BYTES = 2**26
# A quote within a cell as Spark writes it, with a backslash. In CSV, such a quote ends the cell.
ESCAPED_QUOTE = re.compile(r'(?m)(?:^|[,;|\t])"[^"\n]*\\"[^",;|\s]')
# By default the csv module refuses cells of more than 131,072 characters, but texts may be longer.
csv.field_size_limit(2**30)


class Fit(NamedTuple):
    """Rates how well a delimiter fits a file. Instances compare as tuples; the largest is the best fit."""

    is_regular: bool
    """True if most rows have the same number of cells, and more than one."""
    is_header: bool
    """True if the first line has a name for each column."""
    share: float
    """The share of rows with the most frequent number of cells."""
    width: int
    """The most frequent number of cells."""


class Layout(NamedTuple):
    """The layout of a CSV file, if `delimiter` separates its cells."""

    delimiter: str
    fit: Fit
    names: list[str]
    num_lines: int
    """The number of lines before the first row."""


def read_csv(
    data: pa.Buffer, delimiter: str | None = None, encoding: str | None = None
) -> pa.Table:
    """Reads a CSV file as a table of texts, with the names of its columns.

    Args:
        data: The file, not compressed.
        delimiter, encoding: The user's choice; None: detected.

    Raises:
        ValueError: The file is damaged, or its quotes or encoding are not supported.
    """
    data = _as_utf8(data, encoding)
    sample = data[: 4 * SAMPLE_CHARACTERS].to_pybytes().decode(errors="ignore")[:SAMPLE_CHARACTERS]
    layout = _find_layout(sample, len(sample.encode()) < len(data), delimiter)
    quote: Any = '"'
    if layout.delimiter == "\t" and not _is_quoted(data, sample):
        quote = False
    elif ESCAPED_QUOTE.search(sample):
        raise ValueError('a quote in a cell is written as \\", and "" is needed')
    elif _has_spaces_before_quotes(sample, layout.delimiter):
        data = _without_spaces_before_quotes(data, layout.delimiter)

    table = _parse(data, layout, quote)
    if table.num_rows:
        _refuse_repeated_names(table, layout.names)
        # Arrow reads an unclosed quote in the last column as the start of a cell that holds all later rows.
        last = table[-1][-1].as_py()
        if "\n" in last and not data[-4096:].to_pybytes().rstrip().endswith(b'"'):
            raise ValueError('a cell in its last column begins with a quote (") that is not closed')
    return table.rename_columns(layout.names)


def _parse(data: pa.Buffer, layout: Layout, quote: Any) -> pa.Table:
    """Parses a file with Arrow as a table of texts, whose columns are named by their numbers."""
    # Numbers stand in for names, since two columns may share a name, or have none.
    types = {str(number): pa.string() for number in range(len(layout.names))}
    try:
        return pa.csv.read_csv(
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
        return pa.schema(types).empty_table()


def _refuse_repeated_names(table: pa.Table, names: list[str]) -> None:
    """Raises ValueError if a row repeats the names of the columns, as in files that were concatenated as text."""
    # In a single column, or with numbers as names, a row may equal the header by chance.
    if len(names) < 2 or not re.search(r"[^\W\d]", "".join(names)):
        return
    is_header = pc.equal(table[-1], names[-1])
    for column, name in zip(table, names):
        # For most files, the check ends here: no row has even the name of the last column.
        if not pc.any(is_header).as_py():
            return
        # _find_layout() calls a column without a name "Unnamed: 3", for example.
        cells = [name, ""] if name.startswith("Unnamed: ") else [name]
        is_header = pc.and_(is_header, pc.is_in(column, pa.array(cells)))
    row = pc.index(is_header, True).as_py()
    if row >= 0:
        raise ValueError(f"row {row} repeats the names of the columns")


def _is_quoted(data: pa.Buffer, sample: str) -> bool:
    """False for a tab-separated file whose quotes are part of the text, as in corpora such as GLUE.

    In such a file, a cell that begins with a quote would hide all rows up to the next quote.
    """
    if not re.search(b'"', data):
        return True
    lines = io.TextIOWrapper(pa.BufferReader(data), "utf-8", newline="")
    try:
        deque(csv.reader(lines, delimiter="\t", strict=True), maxlen=0)
    except csv.Error:
        # Strict parsing failed: if most cells are quoted, one of the quotes is damaged; otherwise,
        # quotes are part of the text.
        num_quoted = len(re.findall(r'(?m)(?:^|\t)"', sample))
        return 2 * num_quoted > sample.count("\t") + sample.count("\n")
    return True


def _has_spaces_before_quotes(sample: str, delimiter: str) -> bool:
    """True if a cell is written as in `1, "a, b"`; to Arrow, that is the start of two unquoted cells."""
    if not re.search(rf'(?m)(?:^|{re.escape(delimiter)}) +"', sample):
        return False
    # The match may be inside a quoted cell, as in "he says, ""hello"".".
    rows = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
    return any(re.match(' +"', cell) for row in rows for cell in row)


def _without_spaces_before_quotes(data: pa.Buffer, delimiter: str) -> pa.Buffer:
    """Rewrites a CSV file without spaces between delimiters and cells."""
    lines = io.TextIOWrapper(pa.BufferReader(data), "utf-8", newline="")
    rows = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    rewritten = io.StringIO(newline="")
    try:
        csv.writer(rewritten, delimiter=delimiter).writerows(rows)
    except csv.Error:
        # A quote is not closed, or text follows it, so quotes after spaces are part of the text.
        return data
    return pa.py_buffer(rewritten.getvalue().encode())


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

    Raises ValueError if more non-ASCII characters are valid UTF-8 than not, or if the bytes look like words in a
    non-Latin script.
    """
    num_wrong = text.decode(errors="replace").count("\N{REPLACEMENT CHARACTER}")
    num_right = len(text.decode(errors="ignore")) - len(text.decode("ascii", errors="ignore"))
    if num_right > num_wrong:
        raise ValueError(f"it is UTF-8 except for {counted(num_wrong, 'byte')}")
    runs = re.findall(rb"[\x80-\xff]+", text)
    if sum(map(len, runs)) > MAX_MEAN_RUN * len(runs):
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
        is_cut: True if the file continues after the sample.
        delimiter: The user's choice; None: one of DELIMITERS.
    """
    num_skipped = 0
    first, _, rest = sample.partition("\n")
    first = first.strip(" \r")
    # In a file made for Excel, the first line may name the delimiter, as in sep=;
    if first.lower().startswith("sep=") and len(first) == 5:
        delimiter = delimiter or first[4]
        sample = rest
        num_skipped = 1

    # If rows begin with # as well, it does not mark comments.
    has_comments = sample.startswith("#") and not sample.splitlines()[-1].startswith("#")
    best = _best_layout(sample, is_cut, delimiter)
    while has_comments and sample.startswith("#"):
        rest = sample.partition("\n")[2]
        # The last comment may name the columns, as NumPy writes it.
        if best.fit.is_header and not rest.startswith("#"):
            break
        sample = rest
        num_skipped += 1
        best = _best_layout(sample, is_cut, delimiter)
    names = best.names
    if not names:
        raise ValueError("its first lines are empty")
    names[0] = names[0].removeprefix("# ")
    names = [name.strip() or f"Unnamed: {index}" for index, name in enumerate(names)]
    return best._replace(names=names, num_lines=num_skipped + best.num_lines)


def _best_layout(sample: str, is_cut: bool, delimiter: str | None) -> Layout:
    layouts = [_layout(sample, is_cut, candidate) for candidate in delimiter or DELIMITERS]
    return max(layouts, key=lambda layout: layout.fit)


def _layout(sample: str, is_cut: bool, delimiter: str) -> Layout:
    """Returns the layout of a file's first characters if `delimiter` separates its cells."""
    # If the delimiter is a space, skipping spaces would skip delimiters too.
    skips_spaces = delimiter != " "
    reader = csv.reader(
        io.StringIO(sample, newline=""), delimiter=delimiter, skipinitialspace=skips_spaces
    )
    # Empty lines before the header are skipped.
    names = next(filter(None, reader), [])
    num_lines = reader.line_num

    rows = [row for row in islice(reader, SAMPLE_ROWS) if row]
    if is_cut and len(rows) < SAMPLE_ROWS:
        # The sample may end within the last row.
        rows = rows[:-1]
    # Without rows, the header itself gives the width.
    width, count = Counter(map(len, rows or [names])).most_common(1)[0]
    # In rows such as 1,5;2,5 under a;b, commas are as regular as semicolons, but the header has none.
    share = count / max(len(rows), 1)
    ends_with_delimiter = width == len(names) + 1 and all(not row[-1].strip() for row in rows)
    is_header = width == len(names) or ends_with_delimiter
    fit = Fit(width > 1 and share >= MOSTLY, is_header, share, width)

    if ends_with_delimiter:
        names = [*names, ""]
    elif width == len(names) + 1:
        # Each row begins with its name, as R writes it.
        names = ["", *names]
    elif width == len(names) - 1 and not names[-1].strip():
        names = names[:-1]
    return Layout(delimiter, fit, names, num_lines)
