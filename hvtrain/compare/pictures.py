"""The pictures of a comparison: speed, and the loss and the metric over time and over examples."""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvtrain.report.charts import picture

SERIES = ("#1f6fb4", "#e07b39", "#4c9f70", "#b5489b", "#8a63c4", "#8a949c")
_INK, _LINE = "#20262b", "#e0e4e7"
Panel = Callable[[Any, Mapping[str, Any]], None]


def colour(place: int) -> str:
    """The colour of a contestant by its place in the comparison."""
    return SERIES[place % len(SERIES)]


def panels(found: Mapping[str, Any]) -> dict[str, Panel]:
    """The panels that have something to show, by title."""
    metric = found["target"]["metric"] if found["target"] else "loss"
    loss = "val_loss" if any("val_loss" in point for one in found["strategies"] for point in one["curve"]) else "loss"
    shown: dict[str, Panel] = {}
    if any(one["rounds"] for one in found["strategies"]):
        shown["examples/s (bar: median, dots: rounds)"] = _speed
    if any(one["curve"] for one in found["strategies"]):
        shown |= {f"{loss} over seconds of training": _curves(loss, "seconds")}
        shown |= {f"{loss} over examples": _curves(loss, "examples")}
        if metric != loss:
            shown |= {f"{metric} over seconds of training": _curves(metric, "seconds")}
    return shown


def _speed(axes: Any, found: Mapping[str, Any]) -> None:
    names = [one["name"] for one in found["strategies"]]
    for place, one in enumerate(found["strategies"]):
        if one["examples_per_second"]:
            axes.barh(place, one["examples_per_second"], color=colour(place), height=0.6)
            speeds = [run["examples_per_second"] for run in one["rounds"] if run["examples_per_second"]]
            axes.plot(speeds, [place] * len(speeds), "o", color=_INK, markersize=3, alpha=0.7)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)  # The first at the top, and room for one that failed.
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_axisbelow(True)


def _curves(metric: str, over: str) -> Panel:
    def draw(axes: Any, found: Mapping[str, Any]) -> None:
        for place, one in enumerate(found["strategies"]):
            points = [(point[over], point[metric]) for point in one["curve"] if metric in point]
            # Widths differ so that curves that coincide stay visible.
            look = {"color": colour(place), "linewidth": 2.6 - 0.3 * place, "alpha": 0.9}
            axes.plot(*zip(*points), "o-", markersize=3, label=one["name"], **look) if points else None
        if found["target"] and found["target"]["metric"] == metric:
            axes.axhline(found["target"]["value"], color="#8a949c", linewidth=1, linestyle="--")
        axes.set_xlabel(over)
        axes.legend(frameon=False, fontsize=8)

    return draw


def write_png(found: Mapping[str, Any], path: Path) -> None:
    """All panels in one picture."""
    shown = panels(found)
    rows = -(-len(shown) // 2)
    with picture(path, 11, 4.0 * rows, min(2, len(shown)), rows) as (figure, _):
        for axes, (title, draw) in zip(figure.axes, shown.items()):
            draw(axes, found)
            axes.set_title(title, loc="left", fontsize=10)
        for axes in figure.axes[len(shown) :]:
            axes.remove()


def svgs(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Title and SVG of each panel, in the colours of the page around them (its variables --series-1 ...)."""
    return [(title, _svg(draw, found)) for title, draw in panels(found).items()]


def _svg(draw: Panel, found: Mapping[str, Any]) -> str:
    out = io.StringIO()
    with _axes() as (figure, axes):
        draw(axes, found)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
    for place, one in enumerate(SERIES, 1):
        text = text.replace(one, f"var(--series-{place})")
    return text.replace(_INK, "currentColor").replace(_LINE, "var(--line)")


@contextmanager
def _axes() -> Iterator[tuple[Any, Any]]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    look: Any = {**ink, "grid.color": _LINE, "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with mpl.rc_context({**look, "svg.hashsalt": "hvtrain"}):
        figure, axes = pyplot.subplots(figsize=(5.2, 3.3), layout="constrained")
        axes.grid(True)
        axes.spines[["top", "right"]].set_visible(False)
        yield figure, axes
        pyplot.close(figure)
