"""Figures for the report, which a task makes from predictions: plain values that the report renders by `kind`.

Pure.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """What the page shows above and below any figure."""

    title: str
    note: str


@dataclass(frozen=True)
class Table(Figure):
    """Rows of numbers and text."""

    columns: list[str]
    rows: list[list[Any]]
    kind: str = "table"


@dataclass(frozen=True)
class Matrix(Figure):
    """A confusion matrix: counts of examples, with a row for each true class and a column for each predicted one."""

    labels: list[str]
    counts: list[list[int]]
    kind: str = "matrix"


@dataclass(frozen=True)
class Pictures(Figure):
    """Pictures, each a base64 PNG with a caption, and a legend of their colors as (name, "#rrggbb") pairs.

    Args:
        panels: Number of images side by side in each picture. The page leaves room for them.
    """

    pictures: list[tuple[str, str]]
    legend: list[tuple[str, str]] = field(default_factory=list)
    panels: int = 1
    kind: str = "pictures"


@dataclass(frozen=True)
class Texts(Figure):
    """Pairs of texts: input and model output. goes_on: the output continues the input."""

    pairs: list[tuple[str, str]]
    goes_on: bool
    kind: str = "texts"


@dataclass(frozen=True)
class Scatter(Figure):
    """Points (x, y), and the line on which perfect predictions lie: "diagonal" or "zero"."""

    x_label: str
    y_label: str
    points: list[tuple[float, float]]
    line: str
    kind: str = "scatter"
