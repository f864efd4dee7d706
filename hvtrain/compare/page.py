"""compare.html and compare.png: speed, and the loss and the metric over time and over examples."""

from collections.abc import Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from hvtrain.compare.rounds import draw_rounds
from hvtrain.compare.summary import speeds_by_round, table
from hvtrain.report.charts import GREY, SERIES, Panel, page_svg, write_panels
from hvtrain.report.page import render
from hvtrain.system.text import format_known

# Inches. A chart on the page has room for the names of the strategies.
_CHART_SIZE = (5.2, 3.3)
_PICTURE_WIDTH = 11.0
_PANEL_HEIGHT = 4.0
_UNITS = {"seconds": "seconds of training", "examples": "examples"}


def html(comparison: Mapping[str, Any]) -> str:
    """Returns the page of a comparison as compare.json holds it; it needs no other files."""
    strategies = comparison["strategies"]
    names = [entry["name"] for entry in strategies]
    return render(
        "compare.html.j2",
        Path(__file__).parent,
        title=f"Strategies compared: {', '.join(names)}",
        comparison=comparison,
        overview=table(comparison),
        by_round=_by_round(strategies),
        drawn=[(title, page_svg(title, draw, *_CHART_SIZE)) for title, draw in panels(comparison)],
        versions=", ".join(f"{name} {version}" for name, version in comparison["versions"].items()),
    )


def write_png(comparison: Mapping[str, Any], path: Path) -> None:
    """Draws all panels, at least one, into one picture."""
    shown = panels(comparison)
    columns = min(2, len(shown))
    write_panels(shown, path, columns, (_PICTURE_WIDTH / columns, _PANEL_HEIGHT))


def panels(comparison: Mapping[str, Any]) -> list[Panel]:
    """Returns the panels that have something to show."""
    strategies = comparison["strategies"]
    target = comparison["target"] or {"metric": "loss", "value": None}
    points = [point for entry in strategies for point in entry["curve"]]
    # What is learned shows in validation, if there is any.
    loss = "val_loss" if any("val_loss" in point for point in points) else "loss"

    shown: list[Panel] = []
    if any(entry["rounds"] for entry in strategies):
        speeds = {entry["name"]: list(speeds_by_round(entry).values()) for entry in strategies}
        draw = partial(draw_rounds, values=speeds, colors=SERIES * len(strategies))
        shown.append(("examples/s (bar: median, dots: rounds)", draw))
    if not points:
        return shown

    # Over seconds the faster strategy is ahead, over examples the one that learns more of each.
    curves = [(loss, "seconds"), (loss, "examples")]
    if target["metric"] != loss:
        curves.append((target["metric"], "seconds"))
    for metric, unit in curves:
        goal = None
        if metric == target["metric"]:
            goal = target["value"]
        draw = partial(_draw_curves, strategies=strategies, metric=metric, unit=unit, goal=goal)
        shown.append((f"{metric} over {_UNITS[unit]}", draw))

    return shown


def _draw_curves(
    axes: Any,
    strategies: list[Mapping[str, Any]],
    metric: str,
    unit: str,
    goal: float | None,
) -> None:
    # A strategy has one color in all panels.
    for row, (entry, color) in enumerate(zip(strategies, cycle(SERIES))):
        points = [(point[unit], point[metric]) for point in entry["curve"] if metric in point]
        # Widths differ so that curves that coincide stay visible.
        width = 2.6 - 0.3 * row
        style = {"color": color, "linewidth": width, "markersize": 3, "alpha": 0.9}
        if points:
            axes.plot(*zip(*points), "o-", label=entry["name"], **style)

    if goal is not None:
        axes.axhline(goal, color=GREY, linewidth=1, linestyle="--")
    axes.set_xlabel(unit)
    axes.legend(frameon=False, fontsize=8)


def _by_round(strategies: list[Mapping[str, Any]]) -> list[list[str]]:
    """The table of examples/s by strategy and round, header first; empty without rounds."""
    numbers = sorted({run["round"] for entry in strategies for run in entry["rounds"]})
    if not numbers:
        return []
    rows = [["round", *map(str, numbers)]]

    for entry in strategies:
        speeds = speeds_by_round(entry)
        # A strategy that failed has fewer rounds, and a short run may have had no time to be timed.
        cells = [format_known(speeds.get(number), ",.0f") for number in numbers]
        rows.append([entry["name"], *cells])

    return rows
