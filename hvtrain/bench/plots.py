"""The pictures of `python -m hvtrain.bench`, one for each session, beside its numbers."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hvtrain.bench.words import human_bytes

if TYPE_CHECKING:
    from hvtrain.bench.allreduce import Collectives
    from hvtrain.bench.scaling import Scaling
    from hvtrain.bench.steps import Session

PLOT_FILE = "bench.png"


def plot_steps(session: Session) -> Path:
    """Images a second of each contender, or seconds to the first step: the median, and all rounds as dots."""
    figure, axes = _axes(9, 1.2 + 0.45 * len(session.contenders))
    names = [contender.name for contender in reversed(session.contenders)]
    figures = "images_per_second" if session.figure == "step_seconds" else session.figure
    for place, name in enumerate(names):
        values = [getattr(run, figures) for run in session.found[name]]
        ours = name.startswith("hvtrain")
        axes.barh(place, median(values), color="#1f6fb4" if ours else "#b9c3cc", height=0.65)
        axes.plot(values, [place] * len(values), "o", color="#222222", markersize=3, alpha=0.7)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(f"{'images/s' if figures == 'images_per_second' else 'seconds to the first step'} (bar: median)")
    work = session.workload
    axes.set_title(f"{work.name}: {work.about}, {session.num_ranks} ranks, batch {work.batch_size} a rank", loc="left")
    axes.grid(axis="x", alpha=0.3)
    return _saved(figure, session.folder)


def plot_allreduce(session: Collectives) -> Path:
    """Time and bus bandwidth by size, of each means."""
    figure, (left, right) = _axes(11, 4.2, columns=2)
    marks = {"hvtrain": ("#1f6fb4", "o"), "mpi4py": ("#e07b39", "s"), "memcpy": ("#8a949c", "^")}
    for means in session.found:
        colour, mark = marks[means]
        middle = [median(session.found[means][str(size)]) for size in session.sizes]
        label = {"hvtrain": f"hvtrain, {session.transport}", "memcpy": "a copy"}.get(means, means)
        left.loglog(session.sizes, [1e6 * seconds for seconds in middle], mark + "-", color=colour, label=label)
        rates = [median(session.bus_bandwidth(means, size)) for size in session.sizes]
        right.semilogx(session.sizes, rates, mark + "-", color=colour, label=label)
    for axes, title in ((left, "time, µs"), (right, "bus bandwidth, GB/s")):
        axes.set_title(title, loc="left")
        axes.set_xticks(session.sizes[::2], [human_bytes(size) for size in session.sizes[::2]], rotation=30)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return _saved(figure, session.folder)


def plot_scaling(session: Scaling) -> Path:
    """Images a second by ranks, against the line through one rank and against jobs that never talk."""
    figure, axes = _axes(7, 4.5)
    first = session.counts[0]
    ideal = median(session.found["weak"][first]) / first
    axes.plot(session.counts, [ideal * count for count in session.counts], "--", color="#8a949c", label="linear")
    kinds = {"apart": ("jobs that never talk", "#8a949c"), "weak": ("hvtrain, weak", "#1f6fb4")}
    for kind, (label, colour) in {**kinds, "strong": ("hvtrain, strong", "#e07b39")}.items():
        middle = [median(session.found[kind][count]) for count in session.counts]
        axes.plot(session.counts, middle, "o-", color=colour, label=label)
    axes.set_xticks(session.counts, [str(count) for count in session.counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("images/s")
    axes.set_title(f"{session.workload.name}: {session.workload.about}", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return _saved(figure, session.folder)


def _axes(width: float, height: float, columns: int = 1) -> Any:
    import matplotlib as mpl

    mpl.use("Agg")  # No display is needed.
    import matplotlib.pyplot as plt

    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def _saved(figure: Any, folder: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(folder / PLOT_FILE, dpi=130)
    plt.close(figure)
    return folder / PLOT_FILE
