"""What all pictures of hvtrain have in common: colours, and a figure that is saved as a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLUE, ORANGE, GREY = "#1f6fb4", "#e07b39", "#8a949c"


@contextmanager
def picture(path: Path, width: float, height: float, columns: int = 1, rows: int = 1) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, in inches, which is saved as `path` at the end."""
    import matplotlib as mpl

    mpl.use("Agg")  # No display is needed.
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained")
    for one in figure.axes:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    yield figure, axes
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
