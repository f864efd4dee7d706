"""What the columns of a table became, in words, for the description of a data set."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pyarrow.compute as pc

from hvtrain.data.formats.columns import Cells, Column
from hvtrain.data.formats.schema import Schema

MAX_PHRASES = 20
"""More columns are counted by kind, and only the odd ones described."""
MAX_CLASS_PHRASES = 5
MAX_ODD = 3
"""Odd cells of a column that are shown."""


def describe(schema: Schema, cells: Mapping[str, Cells]) -> list[str]:
    """Phrases of what each column became and what is odd in it, then what is left out.

    Args:
        schema: fitted.
        cells: of the columns, by name.
    """
    phrases = {column.name: _phrase(column, cells[column.name]) for column in schema.columns}
    if len(phrases) > MAX_PHRASES:
        # What is ordinary is counted, so that what is odd can be seen.
        ordinary = [column for column in schema.columns if "(" not in phrases[column.name]]
        counts = Counter(column.kind for column in ordinary)
        phrases = {name: phrase for name, phrase in phrases.items() if "(" in phrase}
        phrases |= {kind: f"{count:,} columns: {kind}" for kind, count in counts.items()}
    result = list(phrases.values())
    hidden = len(result) - 2 * MAX_PHRASES
    if hidden > 0:
        result = [*result[: 2 * MAX_PHRASES], f"and {hidden:,} more"]
    if schema.left_out:
        result.append("left out: " + ", ".join(f"{name} ({reason})" for name, reason in schema.left_out.items()))
    return result


def _phrase(column: Column, cells: Cells) -> str:
    """Describes a column, with what is odd in parentheses.

    >>> _phrase(Column("age", "age", "number"), Cells(np.ones((2, 1)), np.zeros(2, bool), ()))
    'age: number'
    """
    details = []
    if column.feature == "string_hashed":
        details.append("hashed")
    if column.unit:
        details.append(f"in {column.unit}")
    if column.decimal == "," or column.thousands:
        details.append(f"written as 1{column.thousands}234{column.decimal}5")
    if column.kind == "date":
        details.append(column.part or "days since 1970-01-01")
    if column.date_format:
        details.append(f"read as {column.date_format}")
    if column.mean and not np.ptp(np.nan_to_num(cells.values, nan=column.mean[0])):
        details.append("always the same")

    num_gaps = int(cells.is_gap.sum())
    if num_gaps:
        noun = "gap" if num_gaps == 1 else "gaps"
        details.append(f"{num_gaps:,} {noun}{_among_them(cells)}, {_treatment(column)}")
    text = f"{column.name}: {_kind_in_words(column, cells)}"
    if details:
        text += f" ({', '.join(details)})"
    return text


def _kind_in_words(column: Column, cells: Cells) -> str:
    if column.kind == "vector":
        return f"vector of {column.length} numbers"
    if not column.is_category:
        return column.kind
    nouns = {"name": "names", "integer": "codes"}
    return f"{pc.count_distinct(cells.values).as_py():,} {nouns[column.kind]}"


def _among_them(cells: Cells) -> str:
    if not len(cells.odd):
        return ""
    return ", among them " + " and ".join(repr(text) for text in cells.odd[:MAX_ODD])


def _treatment(column: Column) -> str:
    if not len(column.fill):
        return "rows left out"
    if column.is_category:
        if column.missing == "indicator":
            return "a name of their own"
        return f"filled with the most frequent value {column.fill[0]}"
    if column.missing == "most_frequent":
        return f"filled with the most frequent value {column.fill[0]:g}"
    flagged = " and flagged" if column.missing == "indicator" else ""
    return f"filled with the median {column.fill[0]:g}{flagged}"


def describe_target(schema: Schema, targets: np.ndarray) -> str:
    """What the target became: its classes with their shares, or the range of its numbers.

    Args:
        schema: inferred.
        targets: of the training rows, as the model takes them.
    """
    name = schema.target.name
    if not schema.classes:
        return f"{name}: number ({targets.min():g} to {targets.max():g})"
    counts = np.bincount(targets, minlength=len(schema.classes))
    order = np.argsort(-counts, kind="stable")[:MAX_CLASS_PHRASES]
    shares = [f"{schema.classes[index]} {counts[index] / len(targets):.0%}" for index in order]
    if len(schema.classes) > len(shares):
        shares.append("...")
    return f"{name}: {len(schema.classes):,} classes ({', '.join(shares)})"
