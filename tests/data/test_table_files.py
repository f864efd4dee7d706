"""Tables as people have them: a row for each kind of file, what its column x must become, and where that is from.

Training and predict share each case. The expected numbers are those that the file was written from; where pandas is
installed, it reads the file too, with the words that a user would have to find out.
"""

# ruff: noqa: E501 (a case is a line)

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import importlib.util
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import parquet

from hvtrain.core.topology import Topology
from hvtrain.data.description import describe
from hvtrain.data.formats.cell_texts import number_formats
from hvtrain.data.formats.columns import Cells, Column, infer, read
from hvtrain.data.formats.tables import read_table, table_files
from hvtrain.data.pipeline.features import fit
from hvtrain.data.sources.table import Table
from hvtrain.errors import ConfigError, DataError
from hvtrain.training.saved_model import check_preprocessing

ROWS = 60
# Two decimals, and each value once.
NUMBERS = [round(1000 + 37.25 * number, 2) for number in range(ROWS)]
SIGNED = [2000 - number for number in NUMBERS]
LABELS = ["yes" if number % 3 else "no" for number in range(ROWS)]
DAYS = [datetime.date(2024, 1, 1) + datetime.timedelta(days=number) for number in range(ROWS)]
DAY_NUMBERS = [(day - datetime.date(1970, 1, 1)).days for day in DAYS]
NAMES = ["Bonn", "Köln", "Ulm"] * (ROWS // 3)
LETTERS = ["ä", "ö", "ü"] * (ROWS // 3)
CHOICES = ["1", "2", "1,2", "2,3"] * (ROWS // 4 - 1) + ["1", "2", "1,2", "1,2,3"]


def text(cells: Any, delimiter: str = ",", name: str = "x") -> str:
    rows = [f"{cell}{delimiter}{label}" for cell, label in zip(cells, LABELS)]
    return "\n".join([f"{name}{delimiter}y", *rows]) + "\n"


def comma(number: float) -> str:
    return f"{number:.2f}".replace(".", ",")


def zipped(content: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("t.csv", content)
    return data.getvalue()


def npy(array: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


def tarred(content: str) -> bytes:
    """A .tar.gz file."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        member = tarfile.TarInfo("t.csv")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content.encode()))
    return data.getvalue()


def columns(**arrays: Any) -> bytes:
    """A Parquet file."""
    data = io.BytesIO()
    parquet.write_table(pa.table({**arrays, "y": LABELS}), data)
    return data.getvalue()


@dataclass(frozen=True)
class Case:
    name: str
    content: str | bytes
    becomes: str
    """The phrase of description()."""
    expected: Any
    file: str = "t.csv"
    options: dict[str, Any] = field(default_factory=dict)
    pandas: dict[str, Any] | None = None
    """Words for pandas.read_csv, which then has to read the same numbers."""
    columns: tuple[str, ...] = ("x",)
    """Of the model's inputs; others are left out."""


PLAIN = text(NUMBERS)
MEDIAN = {"missing": "median"}
GAP = [np.nan, *NUMBERS[1:]]
GAP_TEXT = ["", *NUMBERS[1:]]
FILLED = "filled with the median 2117.5"
FIRST_GONE = float(np.median(NUMBERS[1:]))
CASES = [
    Case("plain numbers", PLAIN, "x: number", NUMBERS, pandas={}),
    Case("a question mark", text(["?", *NUMBERS[1:]]), f"x: number (1 gap, {FILLED})", GAP, options=MEDIAN, pandas={"na_values": ["?"]}),
    Case("a dash", text(["-", *NUMBERS[1:]]), f"x: number (1 gap, {FILLED})", GAP, options=MEDIAN, pandas={"na_values": ["-"]}),
    Case("the text unknown", text(["unknown", *NUMBERS[1:]]), f"x: number (1 gap, {FILLED})", GAP, options=MEDIAN, pandas={"na_values": ["unknown"]}),
    Case("an empty cell", text(["", *NUMBERS[1:]]), f"x: number (1 gap, {FILLED})", GAP, options=MEDIAN, pandas={}),
    Case("NA", text(["NA", *NUMBERS[1:]]), f"x: number (1 gap, {FILLED})", GAP, options=MEDIAN, pandas={}),
    Case("an infinite number", text(["inf", *NUMBERS[1:]]), f"x: number (1 gap, {FILLED})", GAP, options=MEDIAN),
    Case("a gap by column", text(["", *NUMBERS[1:]]), f"x: number (1 gap, {FILLED})", GAP, options={"missing": {"x": "median"}}),
    Case("decimal commas in quotes", text(f'"{comma(number)}"' for number in NUMBERS), "x: number (written as 1234,5)", NUMBERS, pandas={"decimal": ","}),
    Case("semicolons and decimal commas", text(map(comma, NUMBERS), ";"), "x: number (written as 1234,5)", NUMBERS, pandas={"sep": ";", "decimal": ","}),
    Case("thousands", text(f'"{number:,.2f}"' for number in NUMBERS), "x: number (written as 1,234.5)", NUMBERS, pandas={"thousands": ","}),
    Case("thousands with dots", text((f"{number:,.2f}".translate({44: 46, 46: 44}) for number in NUMBERS), ";"), "x: number (written as 1.234,5)", NUMBERS, pandas={"sep": ";", "thousands": ".", "decimal": ","}),
    Case("thousands with spaces", text(f"{number:,.2f}".replace(",", "\N{NO-BREAK SPACE}") for number in NUMBERS), "x: number (written as 1 234.5)", NUMBERS),
    Case("dollars", text(f"${number}" for number in NUMBERS), "x: number (in $)", NUMBERS),
    Case("euros", text(f"{number} €" for number in NUMBERS).encode("cp1252"), "x: number (in €)", NUMBERS),
    Case("minus signs", text(str(number).replace("-", "\N{MINUS SIGN}") for number in SIGNED), "x: number", SIGNED),
    Case("units within units", text([f"{number} m" for number in NUMBERS[:-1]] + ["7 mm"]), "x: number (in m, 1 gap, filled with the median 2080.25)", [*NUMBERS[:-1], np.nan], options=MEDIAN),
    Case("percent", text(f"{number}%" for number in NUMBERS), "x: number (in %)", NUMBERS),
    Case("a word after each number", text(f"{number} kg" for number in NUMBERS), "x: number (in kg)", NUMBERS),
    Case("a word after few numbers", text(f"{number % 5} doors" for number in range(ROWS)), "x: 5 names", [f"{number % 5} doors" for number in range(ROWS)], pandas={}),
    Case("negative numbers of accountants", text(f"({-number})" if number < 0 else str(number) for number in SIGNED), "x: number", SIGNED),
    Case("negative numbers of SAP", text(f"{-number}-" if number < 0 else str(number) for number in SIGNED), "x: number", SIGNED),
    Case("times of day", text(f"{number % 24}:{number:02}" for number in range(ROWS)), "x: number (seconds)", [number % 24 * 3600 + number * 60 for number in range(ROWS)]),
    Case("a placeholder for gaps", text([-999, -999, *NUMBERS[2:]]), "x: number (-999 in 2 rows, perhaps a gap: leave those cells empty)", [-999, -999, *NUMBERS[2:]], pandas={}),
    Case("many texts among numbers", text(["none yet" if row % 8 == 0 else f"{number}" for row, number in enumerate(NUMBERS)]), "x: 53 names (numbers except 'none yet')", ["none yet" if row % 8 == 0 else f"{number}" for row, number in enumerate(NUMBERS)]),
    Case("names that differ by case", text(["a", "A", "b"] * 20), "x: 3 names ('a' beside 'A')", ["a", "A", "b"] * 20, pandas={}),
    Case("comments", "# made in 2024,\n# by hand\n" + PLAIN, "x: number", NUMBERS, pandas={"comment": "#"}),
    Case("names in a comment", "# " + PLAIN, "x: number", NUMBERS),
    Case("signs and exponents", text(f"+{number}e-3" for number in NUMBERS), "x: number", np.array(NUMBERS) / 1000, pandas={}),
    Case("tiny numbers", text(f"{number}e-15" for number in NUMBERS), "x: number", np.array(NUMBERS) / 1e15, pandas={}),
    Case("dates", text(DAYS), "x: date (days since 1970-01-01)", DAY_NUMBERS),
    Case("German dates", text(day.strftime("%d.%m.%Y") for day in DAYS), "x: date (days since 1970-01-01, read as %d.%m.%Y)", DAY_NUMBERS),
    Case("American dates", text(day.strftime("%m/%d/%Y") for day in DAYS), "x: date (days since 1970-01-01, read as %m/%d/%Y)", DAY_NUMBERS),
    Case("years of two digits", text(day.strftime("%m/%d/%y") for day in DAYS), "x: date (days since 1970-01-01, read as %m/%d/%y)", DAY_NUMBERS),
    Case("versions are no dates", text(["1.2.3", "1.2.4", "1.3.0"] * 20), "x: 3 names", ["1.2.3", "1.2.4", "1.3.0"] * 20, pandas={}),
    Case("times with a zone", text(f"{day}T12:00:00Z" for day in DAYS), "x: date (days since 1970-01-01)", np.array(DAY_NUMBERS) + 0.5),
    Case("decimals", columns(x=[decimal.Decimal(str(number)) for number in NUMBERS]), "x: number", NUMBERS),
    Case("typed dates", columns(x=DAYS), "x: date (days since 1970-01-01)", DAY_NUMBERS),
    Case("timestamps", columns(x=[datetime.datetime(day.year, day.month, day.day, 6) for day in DAYS]), "x: date (days since 1970-01-01)", np.array(DAY_NUMBERS) + 0.25),
    Case("numbers as text in Parquet", columns(x=list(map(str, NUMBERS))), "x: number", NUMBERS),
    Case("milliseconds of an hour", columns(x=[1_700_000_000_000 + 18_000 * number for number in range(ROWS)]), "x: number", 1_700_000_000_000 + 18_000 * np.arange(ROWS)),
    Case("a large mean", columns(x=1e6 + np.arange(ROWS) / 64), "x: number", 1e6 + np.arange(ROWS) / 64),
    Case("lists", columns(x=[[number, 2.0, number % 7] for number in NUMBERS]), "x: vector of length 3", [[number, 2.0, number % 7] for number in NUMBERS]),
    Case("lists of a fixed size", columns(x=pa.array([[number, 2.0] for number in NUMBERS], pa.list_(pa.float32(), 2))), "x: vector of length 2", [[number, 2.0] for number in NUMBERS]),
    Case("an infinite number in a list", columns(x=[[number, 2.0] for number in [np.inf, *NUMBERS[1:]]]), f"x: vector of length 2 (1 gap, {FILLED})", [[number, 2.0] for number in GAP], options=MEDIAN),
    Case("names", text(NAMES), "x: 3 names", NAMES, pandas={}),
    Case("names with gaps", text(["", "NA", *NAMES[2:]]), "x: 3 names (2 gaps, filled with the most frequent value Ulm)", ["Ulm", "Ulm", *NAMES[2:]], options=MEDIAN),
    Case("names with gaps in Parquet", columns(x=[None, "NA", *NAMES[2:]]), "x: 3 names (2 gaps, counted as a name)", ["", "", *NAMES[2:]], options={"missing": "indicator"}),
    Case("categories of Arrow", columns(x=pa.array(NAMES).dictionary_encode()), "x: 3 names", NAMES),
    Case("IDs of 19 digits", text(10**18 + number % 7 for number in range(ROWS)), "x: 7 names", [str(10**18 + number % 7) for number in range(ROWS)], pandas={"dtype": {"x": str}}),
    Case("codes with leading zeros", text(f"{number % 7:03d}" for number in range(ROWS)), "x: 7 names", [f"{number % 7:03d}" for number in range(ROWS)], pandas={"dtype": {"x": str}}),
    Case("several choices in a cell", text(f'"{cell}"' for cell in CHOICES), "x: 5 names", CHOICES, pandas={"dtype": {"x": str}}),
    Case("truth values", text(["true", "false"] * 30), "x: 2 names", ["true", "false"] * 30),
    Case("integers as categories", columns(x=[3_000_000_000 + number % 5 for number in range(ROWS)]), "x: 5 codes", [3_000_000_000 + number % 5 for number in range(ROWS)], options={"features": {"x": "integer_categorical"}}),
    Case("categories that Keras has taken", text(["[UNK]", "b", "c"] * 20), "x: 3 names", ["[UNK]", "b", "c"] * 20, pandas={}),
    Case("-1 as a category", columns(x=[number % 3 - 1 for number in range(ROWS)]), "x: 3 codes", [number % 3 - 1 for number in range(ROWS)], options={"features": {"x": "integer_categorical"}}),
    Case("one wrong date", text(["2024-02-31", *DAYS[1:]]), "x: date (days since 1970-01-01, 1 gap, filled with the median 19753)", [np.nan, *DAY_NUMBERS[1:]], options=MEDIAN),
    Case("tabs", text(NUMBERS, "\t"), "x: number", NUMBERS, "t.tsv", pandas={"sep": "\t"}),
    Case("bars", text(NUMBERS, "|"), "x: number", NUMBERS, pandas={"sep": "|"}),
    Case("Excel's first line", "sep=;\n" + text(NUMBERS, ";"), "x: number", NUMBERS, pandas={"sep": ";", "skiprows": 1}),
    Case("Excel's first line with a tab", "sep=\t\r\n" + text(NUMBERS, "\t"), "x: number", NUMBERS, pandas={"sep": "\t", "skiprows": 1}),
    Case("lines of Windows", PLAIN.replace("\n", "\r\n"), "x: number", NUMBERS, pandas={}),
    Case("a byte order mark", PLAIN.encode("utf-8-sig"), "x: number", NUMBERS, pandas={"encoding": "utf-8-sig"}),
    Case("UTF-16", PLAIN.encode("utf-16"), "x: number", NUMBERS, pandas={"encoding": "utf-16"}),
    Case("UTF-16 without a mark", PLAIN.encode("utf-16-le"), "x: number", NUMBERS, pandas={"encoding": "utf-16-le"}),
    Case("letters alone", text(LETTERS).encode("cp1252"), "x: 3 names", LETTERS, pandas={"encoding": "cp1252"}),
    Case("Latin-1", text(NAMES).encode("latin-1"), "x: 3 names", NAMES, pandas={"encoding": "latin-1"}),
    Case("gzip", gzip.compress(PLAIN.encode()), "x: number", NUMBERS, "t.csv.gz", pandas={}),
    Case("bzip2", bz2.compress(PLAIN.encode()), "x: number", NUMBERS, "t.csv.bz2", pandas={}),
    Case("xz", lzma.compress(PLAIN.encode()), "x: number", NUMBERS, "t.csv.xz", pandas={}),
    Case("zstd", pa.compress(PLAIN.encode(), "zstd", asbytes=True), "x: number", NUMBERS, "t.csv.zst"),
    Case("zip", zipped(PLAIN), "x: number", NUMBERS, "t.csv.zip", pandas={}),
    Case("gzip without its suffix", gzip.compress(PLAIN.encode()), "x: number", NUMBERS, pandas={"compression": "gzip"}),
    Case("Parquet in capitals", columns(x=NUMBERS), "x: number", NUMBERS, "t.PARQUET"),
    Case("an index", text((f"{row},{number}" for row, number in enumerate(NUMBERS)), name=",x"), "x: number", NUMBERS, pandas={}),
    Case("row names of R", text(f"{row},{number}" for row, number in enumerate(NUMBERS)), "x: number", NUMBERS),
    Case("a comma at each end", PLAIN.replace("\n", ",\n"), "x: number", NUMBERS, pandas={}),
    Case("a comma at each end but the first", PLAIN.replace("\n", ",\n").replace("x,y,", "x,y"), "x: number", NUMBERS),
    Case("pandas's index", columns(x=NUMBERS, __index_level_0__=list(range(ROWS))), "x: number", NUMBERS, "t.parquet"),
    Case("a name for each row", text((f"u{row},{number}" for row, number in enumerate(NUMBERS)), name="who,x"), "x: number", NUMBERS, pandas={}),
    Case("an id", text((f"{row},{number}" for row, number in enumerate(NUMBERS)), name="id,x"), "x: number", NUMBERS, pandas={}),
    Case("an id in camel case", text((f"{row},{number}" for row, number in enumerate(NUMBERS)), name="PassengerId,x"), "x: number", NUMBERS, pandas={}),
    Case("an index that is measured", text(NUMBERS, name="price_index"), "price_index: number", NUMBERS, pandas={}, columns=("price_index",)),
    Case("a column to drop", text((f"{row % 3},{number}" for row, number in enumerate(NUMBERS)), name="z,x"), "x: number", NUMBERS, options={"drop": ["z"]}, pandas={}),
    Case("numbers as names of columns", text((f"{row % 3},{number}" for row, number in enumerate(GAP_TEXT)), name="1,0"), f"0: number (1 gap, {FILLED})", GAP, options={"drop": [1], "missing": {0: "median"}}, pandas={}, columns=("0",)),
    Case("one column to drop", text((f"{row % 3},{number}" for row, number in enumerate(NUMBERS)), name="size,x"), "x: number", NUMBERS, options={"drop": "size"}, pandas={}),
    Case("texts of several lines", text((f'"a\nb{row % 3}",{number}' for row, number in enumerate(NUMBERS)), name="z,x"), "x: number", NUMBERS, pandas={}, columns=("x", "z")),
    Case("a slash in a name", text(NUMBERS, name="a/b"), "a/b: number", NUMBERS, pandas={}, columns=("a_b",)),
    Case("a name that Keras gives to a logarithm", text(NUMBERS, name="maximum"), "maximum: number", NUMBERS, options={"log_numbers": True}, pandas={}, columns=("maximum_",)),
    Case("a name that Keras has", text(NUMBERS, name="features"), "features: number", NUMBERS, pandas={}, columns=("features_",)),
]  # fmt: skip


def written(case: Case, folder: Path) -> Path:
    path = folder / case.file
    content = case.content
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_becomes_what_it_says(case: Case, tmp_path: Path) -> None:
    path = written(case, tmp_path)
    source = Table(str(path), "y", num_test=0, **case.options)
    assert case.becomes in source.description()["features"]

    # Another process, which has the run folder's files and no training data.
    later = Table(str(tmp_path / "gone.csv"), "y", num_test=0, **case.options)
    later.fit_as(source.fitted())
    assert later.element_spec == source.element_spec and later.whole_targets() == {}
    rows = later.new_rows(path)
    assert not rows.unknown
    raw = rows.raw(np.arange(ROWS))
    assert tuple(sorted(raw)) == case.columns
    values = raw[case.columns[0]]
    is_text = values.dtype == object
    expected = np.array(case.expected, object if is_text else values.dtype).reshape(ROWS, -1)
    if is_text:
        assert values.tolist() == expected.tolist()
    else:
        np.testing.assert_allclose(
            values, expected, rtol=1e-15 if values.dtype == "float64" else 1e-6
        )

    features = source.parts()["train"].elements[0]
    spec = later.preprocessing().shape
    again = later.preprocessing()(
        {name: tf.constant(array, spec[name].dtype) for name, array in raw.items()}
    )
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(again), features)
    assert check_preprocessing(source.preprocessing(), source, Topology()) is None
    if values.dtype.kind == "f" and values.shape[1] == 1 and np.isfinite(values).all():
        assert len(np.unique(features[:, 0])) == len(np.unique(values)), (
            "float32 has made different numbers equal"
        )
        if not case.options:
            assert abs(features[:, 0].mean()) < 1e-3 and abs(features[:, 0].std() - 1) < 1e-3
    if case.pandas is not None and importlib.util.find_spec("pandas"):
        import pandas

        frame = pandas.read_csv(path, **case.pandas)
        name = case.becomes.partition(":")[0]
        if is_text:
            assert frame[name].tolist() == [value for (value,) in expected.tolist()]
        else:
            np.testing.assert_allclose(frame[name].to_numpy(float), expected[:, 0], rtol=1e-6)


REFUSED: list[tuple[str, str | bytes, dict[str, Any], str]] = [
    ("a gap", text(["", *NUMBERS[1:]]), {}, r"t.csv: row 0 has no x \(rows without it: 1\); fill or drop them, or train with dataset.missing=median"),
    ("an odd list", text(['"1,2,3"', *NUMBERS[1:]]), {}, r"row 0 has no x \(rows without it: 1; unreadable cells: '1,2,3'\)"),
    ("an odd cell", text(["?", *NUMBERS[1:]]), {}, r"row 0 has no x \(rows without it: 1; unreadable cells: '\?'\)"),
    ("no target in a row", text(NUMBERS).replace("1000,no", "1000,").replace("1000.0,no", "1000.0,"), {}, r"row 0 has no y \(rows without it: 1\); fill or drop them, or train with dataset.missing="),
    ("whole numbers as classes", text(range(ROWS)).replace("x,y", "y,x"), {}, r"dataset.target=y has 60 values in 60 rows, too many for classes; set dataset.target_is=class to use them anyway or, for numbers, dataset.target_is=number with task=regression"),
    ("a target that is always the same", text(NUMBERS).replace("yes", "no"), {}, r"dataset.target=y is 'no' in every row, and nothing can be learned"),
    ("two columns of a name", text((f"1,{number}" for number in NUMBERS), name="x,x"), {}, r"t.csv has 2 columns named x; rename them"),
    ("a longer row", PLAIN + "1,2,3\n", {}, r"t.csv cannot be read: .*Expected 2 columns, got 3.*; fix the file"),
    ("a quote that is not closed", PLAIN.replace("yes", '"yes', 1), {}, r"t.csv cannot be read: a cell in its last column begins with a quote \(\"\) that is not closed"),
    ("quotes of Spark", text(f'"a \\"b, c\\" {number}"' for number in NUMBERS), {}, r't.csv cannot be read: a quote in a cell is written as \\", and "" is needed; fix the file'),
    ("files that were joined as text", 2 * PLAIN, {}, r"t.csv cannot be read: row 60 repeats the names of the columns; fix the file"),
    ("joined files with an index", 2 * text((f"{row},{number}" for row, number in enumerate(NUMBERS)), name=",x"), {}, r"row 60 repeats the names of the columns"),
    ("damaged UTF-8", text(NAMES).encode() + b"\xff,no\n", {}, r"t.csv cannot be read: it is UTF-8 except for 1 byte;"),
    ("Shift-JIS", text(["東京", "大阪", "名古屋"] * 20).encode("shift_jis"), {}, r"t.csv cannot be read: it is neither UTF-8 nor, by its letters, Windows-1252"),
    ("Windows-1251", text(["Москва 12345678", "Казань 87654321"] * 30).encode("cp1251"), {}, r"t.csv cannot be read: it is neither UTF-8 nor, by its letters, Windows-1252"),
    ("no rows", "x,y\n", {}, r"dataset.file=.*t.csv holds no rows"),
    ("nothing", "", {}, r"t.csv cannot be read: it is empty"),
    ("nothing to learn from", text(f"u{row}" for row in range(ROWS)), {}, r"t has no column to learn from but y; left out: x \(unique in every row\)"),
    ("an unknown treatment", PLAIN, {"missing": "mean"}, r"dataset.missing=mean is not one of refuse, drop, median"),
    ("a flag beside bins", PLAIN, {"features": {"x": "float_discretized"}, "missing": "indicator"}, r"dataset.missing.x=indicator does not go with float_discretized; choose median"),
    ("a delimiter of two characters", PLAIN, {"delimiter": "::"}, r"dataset.delimiter='::' is not one character"),
    ("a decimal sign that is none", PLAIN, {"decimal": ";"}, r"dataset.decimal=';' and dataset.thousands=None fit no number; give '.'"),
    ("one sign for both", PLAIN, {"decimal": ",", "thousands": ","}, r"dataset.decimal=',' and dataset.thousands=',' fit no number"),
    ("an encoding that is none", PLAIN, {"encoding": "latin-99"}, r"t.csv cannot be read: unknown encoding: latin-99"),
    ("gaps of another column", PLAIN, {"missing": {"z": "median"}}, r"dataset.missing.z is not a column of t; it has x, y"),
    ("half a gzip file", gzip.compress(PLAIN.encode())[:100], {}, r"t.csv cannot be read: .*; fix the file"),
    ("a damaged gzip file", gzip.compress(PLAIN.encode())[:60] + bytes(40), {}, r"t.csv cannot be read: .*; fix the file"),
    ("half a zip file", zipped(PLAIN)[:100], {}, r"t.csv cannot be read: .*; fix the file"),
    ("half a Parquet file", columns(x=NUMBERS)[:200], {}, r"t.csv cannot be read: .*; fix the file"),
    ("a Feather file", b"ARROW1\0\0" + bytes(40), {}, r"t.csv is a Feather file, and CSV or Parquet is needed; convert it"),
    ("an old Excel file", b"\xd0\xcf\x11\xe0" + bytes(40), {}, r"t.csv is an old Excel file, and CSV or Parquet is needed"),
    ("a NumPy array", npy(np.eye(3)), {}, r"t.csv is a NumPy array, and CSV or Parquet is needed; convert it"),
    ("a tar archive", tarred(PLAIN), {}, r"t.csv is a tar archive, and CSV or Parquet is needed; unpack it"),
    ("JSON lines", '{"x": 1, "y": "a"}\n' * 20, {}, r"t.csv is JSON, and CSV or Parquet is needed; convert it"),
    ("a web page", "<!doctype html>\n<table>", {}, r"t.csv is a web page, and CSV or Parquet is needed"),
    ("a zip file of two tables", b"", {}, r"it is a zip or Excel file with 2 CSV or Parquet tables instead of one"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "options", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_what_cannot_be_read_is_refused(
    content: str | bytes, options: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if "zip or Excel file" in message:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.csv", PLAIN)
            archive.writestr("b.csv", PLAIN)
    with pytest.raises((ConfigError, DataError), match=message):
        Table(str(path), "y", num_test=0, **options).num_examples("train")


LATER: list[tuple[str, str, str, dict[str, Any], Callable[[Any], bool] | str]] = [
    ("only two of three truth values", text(["true", "false", "unknown"] * 20), "x\ntrue\nfalse\n", {}, lambda rows: not rows.unknown),
    ("codes that look like numbers", text(["007", "X01", "012"] * 20), "x\n007\n012\n", {}, lambda rows: not rows.unknown),
    ("codes with a fraction", text(["1", "2", "3"] * 20), "x\n1.0\n2.0\n", {"features": {"x": "string_categorical"}}, lambda rows: not rows.unknown),
    ("a name that is new", text(NAMES), "x\nUlm\nBerlin\n", {}, lambda rows: rows.unknown == {"x": 0.5}),
    ("names for numbers", PLAIN, "x\na\nb\n", MEDIAN, r"the column x holds 'a', which cannot be read as float_normalized"),
    ("a gap", PLAIN, "x,z\n1,1\n,1\n", {}, r"row 1 has no x"),
    ("a gap that is filled", PLAIN, "x,z\n1,1\n,1\n", MEDIAN, lambda rows: np.isnan(rows.raw(np.arange(2))["x"][1, 0])),
    ("a cell that is not a number", PLAIN, "x\n1\nodd\n", MEDIAN, lambda rows: np.isnan(rows.raw(np.arange(2))["x"][1, 0])),
    ("another decimal sign", text(map(comma, NUMBERS), ";"), "x,z\n50.25,3\n", {}, r"holds '50.25', which cannot be read as float_normalized"),
    ("another column", PLAIN, "z\n1\n", {}, r"lacks the column x; it has z"),
    ("an id", text((f"{row},{number}" for row, number in enumerate(NUMBERS)), name="k,x"), "k,x\na7,3\n", {"id": "k"}, lambda rows: rows.ids["k"].tolist() == ["a7"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("train", "new", "options", "becomes"),
    [row[1:] for row in LATER],
    ids=[row[0] for row in LATER],
)
def test_a_later_file_is_read_as_the_training_table_was(
    train: str,
    new: str,
    options: Any,
    becomes: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "t.csv").write_text(train)
    (tmp_path / "new.csv").write_text(new)
    source = Table(str(tmp_path / "t.csv"), "y", num_test=0, **options)
    if isinstance(becomes, str):
        with pytest.raises(DataError, match=becomes):
            source.new_rows(tmp_path / "new.csv")
    else:
        assert becomes(source.new_rows(tmp_path / "new.csv"))
        assert ("holds 'odd'" in caplog.text) == ("odd" in new)


def cells_of(texts: list[str]) -> list[float]:
    """The numbers of a column, as they are read if a table has no other."""
    column = infer("x", pa.array(texts), number_formats([pa.array(texts)], None, None), False)
    assert isinstance(column, Column) and column.kind in ("number", "date"), column
    return read(column, pa.array(texts), "t.csv").values[:, 0].tolist()


@pytest.mark.parametrize(
    ("form", "hours"),
    [
        ("%Y-%m-%d %H:%M:%S+00", 9.5),  # PostgreSQL
        ("%Y-%m-%d %H:%M:%S UTC", 9.5),  # BigQuery
        ("%Y-%m-%dT%H:%M:%S.000000000", 9.5),  # Arrow and Polars, in nanoseconds
        ("%m/%d/%Y %I:%M %p", 9.5),  # Excel in America
        ("%-m/%-d/%Y %-I:%M:%S %p", 9.5),
        ("%d-%b-%y", 0),  # Oracle
        ("%d-%b-%Y", 0),
        ("%Y-%-m-%-d", 0),
    ],
)
def test_dates_are_read_as_databases_and_spreadsheets_write_them(form: str, hours: float) -> None:
    nine = datetime.time(9, 30)
    texts = [datetime.datetime.combine(day, nine).strftime(form) for day in DAYS]
    assert cells_of(texts) == pytest.approx([day + hours / 24 for day in DAY_NUMBERS], abs=1e-9)


@pytest.mark.parametrize(
    "form",
    ["₹{:,}", "US${:,}", "R$ {}", "{} ₽", "{}°C", "{} km/h", "{} kg/m²"],
)
def test_units_of_other_countries_and_of_physics_are_units(form: str) -> None:
    assert cells_of([form.format(number) for number in NUMBERS]) == NUMBERS


def test_indian_groups_of_digits_are_numbers_but_addresses_are_none() -> None:
    assert cells_of(["12,34,567", "1,00,000", "99"] * 9) == [1234567, 100000, 99] * 9
    addresses = pa.array([f"192.168.10.{number}" for number in range(100, 200)])
    column = infer("x", addresses, number_formats([addresses], None, None), False)
    assert isinstance(column, Column) and column.kind == "name"


def test_folders_lists_and_files_of_their_own_are_tables(tmp_path: Path) -> None:
    # The table lies in a folder whose name is no part of it.
    folder = tmp_path / "trial=3/all"
    for year in (2023, 2024):
        (folder / f"year={year}").mkdir(parents=True)
        (folder / f"year={year}/a.csv").write_text(PLAIN)
        typed = tmp_path / f"typed/year={year}"
        typed.mkdir(parents=True)
        (typed / "a.parquet").write_bytes(columns(x=NUMBERS))
    (folder / "_SUCCESS").touch()
    for location in (folder, folder / "year=*/a.csv", tmp_path / "typed"):
        partitioned = Table(str(location), "y", num_test=0)
        assert partitioned.num_examples("train") == 2 * ROWS
        assert partitioned.description()["features"] == ["x: number", "year: number"]

    path = str(folder / "year=2023/a.csv")
    source = Table([path, path], "y", test_file=path, validation_file=path)
    assert [source.num_examples(split) for split in ("train", "validation", "test")] == [
        2 * ROWS,
        ROWS,
        ROWS,
    ]


def test_links_to_folders_are_followed_but_not_in_a_circle(tmp_path: Path) -> None:
    for name in ("all/year=2023", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.csv").write_text(PLAIN)
    (tmp_path / "all/year=2024").symlink_to(tmp_path / "elsewhere")
    assert Table(str(tmp_path / "all"), "y", num_test=0).num_examples("train") == 2 * ROWS

    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "all")
    with pytest.raises(DataError, match=r"year=2024/back is a link to .*all, which contains it"):
        Table(str(tmp_path / "all"), "y", num_test=0).num_examples("train")


def test_rows_with_gaps_are_dropped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text(["", *NAMES[1:]]))
    source = Table(str(tmp_path / "t.csv"), "y", num_test=0, missing="drop")
    assert source.num_examples("train") == ROWS - 1
    assert source.description()["warnings"] == ["rows left out because of gaps: 1"]


def test_what_is_odd_in_the_test_file_or_the_target_is_said(tmp_path: Path) -> None:
    rows = [f"{number},{name},{number}" for number, name in zip(NUMBERS, NAMES)]
    test = [f"{number},{name.upper()},{number}" for number, name in zip(NUMBERS, NAMES)]
    (tmp_path / "t.csv").write_text("\n".join(["x,c,y", "1.5,Ulm,?", *rows]))
    (tmp_path / "test.csv").write_text("\n".join(["x,c,y", "odd,Ulm,1.5", "1,Ulm,", *test]))
    source = Table(str(tmp_path / "t.csv"), "y", test_file=str(tmp_path / "test.csv"), **MEDIAN)
    assert source.num_examples("test") == ROWS + 1
    assert source.description()["warnings"] == [
        "y is a column of numbers, but holds '?'; such cells count as gaps",
        "rows left out because of gaps: 1",
        "test: x is a column of numbers, but holds 'odd'; such cells count as gaps",
        "test: 97% of the rows have a value of c that training did not have; the model has learned nothing about it",
        "test: rows left out because of gaps: 1",
    ]

    (tmp_path / "test.csv").write_text(PLAIN.replace("yes", "perhaps"))
    (tmp_path / "t.csv").write_text(PLAIN)
    source = Table(str(tmp_path / "t.csv"), "y", test_file=str(tmp_path / "test.csv"))
    with pytest.raises(DataError, match=r"test.csv: the column y holds perhaps, which is not one"):
        source.num_examples("test")


def test_a_class_that_a_split_lacks_is_said(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(PLAIN.replace("yes", "rare", 8).replace("rare", "yes", 7))
    warnings = [
        describe(Table(str(tmp_path / "t.csv"), "y", num_test=number))["warnings"]
        for number in (10, 58)
    ]
    assert warnings == [["test has no rare"], ["train has no rare"]]


def test_a_column_with_nothing_but_gaps_to_train_on_is_refused() -> None:
    cells = Cells(pa.array(["a", None, None]))
    with pytest.raises(DataError, match=r"the column x has a gap in every training row; add it to"):
        fit(Column("x", "x", "name", missing="median"), cells, np.array([1, 2]))


def test_parts_of_dates_are_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text(f"{day} 06:30:00" for day in DAYS))
    source = Table(str(tmp_path / "t.csv"), "y", num_test=0, dates="parts")
    (row,) = source.raw_examples("train", Topology(), 1)
    assert {name: array.tolist() for name, array in row.items()} == {
        "x.year": [2024], "x.month": [1], "x.day": [1], "x.weekday": [0], "x.hour": [6],
    }  # fmt: skip


def test_many_columns_are_one_input_of_the_model(tmp_path: Path) -> None:
    """Keras takes milliseconds for each input, so thousands of columns took longer than training."""
    numbers = np.random.default_rng(0).normal(size=(300, ROWS)).astype(np.float32)
    path = tmp_path / "t.parquet"
    path.write_bytes(
        columns(**{f"c{index}": column for index, column in enumerate(numbers)}, city=NAMES)
    )
    source = Table(str(path), "y", num_test=0)
    assert {name: tuple(part.shape) for name, part in source.preprocessing().shape.items()} == {
        "city": (1,),
        "numbers": (300,),
    }
    assert source.element_spec[0].shape == (304,)
    *inputs, _ = json.loads(source.assets()["table.json"])["columns"]
    (row,) = source.raw_examples("train", Topology(), 1)
    assert row["numbers"].tolist() == [numbers[int(column["name"][1:]), 0] for column in inputs]
    assert check_preprocessing(source.preprocessing(), source, Topology()) is None


def test_every_embedded_table_loads() -> None:
    for name in ("wine", "iris", "breast_cancer"):
        source = Table(name)
        assert check_preprocessing(source.preprocessing(), source, Topology()) is None


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["1,200", "12,000", "900"], ["900", "1,200", "12,000"]),
        (["3", "1", "2", *["10"] * 15, "?"], ["1", "2", "3", "10", "?"]),
        (["(1)", "2", "0"], ["(1)", "0", "2"]),
    ],
)
def test_classes_that_are_numbers_are_in_their_order(
    labels: list[str], classes: list[str], tmp_path: Path
) -> None:
    rows = [f'{number},"{label}"' for number, label in enumerate(labels * 6)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *rows]))
    source = Table(str(tmp_path / "t.csv"), "y", num_test=0, target_is="class")
    source.num_examples("train")
    assert source.class_names == classes


def test_an_id_that_the_test_file_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text((f"{row},1" for row in range(ROWS)), name="key,x"))
    (tmp_path / "test.csv").write_text(PLAIN)
    source = Table(str(tmp_path / "t.csv"), "y", id="key", test_file=str(tmp_path / "test.csv"))
    with pytest.raises(DataError, match=r"test.csv lacks the column key \(dataset.id\)"):
        source.num_examples("test")
    fitted = Table(str(tmp_path / "t.csv"), "y", id="key", num_test=9).fitted()
    later = Table(str(tmp_path / "t.csv"), "y", id="x", num_test=9)
    later.fit_as(fitted)
    assert list(later.ids("test", Topology())["x"]) == ["1"] * 9, "of the later setting"
    large = later._ids_in(pa.table({"x": [2**53 + 1, None]}))
    assert large["x"].tolist() == [2**53 + 1, None]
    categories = pa.array(["a", None, "b"]).dictionary_encode()
    assert later._ids_in(pa.table({"x": categories}))["x"].tolist() == ["a", None, "b"]


def test_a_folder_of_several_splits_is_not_trained_on_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "train.csv").write_text(PLAIN)
    (tmp_path / "test.md").write_text("no table")
    assert Table(str(tmp_path), "y", num_test=0).num_examples("train") == ROWS
    path = (tmp_path / "train.csv").rename(tmp_path / "v1/test.csv")
    for name in ("train.csv", "houses.csv", "v1/train.csv"):
        path = path.rename(tmp_path / name)
        (tmp_path / "v1/test.csv").write_text(PLAIN)
        with pytest.raises(
            DataError, match=rf"several splits \({name}, v1/test.csv|v1/test.csv, {name}\).*_file"
        ):
            Table(str(tmp_path), "y").num_examples("train")


def test_a_delta_table_is_no_folder_of_files(tmp_path: Path) -> None:
    """Each change of a row adds a file with it, and leaves the old one until the table is vacuumed."""
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "part-0.parquet").write_bytes(columns(x=NUMBERS))
    with pytest.raises(DataError, match=r"is a Delta table, whose files may hold rows that were"):
        Table(str(tmp_path), "y").num_examples("train")


def test_the_last_cell_may_have_lines(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('x,y\n1,a\n2,"b\nc"\n\n')
    assert read_table(tmp_path / "t.csv", "dataset.file")["y"].to_pylist() == ["a", "b\nc"]


@pytest.mark.parametrize(
    ("content", "names", "num_rows"),
    [
        ("#tag,count\n#love,5\n#joy,3\n", ["#tag", "count"], 2),
        ("#id,a,b\n1,2,3,\n4,5,6,\n", ["#id", "a", "b", "Unnamed: 3"], 2),
        ("# made,\n# by hand\na,b\n1,2\n", ["a", "b"], 1),
        ("# a,b\n1,2\n", ["a", "b"], 1),
    ],
)
def test_number_signs_begin_comments_names_or_rows(
    content: str, names: list[str], num_rows: int, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(content)
    table = read_table(tmp_path / "t.csv", "dataset.file")
    assert (table.column_names, table.num_rows) == (names, num_rows)


def test_a_timestamp_of_spark_that_is_far_away_keeps_its_date(tmp_path: Path) -> None:
    path, far = tmp_path / "t.parquet", datetime.datetime(9999, 12, 31)
    parquet.write_table(pa.table({"x": [far]}), path, use_deprecated_int96_timestamps=True)
    assert read_table(path, "dataset.file")["x"].to_pylist() == [far]


def test_the_names_of_very_many_columns_are_read(tmp_path: Path) -> None:
    names = [f"gene_{number:015d}" for number in range(14_000)]
    (tmp_path / "t.csv").write_text(f"{','.join(names)}\n{'1,' * 13_999}1\n")
    assert read_table(tmp_path / "t.csv", "dataset.file").column_names == names


def test_a_target_may_have_a_number_for_a_name(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(PLAIN.replace("y", "60", 1))
    source = Table(str(tmp_path / "t.csv"), 60, num_test=0)
    assert source.num_examples("train") == ROWS and source.class_names == ["no", "yes"]


def test_spaces_may_precede_quotes(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('n, "place, land", "note"\n1, "Bonn, D", "he says, ""yes"""\n2, Ulm, ""\n')
    assert read_table(path, "dataset.file").to_pydict() == {
        "n": ["1", "2"],
        "place, land": ["Bonn, D", "Ulm"],
        "note": ['he says, "yes"', ""],
    }
    # Nothing is rewritten: the quotes are in a quoted cell, or part of the text.
    for row, cell in (('"a, ""b""", 1', " 1"), ('a, "b" c', ' "b" c')):
        path.write_text(f"x,y\n{row}\n")
        assert read_table(path, "dataset.file")["y"].to_pylist() == [cell]


def test_a_pattern_does_not_match_hidden_copies(tmp_path):
    for name in ("a.csv", "._a.csv", ".ipynb_checkpoints/a-checkpoint.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x,y\n1,2\n")
    files = table_files(str(tmp_path / "**/*.csv"), "dataset.file")
    assert [file for file, _ in files] == [tmp_path / "a.csv"]


def test_columns_of_choices_are_no_evidence_of_decimal_commas():
    choices = pa.array(["1,2"] * 8 + ["1,2,3"])
    money = pa.array(["1,234", "950", "45,000"] * 3)
    column = infer("x", money, number_formats([choices, money], None, None), False)
    assert read(column, money, "t.csv").values[:3, 0].tolist() == [1234.0, 950.0, 45000.0]
