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

    >>> _phrase(Column("age", "age", "number"), Cells(np.ones((2, 1))))
    'age: number'
    """
    text = f"{column.name}: {_noun(column, cells)}"
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
    if column.mean and not any(column.variance):
        details.append("always the same")

    num_gaps = int(cells.is_gap.sum())
    if num_gaps:
        noun = "gap" if num_gaps == 1 else "gaps"
        among_them = f", among them {' and '.join(odd_texts(cells))}" if cells.odd else ""
        details.append(f"{num_gaps:,} {noun}{among_them}, {_treatment(column)}")
    return f"{text} ({', '.join(details)})" if details else text


def _noun(column: Column, cells: Cells) -> str:
    if column.is_category:
        noun = "names" if column.kind == "name" else "codes"
        return f"{pc.count_distinct(cells.values).as_py():,} {noun}"
    return f"vector of {column.length} numbers" if column.kind == "vector" else column.kind


def odd_texts(cells: Cells) -> list[str]:
    """The first odd cells, as messages show them."""
    return [repr(text) for text in cells.odd[:MAX_ODD]]


def _treatment(column: Column) -> str:
    if not len(column.fill):
        return "rows left out"
    if column.is_category and column.missing == "indicator":
        return "a name of their own"
    if column.is_category:
        return f"filled with the most frequent value {column.fill[0]}"
    statistic = "most frequent value" if column.missing == "most_frequent" else "median"
    flagged = " and flagged" if column.missing == "indicator" else ""
    return f"filled with the {statistic} {column.fill[0]:g}{flagged}"


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
