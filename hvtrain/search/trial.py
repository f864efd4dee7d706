"""The range test: a run that records its loss at each step, then the suggestion and its files."""

import csv
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from hvtrain import runner
from hvtrain.config.schema import RunConfig
from hvtrain.core.files import write_atomic
from hvtrain.errors import TrainingError
from hvtrain.report.charts import picture
from hvtrain.search.suggestion import Suggestion, has_diverged, smoothed, suggest
from hvtrain.strategies.base import Strategy
from hvtrain.training.callbacks.guard import explain_errors
from hvtrain.training.callbacks.make_callbacks import call_steps
from hvtrain.training.callbacks.run_context import RunCallback, RunContext
from hvtrain.training.resume import RunState
from hvtrain.training.run import described, summary

log = logging.getLogger(__name__)


class Recorder(RunCallback):
    """Records the rate and the loss over all ranks of each step, and stops when the loss diverges (every rank)."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._rate = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._rate = float(self.model.optimizer.learning_rate)
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(self._rate)
        self.losses.append(self.run.strategy.metrics_over_ranks(self.model)["loss"])
        if has_diverged(self.losses):
            self.model.stop_training = True


def try_rates(config: RunConfig) -> Suggestion:
    """Runs the test; returns the suggestion on every rank. Raises TrainingError if there is none."""
    result: Suggestion = runner.on_all_ranks(config, _attempt)
    return result


def _attempt(config: RunConfig, strategy: Strategy, state: RunState) -> Suggestion:
    run, _ = runner.open_run(config, strategy, state, "find_lr")
    model, start = runner.restore(run, None)
    context = RunContext.begin(run, model, start.step)
    recorder = Recorder(context)
    log.info("%s", summary(described(run, model, start)))
    steps = call_steps(config, strategy, [recorder])
    try:
        with explain_errors(context):
            callbacks: list[keras.callbacks.Callback] = [context.position, recorder]
            strategy.fit(model, run.batches_from, run.plan, 0, callbacks, steps)
    except TrainingError as error:  # A gradient that is not finite ends the test on all ranks.
        log.info("%s", str(error).partition(";")[0])
    found = suggest(recorder.rates, recorder.losses)
    factor = run.plan.learning_rate_factor
    strategy.comm.on_chief(lambda: write(run.folder, recorder.rates, recorder.losses, found))
    strategy.stop()
    if found.rate is None:
        raise TrainingError(
            f"the loss never fell in {len(recorder.losses)} steps, see {run.folder / 'range.png'}; "
            "take more --steps, or another range"
        )
    scale = f" (x {factor:g} = {found.rate:.3g} for all ranks together)" if factor != 1 else ""
    log.info("the loss fell fastest, and is suggested, at optimizer.learning_rate=%.2g%s", found.rate / factor, scale)
    log.info("it was lowest at %.2g; picture and losses in %s", (found.lowest_at or 0.0) / factor, run.folder)
    return found


def write(folder: Path, rates: Sequence[float], losses: Sequence[float], found: Suggestion) -> None:
    """Writes range.csv and range.png (chief only)."""
    line, text = smoothed(losses), io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows([("learning_rate", "loss", "smoothed_loss"), *zip(rates, losses, line)])
    write_atomic(folder / "range.csv", text.getvalue())
    with picture(folder / "range.png", 7, 4) as (_, axes):
        axes.plot(rates, losses, color="0.75", linewidth=1, label="loss of a step")
        axes.plot(rates, line, color="tab:blue", label="smoothed")
        if found.rate:
            axes.axvline(found.rate, color="tab:orange", linestyle="--", label=f"falls fastest: {found.rate:.2g}")
        axes.set(xscale="log", xlabel="learning rate of all ranks together", ylabel="loss")
        # Cut where it diverges, which would flatten all the rest.
        axes.set_ylim(min(0.0, *line), 1.1 * max(line[: len(line) // 2]))
        axes.legend()
