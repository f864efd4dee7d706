"""Numbers and dates as people write them in the cells of a table, read from a whole column at once."""

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

UNITS = ("%", "$", "€", "£", "¥")
SPACES = "\N{NO-BREAK SPACE}|\N{NARROW NO-BREAK SPACE}|\N{THIN SPACE}"
# Decimal sign and separator of thousands, the more usual ones first.
NUMBER_FORMATS = ((".", ""), (".", ","), (",", ""), (",", "."), (",", " "), (".", " "), (".", "'"))
# 01/02/2024 is in January if all cells can be read so, as pandas has it.
DAY_FORMATS = ("%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d", "%d-%m-%Y", "%d %b %Y", "%b %d, %Y")
TIME_FORMATS = ("", " %H:%M", " %H:%M:%S")
ISO_8601 = ""
DATE_FORMATS = (ISO_8601, *(day + time for day in DAY_FORMATS for time in TIME_FORMATS))

ISO_TIME = r"[T ]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?"
ISO_ZONE = r"(Z|[+-]\d\d:?\d\d)"
# 3,14 and 1.234,50, but not 1,234, which may be a thousand.
DECIMAL_COMMA = r"^[+-]?(\d{1,3}(\.\d{3})*|\d+),(\d{1,2}|\d{4,})$"


def only(text: pa.Array, mask: pa.Array) -> pa.Array:
    """Returns text where the mask is true, and null elsewhere."""
    return pc.if_else(mask, text, pa.scalar(None, pa.string()))


def share(mask: pa.Array) -> float:
    """Returns the share of true values, 0 for none."""
    return pc.mean(mask.cast(pa.float64())).as_py() or 0.0


def unit_in(text: pa.Array, least_share: float) -> str:
    """Returns the unit of at least this share of the cells; empty for none."""
    for unit in UNITS:
        if share(pc.match_substring(text, unit)) >= least_share:
            return unit
    return ""


def number_formats(
    columns: Sequence[pa.Array], decimal: str | None, thousands: str | None, num_rows: int
) -> list[tuple[str, str]]:
    """Returns decimal signs with separators of thousands, in the order in which the numbers of a file try them.

    Args:
        columns: of text.
        decimal, thousands: set by the user; None: as the cells show them.
        num_rows: to look at.
    """
    formats = [pair for pair in NUMBER_FORMATS if decimal in (None, pair[0]) and thousands in (None, pair[1])]
    # 1,234 is ambiguous, and is read as the columns are that can only be read with commas. Half of
    # their cells, since whole numbers have no sign.
    samples = [text.drop_null()[:num_rows] for text in columns]
    if any(share(pc.match_substring_regex(sample, DECIMAL_COMMA)) >= 0.5 for sample in samples):
        formats.sort(key=lambda pair: pair[0] != ",")
    return formats


def numbers_in(text: pa.Array, decimal: str = ".", thousands: str = "", unit: str = "") -> pa.Array:
    """Returns numbers in a format, float64; null for other texts.

    >>> numbers_in(pa.array(["$1,234.50", "$?", "7"]), thousands=",", unit="$").to_pylist()
    [1234.5, None, None]
    """
    if (decimal, thousands, unit) == (".", "", ""):
        try:
            return text.cast(pa.float64())
        except pa.ArrowInvalid:
            pass  # Arrow reads all cells or none.

    sign = re.escape(decimal)
    digits = r"\d+"
    if thousands:
        digits = rf"\d{{1,3}}(?:{re.escape(thousands)}\d{{3}})+|\d+"
    pattern = rf"^[+-]?(?:(?:{digits})(?:{sign}\d*)?|{sign}\d+)(?:[eE][+-]?\d+)?$"

    text = pc.replace_substring_regex(text, SPACES, " ")
    if unit:
        text = only(text, pc.match_substring(text, unit))
        text = pc.replace_substring(text, unit, "")
        text = pc.replace_substring_regex(text, r"^([+-]?)\s+|\s+$", r"\1")
    text = only(text, pc.match_substring_regex(text, pattern))
    if thousands:
        text = pc.replace_substring(text, thousands, "")

    text = pc.replace_substring(text, decimal, ".")
    # Arrow reads no plus sign.
    return pc.utf8_ltrim(text, "+").cast(pa.float64())


def times_in(text: pa.Array, date_format: str = ISO_8601) -> pa.Array:
    """Returns timestamps in a format of strptime, in UTC; null for other texts.

    >>> times_in(pa.array(["2024-02-28T12:00:00Z", "2024-02-30"])).is_null().to_pylist()
    [False, True]
    """
    if date_format != ISO_8601:
        return pc.strptime(text, format=date_format, unit="us", error_is_null=True)

    # Arrow reads all cells or none, so what is no date goes first.
    is_date = pc.match_substring_regex(text, rf"^\d{{4}}-\d\d-\d\d({ISO_TIME}{ISO_ZONE}?)?$")
    day = pc.utf8_slice_codeunits(text, 0, 10)
    parsed = pc.strptime(day, format="%Y-%m-%d", unit="s", error_is_null=True)
    # Written again, the thirtieth of February is the first of March.
    is_real = pc.equal(day, pc.strftime(parsed, format="%Y-%m-%d"))
    text = only(text, pc.and_(is_date, is_real))

    # Times with and without a zone are of two types.
    has_zone = pc.match_substring_regex(text, rf":.*{ISO_ZONE}$")
    zoned = only(text, has_zone).cast(pa.timestamp("us", "UTC"))
    local = only(text, pc.invert(has_zone)).cast(pa.timestamp("us"))
    return pc.coalesce(zoned.cast(pa.timestamp("us")), local)
