"""Draws charts, such as the curves of runs: as PNG files, or as SVG that follows a page's light or dark mode."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from hvtrain.report.run_files import RunFiles
from hvtrain.system.files import write_atomic

BLUE = "#1f6fb4"
ORANGE = "#e07b39"
GREY = "#8a949c"
# Colors of curves. On the pages they are the CSS variables --series-1 to --series-6.
SERIES = (BLUE, ORANGE, "#4c9f70", "#b5489b", "#8a63c4", GREY)
INK = "#20262b"
MUTED = "#68727a"
LINE = "#dfe4e8"
_CSS_VARIABLES = {color: f"var(--series-{number})" for number, color in enumerate(SERIES, 1)} | {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
}

# Matplotlib's settings for a page: no ticks, no frame at the top and right, and muted colors.
_PAGE_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",
    "text.color": INK,  # For legends.
    "xtick.color": MUTED,
    "xtick.labelsize": 9,
    "xtick.major.size": 0,
    "ytick.color": MUTED,
    "ytick.labelsize": 9,
    "ytick.major.size": 0,
}

# A title, and the function that draws the panel on Matplotlib's axes.
Panel = tuple[str, Callable[[Any], None]]
# Pairs of an epoch and a value.
Points = Sequence[tuple[float, float]]

# Up to this many ranks get a curve each; for more, only the slowest, median and fastest are shown.
MAX_RANK_CURVES = 6
# Metrics without a chart: FLOP/s are proportional to the speed, which has one.
_NOT_DRAWN = ("flops_per_second", "share_of_peak")


def write_panels(
    panels: Sequence[Panel], path: Path, max_columns: int, panel_size: tuple[float, float]
) -> None:
    """Draws the panels into one picture, row by row.

    Args:
        panels: at least one; a panel whose axis labels suffice has the title "".
        path: a PNG file. Readers see either the old picture or the new one, never part of it.
        max_columns: maximum number of panels in a row.
        panel_size: width and height of a panel, in inches.
    """
    # A Figure made without pyplot needs no display, and need not be closed.
    from matplotlib.figure import Figure

    width, height = panel_size
    columns = min(max_columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    figure.subplots(rows, columns)
    for axes, (title, draw) in zip(figure.axes, panels):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        axes.set_title(title, loc="left", fontsize=10)
    # The last row may have more axes than there are panels.
    for axes in figure.axes[len(panels) :]:
        axes.remove()

    file = io.BytesIO()
    figure.savefig(file, dpi=130, format="png")
    # Replaced atomically, since a browser may read the picture at any moment.
    write_atomic(path, file.getvalue())


def page_svg(
    title: str, draw: Callable[[Any], None], size: tuple[float, float] = (4.4, 2.6)
) -> str:
    """Draws one chart as an SVG element for a page.

    Args:
        title: the text for screen readers; the page shows it beside the chart.
        draw: draws on the axes, in the colors of this module.
        size: width and height in inches. The page scales the chart, so they only set its aspect
            ratio and the relative size of its text.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The salt makes ids reproducible, so that a chart has the same bytes each time.
    with mpl.rc_context(_PAGE_STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)

    return _adapt_svg(file.getvalue(), title)


def _adapt_svg(text: str, title: str) -> str:
    """Adapts an SVG to a page: adds a label and CSS colors; drops the XML header, group ids and fonts."""
    text = text[text.index("<svg") :]
    fonts = r"font-family: [^;\"]*;? ?|font-(weight|stretch|style): normal;? ?"
    # Ids must be unique on a page, and nothing refers to those of groups.
    unused = rf'<metadata>.*?</metadata>|<!--.*?-->|(?<=<g) id="[\w.-]*"|{fonts}'
    text = re.sub(unused, "", text, flags=re.DOTALL)

    # As CSS variables, the colors follow the page's light or dark mode.
    for color, variable in _CSS_VARIABLES.items():
        text = text.replace(color, variable)

    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


@dataclass(frozen=True)
class Series:
    """A curve with one point per epoch. `color` counts from 0; curves with the same color belong together."""

    label: str
    points: Points
    color: int = 0


@dataclass(frozen=True)
class Chart:
    """Curves over the epochs, on common axes. `from_zero` makes the vertical axis start at 0."""

    title: str
    series: list[Series]
    from_zero: bool = False


def run_charts(run: RunFiles) -> list[Chart]:
    """Returns a run's charts: each metric in training and validation, learning rate, speed, and each rank's work."""
    charts = []
    for name in _metric_names([run]):
        training = Series("training", _metric(run, name))
        validation = Series("validation", _metric(run, f"val_{name}"), color=1)
        charts.append(Chart(name, [curve for curve in (training, validation) if curve.points]))

    others = {
        "learning rate": [Series("", [(row.epoch, row.learning_rate) for row in run.history])],
        "examples per second, all ranks": [Series("", _speed(run))],
        "work of a step by rank, ms": _rank_series(run.rank_seconds),
    }
    charts += [Chart(title, series, from_zero=True) for title, series in others.items()]
    return _nonempty(charts)


def comparison_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """Returns charts that compare runs: one for each metric in validation and in training, and one for the speed."""

    def curves(points_of: Callable[[RunFiles], Points]) -> list[Series]:
        # A run has the same color in all charts.
        return [Series("", points_of(run), color) for color, run in enumerate(runs)]

    # With a curve for each run, training and validation in one chart would be too crowded.
    columns = [column for name in _metric_names(runs) for column in (f"val_{name}", name)]
    charts = [Chart(column, curves(partial(_metric, name=column))) for column in columns]
    return _nonempty([*charts, Chart("examples per second", curves(_speed))])


def svg(chart: Chart) -> str:
    """Draws the chart as an SVG element for a page."""
    return page_svg(chart.title, partial(_draw, chart))


def scatter_svg(figure: dict[str, Any]) -> str:
    """Draws a core.figures.Scatter, given as in review.json, as an SVG element for a page."""

    def draw(axes):
        x, y = zip(*figure["points"])
        axes.scatter(x, y, s=9, color=BLUE, alpha=0.55, linewidths=0)
        dashes = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (4, 3))}
        if figure["line"] == "diagonal":
            axes.axline((min(x), min(x)), slope=1, **dashes)
        else:
            axes.axhline(0, **dashes)

        axes.set(xlabel=figure["x_label"], ylabel=figure["y_label"])

    # The page shows the figure's title already; screen readers need the axes too.
    title = f"{figure['title']}: {figure['y_label']} by {figure['x_label']}"
    return page_svg(title, draw)


def write_png(charts: Sequence[Chart], path: Path) -> None:
    """Draws all charts into one picture on a white background. There must be at least one chart."""
    panels = [(chart.title, partial(_draw, chart)) for chart in charts]
    write_panels(panels, path, 3, (4.4, 2.9))


def _nonempty(charts: list[Chart]) -> list[Chart]:
    return [chart for chart in charts if any(series.points for series in chart.series)]


def _metric_names(runs: Sequence[RunFiles]) -> list[str]:
    """Returns the names of the metrics without "val_": the loss first, the others in order of appearance."""
    columns = (name for run in runs for row in run.history for name in row.metrics)
    names = dict.fromkeys(name.removeprefix("val_") for name in columns if name not in _NOT_DRAWN)
    return sorted(names, key=lambda name: name != "loss")


def _metric(run: RunFiles, name: str) -> Points:
    return [(row.epoch, row.metrics[name]) for row in run.history if name in row.metrics]


def _speed(run: RunFiles) -> Points:
    return [(row.epoch, row.examples_per_second) for row in run.history]


def _rank_series(rank_seconds: dict[int, list[float]]) -> list[Series]:
    """Returns curves of the ranks' work in a step, in milliseconds.

    Args:
        rank_seconds: each rank's seconds, by epoch. A resume can change the number of ranks.
    """
    num_ranks = max(map(len, rank_seconds.values()), default=0)
    if num_ranks <= MAX_RANK_CURVES:
        curves = []
        for rank in range(num_ranks):
            points = [
                (epoch, 1000 * row[rank]) for epoch, row in rank_seconds.items() if rank < len(row)
            ]
            curves.append(Series(f"rank {rank}", points, rank))
        return curves

    statistics: Any = {"slowest": max, "median": median, "fastest": min}
    return [
        Series(name, [(epoch, 1000 * statistic(row)) for epoch, row in rank_seconds.items()], color)
        for color, (name, statistic) in enumerate(statistics.items())
    ]


def _draw(chart: Chart, axes) -> None:
    for series in chart.series:
        axes.plot(
            # Unpacks to nothing for a run that lacks this metric.
            *zip(*series.points),
            # If there are more curves than colors, the colors repeat with dashed lines.
            color=SERIES[series.color % len(SERIES)],
            linestyle="-" if series.color < len(SERIES) else "--",
            linewidth=1.6,
            # Short curves get markers, since a single point has no line that would show it.
            marker="o" if len(series.points) < 3 else None,
            markersize=3.5,
            label=series.label,
        )

    # Speeds are compared by ratio, which is visible only if the axis starts at 0. Losses are not.
    if chart.from_zero:
        axes.set_ylim(bottom=0)

    # A single epoch gets one tick, not ticks at fractions of an epoch.
    axes.locator_params("x", integer=True, min_n_ticks=1)
    axes.set_xlabel("epoch")
    axes.locator_params("y", nbins=5)
    axes.yaxis.set_major_formatter("{x:,.10g}")

    if len(chart.series) > 1 and chart.series[0].label:
        # Above the axes, clear of the curves.
        axes.legend(
            frameon=False,
            fontsize=8,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=3,
            borderpad=0,
            labelcolor=MUTED,
        )
