"""The learning-rate range test: records the loss at each step, and suggests a learning rate."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from hvtrain import runner
from hvtrain.config.schema import RunConfig
from hvtrain.errors import TrainingError
from hvtrain.report.charts import write_panels
from hvtrain.strategies.base import Strategy
from hvtrain.system.files import csv_text, write_atomic
from hvtrain.system.text import counted
from hvtrain.training.callbacks.guard import explain_errors
from hvtrain.training.callbacks.make_callbacks import call_steps
from hvtrain.training.callbacks.run_context import RunCallback, RunContext
from hvtrain.training.run import RunState, describe, summary

log = logging.getLogger(__name__)

# Decay of the losses' moving average per step.
SMOOTHING = 0.9
# The test ends when the smoothed loss is this many times its lowest value.
DIVERGENCE_FACTOR = 4.0
# Number of initial steps that are ignored, because their moving average covers too few losses.
IGNORED_STEPS = 5


@dataclass(frozen=True)
class Suggestion:
    """The suggested learning rate, for all ranks together.

    Attributes:
        rate: the rate at which the smoothed loss falls fastest over the logarithm of the rate.
        lowest_at: the rate at which the smoothed loss is lowest.
    """

    rate: float
    lowest_at: float


def smooth(losses: Sequence[float]) -> list[float]:
    """Returns the exponential moving average of the losses, bias-corrected for its start at zero as in Adam.

    >>> smooth([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    average = 0.0
    averages = []
    for step, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        # Rounded so that equal losses give equal averages, and thus a slope of exactly 0.
        averages.append(round(average / (1 - SMOOTHING**step), 12))

    return averages


def has_diverged(losses: Sequence[float]) -> bool:
    """True if the last loss is not finite, or the moving average exceeds DIVERGENCE_FACTOR times its lowest value."""
    # Checked first, since no comparison with NaN is true.
    if losses and not math.isfinite(losses[-1]):
        return True
    averages = smooth(losses)[IGNORED_STEPS:]
    if not averages:
        return False
    lowest = min(averages)
    # abs, because a loss may be negative.
    return averages[-1] - lowest > (DIVERGENCE_FACTOR - 1) * abs(lowest)


def suggest(rates: Sequence[float], losses: Sequence[float]) -> Suggestion | None:
    """Suggests a rate from the losses of a test; returns None if there are too few, or if they never fall.

    Args:
        rates: the learning rate at each step.
        losses: the loss at each step. Losses from the first non-finite one on are ignored.

    >>> rates = [10 ** (step / 10 - 5) for step in range(60)]
    >>> losses = [2.0 - 1.5 / (1 + math.exp(-6 * (math.log10(rate) + 2))) for rate in rates]
    >>> 0.01 < suggest(rates, losses).rate < 0.04
    True
    """
    averages = np.array(smooth(list(takewhile(math.isfinite, losses))))
    finite_rates = np.array(rates[: len(averages)])
    # A slope needs a neighbor on each side.
    if len(averages) <= IGNORED_STEPS + 2:
        return None

    # Central differences over the logarithm of the rate. slopes[0] is the slope at step 1.
    slopes = (averages[2:] - averages[:-2]) / np.log(finite_rates[2:] / finite_rates[:-2])
    # Beyond the lowest loss the rate is too high, whatever the slope there.
    lowest_step = IGNORED_STEPS + int(averages[IGNORED_STEPS:].argmin())
    candidates = slopes[IGNORED_STEPS - 1 : lowest_step]
    if candidates.min() >= 0:
        return None

    fastest_step = IGNORED_STEPS + int(candidates.argmin())
    return Suggestion(rates[fastest_step], rates[lowest_step])


class Recorder(RunCallback):
    """Records the rate and the loss over all ranks at each step; stops when the loss diverges (every rank).

    Of consecutive steps with the same rate, only the last is kept, since no slope is defined between them.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._rate = float(self.model.optimizer.learning_rate)
        self.model.reset_metrics()  # Otherwise the loss would be the mean of all steps so far.

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The previous step had the same rate if it overflowed under a loss scale, and so was skipped.
        if self.rates[-1:] == [self._rate]:
            del self.rates[-1], self.losses[-1]
        self.rates.append(self._rate)
        self.losses.append(self.strategy.metrics_over_ranks(self.model)["loss"])
        if has_diverged(self.losses):
            self.model.stop_training = True


def try_rates(config: RunConfig, strategy: Strategy, state: RunState) -> Suggestion:
    """Runs the test and returns the suggestion (every rank). Raises TrainingError if there is none."""
    run, _ = runner.open_run(config, strategy, state, "find_lr")
    model = runner.make_model(run)
    start = runner.restore(run, model, None)
    context = RunContext.begin(run, model, start.step)
    recorder = Recorder(context)
    log.info(summary(describe(run, model, start)))
    # as_trial makes each call of the graph one update of the weights, after which the recorder reads the loss.
    steps = call_steps(run, [recorder])
    try:
        with explain_errors(context):
            strategy.fit(model, run.batches_from, run.plan, 0, [context.position, recorder], steps)
    except TrainingError as error:  # A non-finite gradient ends the test on all ranks.
        log.info(str(error).partition(";")[0])

    suggestion = suggest(recorder.rates, recorder.losses)
    strategy.comm.on_chief(lambda: write(run.folder, recorder.rates, recorder.losses, suggestion))
    strategy.comm.on_chief(state.store.send)
    # From here on no rank needs the others: all return the same suggestion or raise the same error.
    strategy.stop()
    if suggestion is None:
        raise TrainingError(
            f"no rate at which the loss falls was found in {counted(len(recorder.losses), 'step')} (see "
            f"{run.folder / 'range.png'}); use more --steps, or a range of lower rates"
        )

    # Shown as the setting, which a run multiplies by its learning-rate factor.
    factor = run.plan.learning_rate_factor
    note = "" if factor == 1 else f" (x {factor:g} = {suggestion.rate:.3g} for all ranks together)"
    log.info(
        f"suggested: optimizer.learning_rate={suggestion.rate / factor:.2g}{note}, "
        "where the loss fell fastest"
    )
    log.info(
        f"the loss was lowest at {suggestion.lowest_at / factor:.2g}; picture and losses in {run.folder}"
    )
    return suggestion


def write(
    folder: Path, rates: Sequence[float], losses: Sequence[float], suggestion: Suggestion | None
) -> None:
    """Writes range.csv and range.png (chief only)."""
    averages = smooth(losses)
    header = ("learning_rate", "loss", "smoothed_loss")
    write_atomic(folder / "range.csv", csv_text([header, *zip(rates, losses, averages)]))

    def draw(axes) -> None:
        axes.plot(rates, losses, color="0.75", linewidth=1, label="loss of a step")
        axes.plot(rates, averages, color="tab:blue", label="smoothed")
        if suggestion:
            label = f"falls fastest: {suggestion.rate:.2g}"
            axes.axvline(suggestion.rate, color="tab:orange", linestyle="--", label=label)

        axes.set(xscale="log", xlabel="learning rate of all ranks together", ylabel="loss")
        # The last loss is left out: only it can be infinite or NaN, which no axis can show.
        if len(averages) > 1:
            # Scaled to the first half: a loss that diverges later is cut off, instead of flattening the
            # rest of the curve.
            first_half = averages[: len(averages) // 2]
            axes.set_ylim(min(0.0, *averages[:-1]), max(0.0, 1.1 * max(first_half)))
        axes.legend()

    write_panels([("", draw)], folder / "range.png", 1, (7, 4))
