"""Curves of a run over its epochs, of several runs, and clouds of points: as SVG for a page, and as one PNG.

Colors of an SVG are CSS variables of the page, so that it follows the reader's light or dark mode.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hvtrain.core.records import TEMPORARY
from hvtrain.report.run_files import RunFiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_COLORS = 6
MOST_RANKS = 6  # Each with its own curve; for more ranks the slowest, median and fastest.
# The colors that Matplotlib draws with, each replaced by a variable of the page.
_SERIES = [f"#0a0b0{index + 1}" for index in range(NUM_COLORS)]
_INK, _MUTED, _LINE = "#0a0c01", "#0a0c02", "#0a0c03"
_VARIABLES = {
    **{color: f"var(--series-{index + 1})" for index, color in enumerate(_SERIES)},
    **{_INK: "var(--ink)", _MUTED: "var(--muted)", _LINE: "var(--line)"},
}
_PRINTED = ["#1f6fb4", "#e07b39", "#4c9f70", "#b5489b", "#8a63c4", "#8a949c"]
_WIDTH, _HEIGHT = 4.4, 2.6  # Inches.


@dataclass(frozen=True)
class Series:
    """A curve, with a point for each epoch. Those of one color belong together."""

    label: str
    points: list[tuple[float, float]]
    color: int = 0
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves with a common axis, over the epochs."""

    title: str
    series: list[Series]
    from_zero: bool = False


def charts_of(run: RunFiles) -> list[Chart]:
    """Loss, metrics, learning rate and speed of a run: training and validation in one chart."""
    names = list(dict.fromkeys(name.removeprefix("val_") for row in run.history for name in row.metrics))
    names.sort(key=lambda name: name != "loss")
    charts = [Chart(name, _both(run, name)) for name in names]
    rates = [(float(row.epoch), row.learning_rate) for row in run.history]
    speeds = [(float(row.epoch), row.examples_per_second) for row in run.history]
    charts += [
        Chart("learning rate", [Series("", rates)], from_zero=True),
        Chart("examples per second, all ranks", [Series("", speeds)], from_zero=True),
    ]
    if run.rank_seconds:
        charts.append(Chart("work of a step by rank, ms", _ranks(run.rank_seconds), from_zero=True))
    return [chart for chart in charts if any(series.points for series in chart.series)]


def charts_of_several(runs: Sequence[RunFiles], labels: Sequence[str]) -> list[Chart]:
    """A chart for each metric in validation and in training, and for the speed, with a curve for each run."""
    names = list(
        dict.fromkeys(name.removeprefix("val_") for run in runs for row in run.history for name in row.metrics)
    )
    names.sort(key=lambda name: name != "loss")
    columns = [column for name in names for column in (f"val_{name}", name)]
    found = []
    for column in columns:
        curves = [Series(label, _column(run, column), color) for color, (run, label) in enumerate(zip(runs, labels))]
        found.append(Chart(column, curves))
    speeds = [[(float(row.epoch), row.examples_per_second) for row in run.history] for run in runs]
    found.append(
        Chart(
            "examples per second", [Series(label, points, i) for i, (points, label) in enumerate(zip(speeds, labels))]
        )
    )
    return [chart for chart in found if any(series.points for series in chart.series)]


def svg(chart: Chart, has_legend: bool = True) -> str:
    """The chart as an element for a page."""
    return _as_svg(chart.title, lambda axes: _draw(axes, chart, _SERIES, has_legend))


def scatter_svg(figure: dict[str, Any]) -> str:
    """A core.figures.Scatter as an element for a page."""

    def draw(axes: "Axes") -> None:
        x, y = zip(*figure["points"])
        axes.scatter(x, y, s=9, color=_SERIES[0], alpha=0.55, linewidths=0)
        if figure["line"] == "diagonal":
            axes.axline((min(x), min(x)), slope=1, color=_MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
        else:
            axes.axhline(0, color=_MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.set(xlabel=figure["x_label"], ylabel=figure["y_label"])

    return _as_svg(f"{figure['title']}: {figure['y_label']} by {figure['x_label']}", draw)


def write_png(charts: Sequence[Chart], path: Path) -> None:
    """All charts in one picture, on white."""
    from matplotlib.figure import Figure

    columns = min(3, len(charts)) or 1
    rows = -(-len(charts) // columns) or 1
    figure = Figure(figsize=(_WIDTH * columns, (_HEIGHT + 0.3) * rows), layout="constrained")
    for number, chart in enumerate(charts):
        axes = figure.add_subplot(rows, columns, number + 1)
        _style(axes, "#20262b", "#68727a", "#dfe4e8")
        _draw(axes, chart, _PRINTED)
        axes.set_title(chart.title, fontsize=10, loc="left")
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    temporary.unlink(missing_ok=True)
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(path)


def _both(run: RunFiles, name: str) -> list[Series]:
    found = [Series("training", _column(run, name)), Series("validation", _column(run, f"val_{name}"), color=1)]
    return [series for series in found if series.points]


def _column(run: RunFiles, name: str) -> list[tuple[float, float]]:
    return [(float(row.epoch), row.metrics[name]) for row in run.history if name in row.metrics]


def _ranks(rows: dict[int, list[float]]) -> list[Series]:
    most = max(map(len, rows.values()))
    if most <= MOST_RANKS:
        each = [
            [(float(epoch), 1000 * row[rank]) for epoch, row in rows.items() if rank < len(row)] for rank in range(most)
        ]
        return [Series(f"rank {rank}", points, rank) for rank, points in enumerate(each)]
    kinds: dict[str, Callable[[list[float]], float]] = {"slowest": max, "median": median, "fastest": min}
    return [
        Series(name, [(float(epoch), 1000 * kind(row)) for epoch, row in rows.items()], color)
        for color, (name, kind) in enumerate(kinds.items())
    ]


def _draw(axes: "Axes", chart: Chart, colors: Sequence[str], has_legend: bool = True) -> None:
    for series in chart.series:
        x, y = ([point[side] for point in series.points] for side in (0, 1))
        axes.plot(
            x,
            y,
            color=colors[series.color % NUM_COLORS],
            linestyle="--" if series.color >= NUM_COLORS else "-",
            linewidth=1.6,
            marker="o" if len(x) < 3 else None,
            markersize=3.5,
            label=series.label,
        )
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    epochs = {epoch for series in chart.series for epoch, _ in series.points}
    if len(epochs) == 1:
        axes.set_xticks(list(epochs))
    else:
        axes.locator_params("x", integer=True)
    axes.locator_params("y", nbins=5)
    if max((value for series in chart.series for _, value in series.points), default=0) >= 1000:
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("epoch")
    if has_legend and len(chart.series) > 1:
        # Above the axes, where no curve is.
        axes.legend(
            frameon=False,
            fontsize=8,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=3,
            borderpad=0,
            labelcolor=axes.xaxis.label.get_color(),
        )


def _style(axes: "Axes", ink: str, muted: str, line: str) -> None:
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(line)
    axes.grid(color=line, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=muted, labelsize=9, length=0)
    axes.title.set_color(ink)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=muted, fontsize=9)
        axis.get_offset_text().set(color=muted, fontsize=7)


def _as_svg(title: str, draw: Any) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        _style(axes, _INK, _MUTED, _LINE)
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_a_page(file.getvalue(), title)


def _for_a_page(text: str, title: str) -> str:
    """Removes what the page has already or would have twice: the XML head, names of groups, sizes and fonts."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[\w.-]*"', "<g", text)
    text = re.sub(r"font-family: [^;\"]*;? ?|font-(weight|stretch|style): normal;? ?", "", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    head = f'<svg role="img" aria-label="{escape(title)}"'
    return re.sub(
        r'<svg([^>]*?) width="[^"]*"', rf"{head}\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text), count=1
    )
