"""The pictures of `python -m hvtrain.bench`: one for each session, beside its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hvtrain.bench.allreduce import human_bytes

if TYPE_CHECKING:
    from hvtrain.bench.allreduce import Collectives
    from hvtrain.bench.scaling import Scaling
    from hvtrain.bench.steps import Session

PLOT_FILE = "bench.png"
BLUE, ORANGE, GREY = "#1f6fb4", "#e07b39", "#8a949c"


def plot_steps(session: Session) -> None:
    """Images per second of each contender, or seconds to the first step: the median, and all rounds as dots."""
    shown = "images_per_second" if session.figure == "step_seconds" else session.figure
    names, work = [contender.name for contender in reversed(session.contenders)], session.workload
    with picture(session.folder / PLOT_FILE, 9, 1.2 + 0.45 * len(names)) as (_, axes):
        for place, name in enumerate(names):
            values = [getattr(run, shown) for run in session.found[name]]
            axes.barh(place, median(values), color=BLUE if name.startswith("hvtrain") else "#b9c3cc", height=0.65)
            axes.plot(values, [place] * len(values), "o", color="#222222", markersize=3, alpha=0.7)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel(f"{'images/s' if shown == 'images_per_second' else 'seconds to the first step'} (bar: median)")
        about = f"{work.name}: {work.about}, {session.num_ranks} ranks, batch {work.batch_size} a rank"
        axes.set_title(about, loc="left")


def plot_allreduce(session: Collectives) -> None:
    """Time and bus bandwidth by size, for each means."""
    marks = {"hvtrain": (BLUE, "o"), "mpi4py": (ORANGE, "s"), "memcpy": (GREY, "^")}
    with picture(session.folder / PLOT_FILE, 11, 4.2, columns=2) as (_, (left, right)):
        for means, by_size in session.found.items():
            colour, mark = marks[means]
            micros = [1e6 * median(by_size[str(size)]) for size in session.sizes]
            label = {"hvtrain": f"hvtrain, {session.transport}", "memcpy": "a copy"}.get(means, means)
            left.loglog(session.sizes, micros, mark + "-", color=colour, label=label)
            rates = [median(session.bus_bandwidth(means, size)) for size in session.sizes]
            right.semilogx(session.sizes, rates, mark + "-", color=colour, label=label)
        for axes, title in ((left, "time, µs"), (right, "bus bandwidth, GB/s")):
            axes.set_title(title, loc="left")
            axes.set_xticks(session.sizes[::2], [human_bytes(size) for size in session.sizes[::2]], rotation=30)
            axes.minorticks_off()
            axes.legend(frameon=False)


def plot_scaling(session: Scaling) -> None:
    """Images per second by ranks, beside the line through one rank and independent jobs."""
    first = session.counts[0]
    ideal = median(session.found["weak"][first]) / first
    kinds = {
        "apart": ("jobs that never talk", GREY),
        "weak": ("hvtrain, weak", BLUE),
        "strong": ("hvtrain, strong", ORANGE),
    }
    with picture(session.folder / PLOT_FILE, 7, 4.5) as (_, axes):
        axes.plot(session.counts, [ideal * count for count in session.counts], "--", color=GREY, label="linear")
        for kind, (label, colour) in kinds.items():
            middle = [median(session.found[kind][count]) for count in session.counts]
            axes.plot(session.counts, middle, "o-", color=colour, label=label)
        axes.set_xticks(session.counts, [str(count) for count in session.counts])
        axes.set_ylim(bottom=0)
        axes.set(xlabel="ranks", ylabel="images/s")
        axes.set_title(f"{session.workload.name}: {session.workload.about}", loc="left")
        axes.legend(frameon=False)


@contextmanager
def picture(path: Path, width: float, height: float, columns: int = 1) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, in inches, which is saved as `path` at the end."""
    import matplotlib as mpl

    mpl.use("Agg")  # No display is needed.
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")
    for one in figure.axes:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    yield figure, axes
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
