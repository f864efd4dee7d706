"""Describes how the columns of a table are used, and what is odd in them, in phrases for a run's header."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hvtrain.data.formats.cell_texts import CLOCK, numbers_in, share
from hvtrain.data.formats.columns import Cells, Column
from hvtrain.data.formats.schema import Schema

# In a table of more columns than this, ordinary ones are only counted, by kind.
MAX_PHRASES = 20
# At most this many classes of the target are shown, the most frequent first.
MAX_CLASS_PHRASES = 5
# At most this many odd cells of a column are shown.
MAX_ODD = 3
# At most this many distinct names of a column are searched for odd ones.
MAX_NAMES_SEARCHED = 10_000
# Numbers that people write in place of missing ones.
PLACEHOLDERS = {-99, -999, -9999, -99999, 99, 999, 9999, 99999}


def describe(schema: Schema, cells: Mapping[str, Cells]) -> list[str]:
    """Describes how each column is used and what is odd in it, then what is left out.

    Args:
        schema: The fitted schema.
        cells: Cells of the columns, by name.
    """
    phrases = [_phrase(column, cells[column.name]) for column in schema.columns]
    if len(phrases) > MAX_PHRASES:
        # Columns without details in parentheses are only counted, so that the others stand out.
        pairs = zip(schema.columns, phrases)
        counts = Counter(column.kind for column, phrase in pairs if "(" not in phrase)
        phrases = [phrase for phrase in phrases if "(" in phrase]
        phrases += [f"columns of kind {kind}: {count:,}" for kind, count in counts.items()]
    if schema.left_out:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in schema.left_out.items())
        phrases.append(f"left out: {reasons}")
    return phrases


def _phrase(column: Column, cells: Cells) -> str:
    """Describes a column, with details in parentheses.

    >>> _phrase(Column("age", "age", "number"), Cells(np.ones((2, 1))))
    'age: number'
    """
    text = f"{column.name}: {_noun(column, cells)}"
    details = []
    if column.feature == "string_hashed":
        details.append("hashed")
    if column.unit:
        details.append("seconds" if column.unit == CLOCK else f"in {column.unit}")
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
        details.append(f"{num_gaps:,} {noun}, {_treatment(column)}")
    details += _odd_names(cells.values) if column.is_category else _odd_numbers(cells.values)
    return f"{text} ({', '.join(details)})" if details else text


def _odd_names(values: pa.Array) -> list[str]:
    """Describes what is odd in a column of names: most are numbers, or two differ only in case or spaces.

    >>> _odd_names(pa.array(["1", "2", "3.5", "none yet", "None yet"]))
    ["numbers except 'none yet' and 'None yet'", "'none yet' beside 'None yet'"]
    """
    if not pa.types.is_string(values.type):
        return []
    names = pc.unique(values).drop_null()[:MAX_NAMES_SEARCHED]
    is_number = numbers_in(names).is_valid()
    details = []
    if 0.5 <= share(is_number) < 1:
        others = names.filter(pc.invert(is_number))[:MAX_ODD].to_pylist()
        details.append(f"numbers except {' and '.join(map(repr, others))}")
    return details + _similar_names(names.to_pylist())


def _similar_names(names: Sequence[str]) -> list[str]:
    """Returns a phrase, in a list, that quotes two names that differ only in case or spaces; empty if there are none.

    >>> _similar_names(["no", "yes", "No "])
    ["'no' beside 'No '"]
    """
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault("".join(name.casefold().split()), name)
        if other != name:
            return [f"{other!r} beside {name!r}"]
    return []


def _odd_numbers(values: np.ndarray) -> list[str]:
    """Describes a number that may stand for a gap: one of PLACEHOLDERS, in several rows, far from all others.

    >>> _odd_numbers(np.array([[20.0], [35.0], [-999.0], [50.0], [-999.0]]))
    ['-999 in 2 rows, perhaps a gap: leave those cells empty']
    """
    finite = values[np.isfinite(values)]
    # The extremes are checked first: np.unique sorts, which would take
    # long for thousands of columns.
    if values.shape[1] > 1 or not len(finite) or not {finite.min(), finite.max()} & PLACEHOLDERS:
        return []
    numbers, counts = np.unique(finite, return_counts=True)
    for end, others in ((0, numbers[1:]), (-1, numbers[:-1])):
        is_candidate = numbers[end] in PLACEHOLDERS and counts[end] > 1 and len(others) > 1
        if is_candidate and np.abs(others - numbers[end]).min() > np.ptp(others) / 2:
            return [
                f"{numbers[end]:g} in {counts[end]:,} rows, perhaps a gap: leave those cells empty"
            ]
    return []


def _noun(column: Column, cells: Cells) -> str:
    """Names a column's kind, with the number of its categories or the length of its vectors."""
    if column.is_category:
        noun = "name" if column.kind == "name" else "code"
        num_distinct = pc.count_distinct(cells.values).as_py()
        return f"{num_distinct:,} {noun}{'s' * (num_distinct != 1)}"
    return f"vector of length {column.length}" if column.kind == "vector" else column.kind


def odd_texts(cells: Cells) -> str:
    """Lists the first MAX_ODD odd cells for messages."""
    return ", ".join(map(repr, cells.odd[:MAX_ODD]))


def _treatment(column: Column) -> str:
    """Describes how the gaps of a column are treated."""
    if not column.fill:
        return "rows left out"
    if column.is_category and column.missing == "indicator":
        return "counted as a name"
    if column.is_category:
        return f"filled with the most frequent value {column.fill[0]}"
    statistic = "most frequent value" if column.missing == "most_frequent" else "median"
    flagged = " and flagged" if column.missing == "indicator" else ""
    return f"filled with the {statistic} {column.fill[0]:g}{flagged}"


def describe_target(schema: Schema, targets: np.ndarray) -> str:
    """Describes the target: its classes with their shares, or the range of its numbers.

    Args:
        schema: The inferred schema.
        targets: Targets of the training rows, as the model takes them: class indices or numbers, [n].
    """
    name = schema.target.name
    if not schema.classes:
        return f"{name}: number ({targets.min():g} to {targets.max():g})"
    counts = np.bincount(targets, minlength=len(schema.classes))
    order = np.argsort(-counts, kind="stable")[:MAX_CLASS_PHRASES]
    shares = [f"{schema.classes[index]} {counts[index] / len(targets):.0%}" for index in order]
    if len(schema.classes) > len(shares):
        shares.append("...")
    shares += _similar_names(schema.classes)
    return f"{name}: {len(schema.classes):,} classes ({', '.join(shares)})"
