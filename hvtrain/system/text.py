"""Formats values for people: durations, sizes, tables, and settings by dotted name."""

from collections.abc import Sequence
from typing import Any


def duration(seconds: float) -> str:
    """Formats seconds in at most two units.

    >>> duration(4.2), duration(42), duration(312), duration(200_000)
    ('4.2 s', '42 s', '5 min 12 s', '55 h 33 min')
    """
    # Only short times need fractions of a second.
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def human_bytes(num_bytes: float) -> str:
    """Formats a number of bytes with a unit.

    >>> human_bytes(4), human_bytes(5000), human_bytes(67108864), human_bytes(2.5 * 2**40)
    ('4 B', '5 KiB', '64 MiB', '2560 GiB')
    """
    # GiB only from 10 GiB on, since without decimals 5,500 MiB is more precise than 5 GiB.
    if num_bytes >= 10 * 2**30:
        return f"{num_bytes / 2**30:.0f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.0f} MiB"
    if num_bytes >= 2**10:
        return f"{num_bytes / 2**10:.0f} KiB"
    return f"{num_bytes:.0f} B"


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_known(value: float | None, format_spec: str, missing: str = "-") -> str:
    """Formats a number; returns `missing` for None.

    >>> format_known(1234.5, ",.1f"), format_known(None, ",.1f"), format_known(None, ".2f", missing="")
    ('1,234.5', '-', '')
    """
    return missing if value is None else format(value, format_spec)


def aligned(table: Sequence[Sequence[str]], alignments: str = "") -> list[str]:
    """Formats a table as lines of text.

    `alignments` has "<" or ">" for each column; by default, all but the first are right-aligned.

    >>> aligned([["a", "speed"], ["long", "7"]])
    ['a     speed', 'long      7']
    """
    columns = list(zip(*table))
    alignments = alignments or "<".ljust(len(columns), ">")
    formats = [f"{align}{max(map(len, column))}" for align, column in zip(alignments, columns)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in table]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of a nested dictionary by dotted name."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
