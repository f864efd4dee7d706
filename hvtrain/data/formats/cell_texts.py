"""Parses numbers and dates as people write them in table cells, a whole column at a time."""

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

# A text column holds numbers or dates if at least this share of its
# cells do; the other cells are gaps.
MOSTLY = 0.9
# Number and date formats are tried on about this many rows before a whole column is parsed.
SAMPLE_ROWS = 1000
# Symbols that may precede or follow a number. US$ and R$ come before the $ that they contain.
UNITS = ("US$", "R$", *"%$€£¥₹₽₩₺₫₱₪₴฿")
# The unit of times of day and durations, such as 12:34 or 1:02:03.5, which are read as seconds.
CLOCK = "hours:minutes"
CLOCK_TIME = r"^(?P<hours>\d{1,3}):(?P<minutes>[0-5]\d)(?::(?P<seconds>[0-5]\d(?:\.\d+)?))?$"
SPACES = "\N{NO-BREAK SPACE}|\N{NARROW NO-BREAK SPACE}|\N{THIN SPACE}"
# Pairs of decimal sign and thousands separator, the most common first.
NUMBER_FORMATS = (
    (".", ""),
    (".", ","),
    (",", ""),
    (",", "."),
    (",", " "),
    (".", " "),
    (".", "'"),
    (",", "'"),
)
# 01/02/2024 is in January, as in pandas, unless more of the column's cells
# can be read with the day first.
DAY_FORMATS = (
    "%d.%m.%Y",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%Y/%m/%d",
    "%Y-%m-%d",
    "%d-%m-%Y",
    "%d %b %Y",
    "%d-%b-%Y",
    "%b %d, %Y",
    "%d.%m.%y",
    "%m/%d/%y",
    "%d/%m/%y",
    "%d-%b-%y",
)
TIME_FORMATS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
# Not a strptime format: times_in() parses ISO 8601 itself, since its time and zone are optional.
ISO_8601 = ""
DATE_FORMATS = (ISO_8601, *(day + time for day in DAY_FORMATS for time in TIME_FORMATS))

ISO_TIME = r"[T ]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?"
# PostgreSQL writes whole hours as +00.
ISO_ZONE = r"(Z|[+-]\d\d(:?\d\d)?)"
# Two adjacent parts of a date. Date formats are tried only if at least half of a column's sample contains this.
DATE_LIKE = r"\d[-/. ,]+\w"
# Matches 3,14 and 1.234,50, but not 1,234, whose comma may separate thousands.
DECIMAL_COMMA = r"^[+-]?(\d{1,3}(\.\d{3})*|\d+),(\d{1,2}|\d{4,})$"
# A cell with three or more choices, such as 1,2,5.
CHOICES = r"^\d{1,2}(,\d{1,2}){2,}$"
# A column holds choices if at least this share of its cells match CHOICES, and most match ANY_CHOICES.
MIN_CHOICES = 0.01
ANY_CHOICES = r"^\d{1,2}(,\d{1,2})*$"


def keep_where(values: pa.Array, mask: pa.Array) -> pa.Array:
    """Returns values where the mask is true, and null elsewhere."""
    return pc.if_else(mask, values, None)


def share(mask: pa.Array) -> float:
    """Returns the share of true values; 0 for an empty mask."""
    return pc.mean(mask).as_py() or 0.0


def has_choices(text: pa.Array) -> bool:
    """Returns True for a column of answers with several choices in a cell, such as 1,2,5."""
    with_comma = text.filter(pc.match_substring(text, ","))
    num_choices = pc.sum(pc.match_substring_regex(with_comma, CHOICES)).as_py() or 0
    are_common = num_choices >= max(1, MIN_CHOICES * len(text))
    return are_common and share(pc.match_substring_regex(text, ANY_CHOICES)) >= MOSTLY


def unit_in(text: pa.Array) -> str:
    """Returns the unit of a column of at least one text, or an empty string if it has none.

    A unit is one of UNITS, or CLOCK, in at least MOSTLY of the cells, or a word that ends every cell.
    """
    for unit in UNITS:
        if share(pc.match_substring(text, unit)) >= MOSTLY:
            return unit
    if share(pc.match_substring_regex(text, CLOCK_TIME)) >= MOSTLY:
        return CLOCK
    # Any word after a number, such as °C or km/h.
    suffix = re.search(r"\d ?((?:°|[^\W\d_])[^\d\s]*)$", text[0].as_py())
    return suffix[1] if suffix and pc.all(pc.ends_with(text, suffix[1])).as_py() else ""


def number_formats(
    columns: Sequence[pa.Array], decimal: str | None, thousands: str | None
) -> list[tuple[str, str]]:
    """Returns pairs of decimal sign and thousands separator, in the order in which to try them on a file.

    Args:
        columns: The file's text columns.
        decimal, thousands: The user's choice; None: inferred from the cells.
    """
    formats = [
        pair
        for pair in NUMBER_FORMATS
        if decimal in (None, pair[0]) and thousands in (None, pair[1])
    ]
    # 1,234 is ambiguous. Its comma is taken as decimal if some column can only be
    # read with decimal commas. Half of that column's cells suffice as evidence, since
    # whole numbers have no decimal sign.
    samples = [text.drop_null()[:SAMPLE_ROWS] for text in columns]
    if any(
        share(pc.match_substring_regex(sample, DECIMAL_COMMA)) >= 0.5 and not has_choices(sample)
        for sample in samples
    ):
        formats.sort(key=lambda pair: pair[0] != ",")
    return formats


def numbers_in(text: pa.Array, decimal: str = ".", thousands: str = "", unit: str = "") -> pa.Array:
    """Parses texts as float64 numbers in one format; texts that do not match it become null.

    >>> numbers_in(pa.array(["$1,234.50", "\N{MINUS SIGN}$2", "($3)", "1$5", "7"]), thousands=",", unit="$").to_pylist()
    [1234.5, -2.0, -3.0, None, None]
    """
    if unit == CLOCK:
        return _seconds_in(text)
    if (decimal, thousands, unit) == (".", "", ""):
        try:
            return text.cast(pa.float64())
        except pa.ArrowInvalid:
            pass  # Arrow parses all cells or none.

    sign = re.escape(decimal)
    digits = r"\d+"
    if thousands:
        # India writes 12,34,567. With dots, such a text is more likely an IP address.
        group = r"\d{2,3}" if thousands == "," else r"\d{3}"
        mark = re.escape(thousands)
        digits = rf"\d{{1,3}}(?:{mark}{group})*{mark}\d{{3}}|\d+"
    pattern = rf"^[+-]?(?:(?:{digits})(?:{sign}\d*)?|{sign}\d+)(?:[eE][+-]?\d+)?$"

    text = pc.replace_substring_regex(text, SPACES, " ")
    text = pc.replace_substring(text, "\N{MINUS SIGN}", "-")
    # Accountants write -12.50 as (12.50), and SAP writes it as 12.50-.
    text = pc.replace_substring_regex(text, r"^\(([^-]+)\)$|^([^-]+)-$", r"-\1\2")
    if unit:
        text = keep_where(text, pc.match_substring(text, unit))
        # The unit is removed only at either end: 12€50 is not 1250, and 7 mm is not 7 m.
        symbol = re.escape(unit)
        text = pc.replace_substring_regex(text, rf"^([+-]?)\s*{symbol}\s*|\s*{symbol}$", r"\1")
    text = keep_where(text, pc.match_substring_regex(text, pattern))
    if thousands:
        text = pc.replace_substring(text, thousands, "")

    text = pc.replace_substring(text, decimal, ".")
    # Arrow does not parse a leading plus sign.
    return pc.utf8_ltrim(text, "+").cast(pa.float64())


def sort_by_value(
    texts: Sequence[str], decimal: str = ".", thousands: str = "", unit: str = ""
) -> list[str]:
    """Returns texts sorted by their values in a number format; those that are not numbers come last.

    >>> sort_by_value(["10", "?", "9"])
    ['9', '10', '?']
    """
    ordered = pa.array(sorted(texts), pa.string())
    numbers = numbers_in(ordered, decimal, thousands, unit)
    # This sort is stable, and nulls come last.
    return ordered.take(pc.array_sort_indices(numbers)).to_pylist()


def _seconds_in(text: pa.Array) -> pa.Array:
    """Converts times such as 12:34 to float64 seconds; other texts become null.

    >>> _seconds_in(pa.array(["0:01:02.5", "12:30", "12:60"])).to_pylist()
    [62.5, 45000.0, None]
    """
    hours, minutes, seconds = pc.extract_regex(text, CLOCK_TIME).flatten()
    seconds = pc.if_else(pc.equal(seconds, ""), "0", seconds).cast(pa.float64())
    minutes = pc.add(pc.multiply(hours.cast(pa.float64()), 60.0), minutes.cast(pa.float64()))
    return pc.add(pc.multiply(minutes, 60.0), seconds)


def times_in(text: pa.Array, date_format: str) -> pa.Array:
    """Parses texts in ISO 8601 or a strptime format as timestamps; texts that do not match become null.

    Times with a zone are converted to UTC; all others are taken as UTC.

    >>> times_in(pa.array(["2024-02-28T12:00:00Z", "2024-02-30"]), ISO_8601).is_null().to_pylist()
    [False, True]
    >>> times_in(pa.array(["1.3.2024 12:00", "30.02.2024 12:00"]), "%d.%m.%Y %H:%M").is_null().to_pylist()
    [False, True]
    """
    if date_format != ISO_8601:
        parsed = pc.strptime(text, format=date_format, unit="us", error_is_null=True)
        # strptime reads February 30 as a day in March, and, for %Y, 24 as the year 24.
        pattern = date_format.replace(".", r"\.").replace("%d", r"(?P<day>\d{1,2})")
        # For %y it reads 3 as 2003, but 1.2.3 is more likely a version than a date.
        pattern = pattern.replace("%Y", r"\d{4}").replace("%y", r"\d{2}")
        parts = pc.extract_regex(text, re.sub("%[a-zA-Z]", r"\\w+", pattern))
        is_real = pc.equal(pc.struct_field(parts, [0]).cast(pa.int64()), pc.day(parsed))
        return keep_where(parsed, is_real)

    # BigQuery names the zone, and Arrow's own CSV files have nanoseconds.
    text = pc.replace_substring_regex(text, r" ?UTC$", "Z")
    text = pc.replace_substring_regex(text, r"(:\d\d\.\d{6})\d{1,3}", r"\1")
    # Arrow parses all cells or none, so texts that are not dates are removed first.
    is_date = pc.match_substring_regex(text, rf"^\d{{4}}-\d\d-\d\d({ISO_TIME}{ISO_ZONE}?)?$")
    is_real = times_in(pc.utf8_slice_codeunits(text, 0, 10), "%Y-%m-%d").is_valid()
    text = keep_where(text, pc.and_(is_date, is_real))

    text = pc.replace_substring_regex(text, "^.{10}$", r"\0T00:00")
    text = pc.replace_substring_regex(text, r"[T ][\d:.]+$", r"\0Z")
    return text.cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us"))
