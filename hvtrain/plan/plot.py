"""A forecast as a picture: the learning rate over the run, and speed and efficiency over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvtrain.plan.costs.step import Cost
from hvtrain.plan.forecast import Forecast

POINTS = 600
BLUE, GREY = "#1f5fa8", "#999999"


def draw(forecast: Forecast, costs: Sequence[Cost], path: Path) -> None:
    """Writes a PNG; without costs it is the learning rate alone."""
    import matplotlib

    matplotlib.use("Agg")  # There may be no screen.
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, 3 if costs else 1, figsize=(13 if costs else 5, 4), squeeze=False, layout="constrained"
    )
    _learning_rate(axes[0][0], forecast)
    if costs:
        _speed(axes[0][1], forecast, costs)
        _efficiency(axes[0][2], costs)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{forecast.model_name}, {forecast.plan.size} ranks, global batch {forecast.plan.global_batch:,}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _learning_rate(axis: Any, forecast: Forecast) -> None:
    plan = forecast.plan
    stride = max(1, plan.num_steps // POINTS)
    steps = [*range(0, plan.num_steps, stride), plan.num_steps - 1]
    axis.plot([step / plan.steps_per_epoch for step in steps], [forecast.schedule(step) for step in steps], color=BLUE)
    axis.set(title="learning rate", xlabel="epoch")
    axis.set_ylim(bottom=0)


def _speed(axis: Any, forecast: Forecast, costs: Sequence[Cost]) -> None:
    ranks = [cost.num_ranks for cost in costs]
    speeds = [forecast.batch_size * cost.num_ranks / cost.step_seconds for cost in costs]
    axis.plot(ranks, [speeds[0] * number for number in ranks], "--", color=GREY, label="one rank's times ranks")
    axis.plot(ranks, speeds, "o-", color=BLUE, label="predicted")
    axis.set(title="examples per second", xlabel="ranks", yscale="log")
    _by_ranks(axis, ranks)
    axis.legend(frameon=False)


def _efficiency(axis: Any, costs: Sequence[Cost]) -> None:
    ranks = [cost.num_ranks for cost in costs]
    percent = [100 * cost.efficiency for cost in costs]
    axis.plot(ranks, percent, "o-", color=BLUE)
    axis.annotate(
        f"{percent[-1]:.0f}%", (ranks[-1], percent[-1]), xytext=(0, 8), textcoords="offset points", ha="center"
    )
    axis.set(title="efficiency in percent", xlabel="ranks", ylim=(0, 108))
    _by_ranks(axis, ranks)


def _by_ranks(axis: Any, ranks: list[int]) -> None:
    axis.set_xscale("log", base=2)
    shown = ranks[:: max(1, len(ranks) // 6)]
    # The largest is what was asked for; its label stands where the one before leaves room.
    shown = [*(number for number in shown if number * 1.5 < ranks[-1]), ranks[-1]]
    axis.set_xticks(shown, [f"{number:,}" for number in shown])
    axis.minorticks_off()
