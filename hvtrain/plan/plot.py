"""Draws a forecast: the learning rate over the run, and speed and efficiency by number of ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvtrain.bench.plots import BLUE, GREY, picture
from hvtrain.plan.costs.step import Cost
from hvtrain.plan.forecast import Forecast

POINTS = 600


def draw(forecast: Forecast, costs: Sequence[Cost], path: Path) -> None:
    """Writes a PNG; without costs it shows the learning rate alone."""
    plan = forecast.plan
    with picture(path, 13 if costs else 5, 4, columns=3 if costs else 1) as (figure, _):
        figure.suptitle(f"{forecast.model_name}, {plan.size} ranks, global batch {plan.global_batch:,}")
        steps = [*range(0, plan.num_steps, max(1, plan.num_steps // POINTS)), plan.num_steps - 1]
        rates, axes = [forecast.schedule(step) for step in steps], figure.axes[0]
        axes.plot([step / plan.steps_per_epoch for step in steps], rates, color=BLUE)
        axes.set(title="learning rate", xlabel="epoch")
        axes.set_ylim(bottom=0)
        if costs:
            ranks, (_, by_speed, by_efficiency) = [cost.num_ranks for cost in costs], figure.axes
            speeds = [forecast.batch_size * cost.num_ranks / cost.step_seconds for cost in costs]
            ideal = [speeds[0] * number for number in ranks]
            by_speed.plot(ranks, ideal, "--", color=GREY, label="one rank's times ranks")
            by_speed.plot(ranks, speeds, "o-", color=BLUE, label="predicted")
            by_speed.set(title="examples per second", yscale="log")
            _by_ranks(by_speed, ranks)
            by_speed.legend(frameon=False)
            percent = [100 * cost.efficiency for cost in costs]
            by_efficiency.plot(ranks, percent, "o-", color=BLUE)
            last, above = (ranks[-1], percent[-1]), {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
            by_efficiency.annotate(f"{percent[-1]:.0f}%", last, **above)
            by_efficiency.set(title="efficiency in percent", ylim=(0, 108))
            _by_ranks(by_efficiency, ranks)


def _by_ranks(axes: Any, ranks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    shown = ranks[:: max(1, len(ranks) // 6)]
    # The last one is always labelled; the one before it only where there is room.
    shown = [*(number for number in shown if number * 1.5 < ranks[-1]), ranks[-1]]
    axes.set_xticks(shown, [f"{number:,}" for number in shown])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
