"""What a data set was found to hold: its phrases and class counts, and their form in a run's header.

`describe` adds to Source.description() what every source with known targets can tell. No TensorFlow.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hvtrain.data.source import Source

HEADER_WIDTH = 84
"""Characters of a header's text, beside the names of its lines."""
MAX_LINES = 3
"""Lines that a label has in a header; result.json has the rest."""
MAX_NAMES = 5


@dataclass(frozen=True)
class DataDescription:
    """A data set in words, with the examples of each class.

    Attributes:
        phrases: by label, such as "features", "splits" or "warnings".
        class_counts: by split, examples of each class. Only for targets that are known without
            reading the examples.
    """

    phrases: dict[str, list[str]] = field(default_factory=dict)
    class_counts: dict[str, list[int]] = field(default_factory=dict)

    def header(self) -> dict[str, str]:
        """The phrases as lines of a run's header, warnings last, each label in MAX_LINES at most."""
        # The header's line "dataset" has the numbers of examples.
        phrases = {label: texts for label, texts in self.phrases.items() if texts}
        if all(text.replace(",", "").split()[-1].isdigit() for text in phrases.get("splits", [])):
            phrases.pop("splits", None)
        warnings = phrases.pop("warnings", [])
        lines = {label: wrapped(texts) for label, texts in phrases.items()}
        if warnings:
            lines["warnings"] = wrapped(warnings, separator="; ")
        return lines


def describe(source: "Source") -> DataDescription:
    """Describes a data set that has been counted, on every rank alike."""
    phrases = {label: list(texts) for label, texts in source.description().items()}
    counts = class_counts(source)
    names = class_labels(source)
    # Sources that describe their targets themselves say it in their own way.
    if counts.get("train") and not {"classes", "target"} & phrases.keys():
        phrases["classes"] = [class_phrase(counts["train"], names)]
        warnings = [*phrases.get("warnings", []), *missing_classes(counts, names)]
        if warnings:
            phrases["warnings"] = warnings
    return DataDescription(phrases, counts)


def class_counts(source: "Source") -> dict[str, list[int]]:
    """Examples of each class by split; empty if targets are not classes, or not known without reading.

    Masks count by pixels, without the labels that are no class.
    """
    num_classes = source.facts().get("num_classes")
    if not num_classes:
        return {}
    counts = {}
    for split, targets in source.whole_targets().items():
        array = np.asarray(targets) if not isinstance(targets, Mapping) else np.empty(0)
        if array.size and array.dtype.kind in "iu":
            counts[split] = count_classes(array, num_classes).tolist()
    return counts


def count_classes(targets: np.ndarray, num_classes: int) -> np.ndarray:
    """Counts the targets of each class; values outside 0 ... num_classes - 1 do not count."""
    flat = targets.ravel()
    is_class = (flat >= 0) & (flat < num_classes)
    return np.bincount(flat[is_class].astype(np.int64), minlength=num_classes)


def class_labels(source: "Source") -> list[str]:
    """Names of the classes, or their numbers."""
    facts = source.facts()
    names = facts.get("class_names") or range(facts.get("num_classes") or 0)
    return [str(name) for name in names]


def class_phrase(counts: Sequence[int], names: Sequence[str]) -> str:
    """The number of classes, and the shares of the rarest and of the most frequent one.

    >>> class_phrase([61, 38, 1], ["no", "yes", "maybe"])
    '3, from 1% (maybe) to 61% (no)'
    >>> class_phrase([50, 50], ["no", "yes"])
    '2, 50% each'
    """
    total = sum(counts) or 1
    order = np.argsort(counts, kind="stable")
    rarest = order[0]
    commonest = order[-1]
    low = percent(counts[rarest] / total)
    high = percent(counts[commonest] / total)
    if low == high:
        return f"{len(counts)}, {low} each"
    return f"{len(counts)}, from {low} ({names[rarest]}) to {high} ({names[commonest]})"


def percent(share: float) -> str:
    """A share in percent, with a digit more for small ones.

    >>> percent(0.383), percent(0.0042)
    ('38%', '0.4%')
    """
    return f"{share:.1%}" if share < 0.01 else f"{share:.0%}"


def missing_classes(counts: Mapping[str, Sequence[int]], names: Sequence[str]) -> list[str]:
    """Names the classes that never occur in a split.

    >>> missing_classes({"train": [5, 4], "test": [3, 0]}, ["cat", "dog"])
    ['test has no dog']
    """
    phrases = []
    for split, split_counts in counts.items():
        missing = [name for name, count in zip(names, split_counts) if not count]
        if missing and any(split_counts):
            phrases.append(f"{split} has no {listed(missing)}")
    return phrases


def listed(names: Sequence[str], most: int = MAX_NAMES) -> str:
    """The first names of a list, and the number of all others.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    num_hidden = len(names) - most
    return f"{shown} and {num_hidden:,} more" if num_hidden > 0 else shown


def wrapped(
    phrases: Sequence[str],
    width: int = HEADER_WIDTH,
    max_lines: int = MAX_LINES,
    separator: str = ", ",
) -> str:
    """Joins phrases into lines; what does not fit is counted.

    >>> print(wrapped([f"column {number}" for number in range(40)], width=30, max_lines=2))
    column 0, column 1, column 2,
    column 3, column 4 and 35 more
    """
    # No phrase takes less than three characters, so more than these cannot fit.
    num_shown = min(len(phrases), max_lines * width // 3)
    while True:
        text = separator.join(phrases[:num_shown])
        if num_shown < len(phrases):
            text += f" and {len(phrases) - num_shown:,} more"
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
        if len(lines) <= max_lines or num_shown == 1:
            break
        num_shown -= 1
    if len(lines) > max_lines:  # One phrase is too long by itself.
        lines = [*lines[: max_lines - 1], textwrap.shorten(" ".join(lines[max_lines - 1 :]), width, placeholder=" ...")]
    return "\n".join(lines)
