"""The picture of a sweep: its history, and the metric over each searched setting."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from hvtrain.report.charts import BLUE, GREY, ORANGE, picture
from hvtrain.search.goal import MAX
from hvtrain.search.sweep_results import FINISHED, PRUNED, in_short

_COLOURS = {FINISHED: BLUE, PRUNED: GREY}
MOST_SLICES = 8


def write_png(found: Mapping[str, Any], path: Path) -> None:
    """Draws all trials that have a value. Needs at least one."""
    names = list(found["importances"] or found["space"])[:MOST_SLICES]
    columns = min(3, 1 + len(names))
    num_rows = -(-(1 + len(names)) // columns)
    with picture(path, 4.4 * columns, 3.4 * num_rows, columns, num_rows) as (figure, _):
        places = iter(figure.axes)
        _history(next(places), found)
        for name in names:
            _slice(next(places), found, name)
        for axes in places:
            axes.remove()


def _of(found: Mapping[str, Any], state: str) -> list[Mapping[str, Any]]:
    return [one for one in found["trials"] if one["state"] == state and one["value"] is not None]


def _history(axes: Any, found: Mapping[str, Any]) -> None:
    for state, colour in _COLOURS.items():
        if trials := _of(found, state):
            points = [one["number"] for one in trials], [one["value"] for one in trials]
            axes.plot(*points, "o", color=colour, markersize=4, label=state)
    if finished := _of(found, FINISHED):
        best = accumulate((one["value"] for one in finished), max if found["direction"] == MAX else min)
        numbers = [one["number"] for one in finished]
        axes.step(numbers, list(best), where="post", color=ORANGE, linewidth=1.3, label="best so far")
    axes.set_title(f"{found['metric']} by trial", loc="left", fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8)


def _slice(axes: Any, found: Mapping[str, Any], name: str) -> None:
    space = found["space"][name]
    for state, colour in _COLOURS.items():
        trials = [one for one in _of(found, state) if name in one["settings"]]
        axes.plot(_places(trials, name, space["choices"]), [one["value"] for one in trials], "o", color=colour, ms=4)
    if space["choices"]:
        labels = [in_short(choice) for choice in space["choices"]]
        axes.set_xticks(range(len(labels)), labels, rotation=30 if max(map(len, labels)) > 6 else 0)
        axes.set_xlim(-0.5, len(labels) - 0.5)
    elif space["log"]:
        axes.set_xscale("log")
    share = f" ({found['importances'][name]:.0%})" if name in found["importances"] else ""
    axes.set_title(f"{name}{share}", loc="left", fontsize=10)


def _places(trials: Sequence[Mapping[str, Any]], name: str, choices: Sequence[Any]) -> list[Any]:
    values = [one["settings"][name] for one in trials]
    return [choices.index(value) for value in values] if choices else values
