"""Figures for HTML pages, as plain values that report/base.html.j2 renders by `kind`. Pure.

Tasks make them from predictions, and `inspect` from a data set's examples.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """The base of all figures: the page shows the title, the note, and then the content."""

    title: str
    note: str


@dataclass(frozen=True)
class Table(Figure):
    """A table of numbers and text."""

    columns: list[str]
    rows: list[list[Any]]
    kind: str = "table"


@dataclass(frozen=True)
class Matrix(Figure):
    """A confusion matrix.

    Args:
        labels: Names of the classes.
        counts: Numbers of examples; a row for each true class, a column for each predicted class.
    """

    labels: list[str]
    counts: list[list[int]]
    kind: str = "matrix"


@dataclass(frozen=True)
class Pictures(Figure):
    """Pictures with captions, and a legend of their colors.

    Args:
        pictures: (PNG in base64, caption) pairs.
        legend: (name, "#rrggbb") pairs.
        panels: Number of images side by side in each picture, for its width on the page.
    """

    pictures: list[tuple[str, str]]
    legend: list[tuple[str, str]] = field(default_factory=list)
    panels: int = 1
    kind: str = "pictures"


@dataclass(frozen=True)
class Texts(Figure):
    """Pairs of texts.

    Args:
        pairs: (input, model output) pairs.
        is_continuation: True if the output continues the input; the page then shows both on one line.
    """

    pairs: list[tuple[str, str]]
    is_continuation: bool
    kind: str = "texts"


@dataclass(frozen=True)
class Scatter(Figure):
    """A scatter plot, with the line on which perfect predictions lie.

    Args:
        points: (x, y) pairs.
        line: "diagonal" for y = x, or "zero" for y = 0.
    """

    x_label: str
    y_label: str
    points: list[tuple[float, float]]
    line: str
    kind: str = "scatter"
