"""Describes a data set in phrases and class counts, and formats them for a run's header.

`describe` adds classes to Source.description() if targets are known without reading examples. Imports
no TensorFlow.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hvtrain.data.source import Phrases, Source

# Width of a header's text in characters, not counting the line labels.
HEADER_WIDTH = 84
# Maximum number of lines for a label in a header; result.json has the full text.
MAX_LINES = 3
# Maximum number of names that listed() and format_counts() show.
MAX_NAMES = 5


def header(description: "Phrases") -> dict[str, str]:
    """Formats a description as lines of a run's header, at most MAX_LINES for each label.

    >>> columns = [f"column {number}" for number in range(90)]
    >>> header({"features": columns})["features"][-24:]
    'column 21, ... 90 in all'
    """
    lines = {}
    for label, phrases in description.items():
        # The header's "dataset" line already gives the number of examples.
        if not phrases or label == "splits":
            continue
        separator = "; " if label == "warnings" else ", "
        # Names of files and columns are not broken at hyphens.
        lines[label] = textwrap.fill(
            separator.join(phrases),
            HEADER_WIDTH,
            max_lines=MAX_LINES,
            placeholder=f" ... {len(phrases):,} in all",
            break_on_hyphens=False,
        )
    return lines


def describe(source: "Source") -> "Phrases":
    """Describes a data set whose examples have been counted, in phrases by label; equal on every rank."""
    phrases = dict(source.description())
    counts = class_counts(source)
    names = class_labels(source)
    if counts:
        # Tables describe their targets themselves.
        if counts.get("train") and "target" not in phrases:
            phrases["classes"] = [class_phrase(counts["train"], names)]
        warnings = list(phrases.pop("warnings", ()))
        if len(names) == 1:
            warnings.append(f"{names[0]} is the only class, so there is nothing to tell apart")
        # Warnings come last, where readers notice them.
        phrases["warnings"] = [*warnings, *missing_classes(counts, names)]
    return phrases


def class_counts(source: "Source") -> dict[str, list[int]]:
    """Counts the examples of each class, by split; empty without classes, or if counting would read examples.

    In masks, pixels are counted. Labels that are not classes are ignored.
    """
    num_classes = source.facts().get("num_classes")
    if not num_classes:
        return {}
    counts = {}
    for split, targets in source.whole_targets().items():
        # A dict of several targets becomes an object array, which is not counted.
        array = np.asarray(targets)
        # Rows with a number for each class, several of which may be 1, are not counted either.
        is_counted = array.dtype.kind in "iu" and array.shape[1:] != (num_classes,)
        if array.size and is_counted:
            counts[split] = count_classes(array, num_classes).tolist()
    return counts


def count_classes(targets: np.ndarray, num_classes: int) -> np.ndarray:
    """Counts the targets of each class; values outside 0 ... num_classes - 1 do not count."""
    flat = targets.ravel()
    is_class = (flat >= 0) & (flat < num_classes)
    return np.bincount(flat[is_class].astype(np.int64), minlength=num_classes)


def class_labels(source: "Source") -> list[str]:
    """Returns the class names, or the class numbers as text if the classes have no names."""
    facts = source.facts()
    return list(map(str, facts.get("class_names") or range(facts.get("num_classes") or 0)))


def class_phrase(counts: Sequence[int], names: Sequence[str]) -> str:
    """Describes the class balance: the number of classes, and the shares of the rarest and the commonest.

    >>> class_phrase([61, 38, 1], ["no", "yes", "maybe"])
    '3, from 1% (maybe) to 61% (no)'
    >>> class_phrase([50, 50], ["no", "yes"])
    '2, 50% each'
    """
    total = sum(counts) or 1
    shares = [
        (percent(count / total), name)
        for count, name in sorted(zip(counts, names), key=itemgetter(0))
    ]
    low, rarest = shares[0]
    high, commonest = shares[-1]
    if low == high:
        return f"{len(counts)}, {low} each"
    return f"{len(counts)}, from {low} ({rarest}) to {high} ({commonest})"


def percent(share: float) -> str:
    """Formats a share in percent, with one decimal below 1%.

    >>> percent(0.383), percent(0.0042)
    ('38%', '0.4%')
    """
    return f"{share:.1%}" if share < 0.01 else f"{share:.0%}"


def missing_classes(counts: Mapping[str, Sequence[int]], names: Sequence[str]) -> list[str]:
    """Names the classes that each split lacks, one phrase per split; a split without any examples is skipped.

    >>> missing_classes({"train": [5, 4], "test": [3, 0]}, ["cat", "dog"])
    ['test has no dog']
    """
    phrases = []
    for split, split_counts in counts.items():
        missing = [name for name, count in zip(names, split_counts) if not count]
        if missing and any(split_counts):
            phrases.append(f"{split} has no {listed(missing)}")
    return phrases


def format_counts(kinds: Counter[str]) -> str:
    """Lists the most frequent kinds, each with its count.

    >>> format_counts(Counter([".csv", ".md", ".md"]))
    '2 x .md, 1 x .csv'
    """
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common(MAX_NAMES))


def listed(names: Sequence[str], most: int = MAX_NAMES, separator: str = ", ") -> str:
    """Joins the first names of a list, and adds how many more there are.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = separator.join(names[:most])
    num_hidden = len(names) - most
    return f"{shown} and {num_hidden:,} more" if num_hidden > 0 else shown
