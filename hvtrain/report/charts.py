"""Charts of hvtrain: pictures on disk, and SVG for a page that follows the reader's light or dark mode."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from hvtrain.core.files import TEMPORARY

BLUE = "#1f6fb4"
ORANGE = "#e07b39"
GREY = "#8a949c"
# Colors of curves. The pages have each of them as a CSS variable, --series-1 to --series-6.
SERIES = (BLUE, ORANGE, "#4c9f70", "#b5489b", "#8a63c4", GREY)
INK = "#20262b"
MUTED = "#68727a"
LINE = "#dfe4e8"
_VARIABLES = {color: f"var(--series-{number})" for number, color in enumerate(SERIES, 1)} | {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
}

# A title, and the function that draws the panel on Matplotlib's axes.
Panel = tuple[str, Callable[[Any], None]]


@contextmanager
def picture(
    path: Path,
    width: float,
    height: float,
    columns: int = 1,
    rows: int = 1,
    dpi: int = 130,
) -> Iterator[tuple[Any, Any]]:
    """Yields a figure and its axes, and saves the figure as `path` when the block ends.

    Args:
        path: a PNG file; readers see the old picture or the new one, never a part of it.
        width: of the whole figure, in inches.
        height: of the whole figure, in inches.
        columns: of axes.
        rows: of axes.
        dpi: pixels per inch.
    """
    # A Figure without pyplot needs no display, and no call that closes it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns)
    for each in figure.axes:
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)

    yield figure, axes

    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    temporary.unlink(missing_ok=True)
    figure.savefig(temporary, dpi=dpi, format="png")
    temporary.replace(path)


def write_panels(
    panels: Sequence[Panel],
    path: Path,
    columns: int,
    panel_size: tuple[float, float],
    dpi: int = 130,
) -> None:
    """Draws the panels into one picture, row by row.

    Args:
        panels: at least one.
        path: the PNG file.
        columns: of panels.
        panel_size: width and height of a panel, in inches.
        dpi: pixels per inch.
    """
    width, height = panel_size
    rows = -(-len(panels) // columns)
    with picture(path, width * columns, height * rows, columns, rows, dpi) as (figure, _):
        for axes, (title, draw) in zip(figure.axes, panels):
            draw(axes)
            axes.set_title(title, loc="left", fontsize=10)
        # The last row may have more axes than there are panels.
        for axes in figure.axes[len(panels) :]:
            axes.remove()


def page_svg(title: str, draw: Callable[[Any], None], width: float, height: float) -> str:
    """Draws one chart as an SVG element for a page.

    Args:
        title: what screen readers say; the page shows it itself.
        draw: draws on the axes, in the colors of this module.
        width: in inches; the page scales the chart.
        height: in inches.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The salt makes ids the same in each start, so a page that is written again has no other bytes.
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.family": "sans-serif",
        "text.color": INK,  # Of legends.
    }

    with mpl.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        plain_style(axes)
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})

    return _for_a_page(file.getvalue(), title)


def plain_style(axes: Any) -> None:
    """Removes what is not data: the frame's top and right, ticks, and the background."""
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    axes.grid(color=LINE, linewidth=0.6, alpha=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=MUTED, fontsize=9)
        axis.get_offset_text().set(color=MUTED, fontsize=7)


def _for_a_page(text: str, title: str) -> str:
    """Removes what the page has already or would have twice: XML head, group names, size, fonts."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    # Two charts on a page may not have the same id; nothing refers to these.
    text = re.sub(r'<g id="[\w.-]*"', "<g", text)
    fonts = r"font-family: [^;\"]*;? ?|font-(weight|stretch|style): normal;? ?"
    text = re.sub(fonts, "", text)

    # A color that is a variable follows the page from light to dark.
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)

    # Without a size of its own the chart is as wide as its place on the page.
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)

    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
