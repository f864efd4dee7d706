"""The state that a run's callbacks share: the run, its model, its position, and the report they fill in.

The report has the goodput of the run: the share of its wall-clock time, over all its starts, that went into steps.

Position is the first callback of a run; the others read it.
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras

from hvtrain.core.step_plan import StepPlan
from hvtrain.data.source import Unreadable
from hvtrain.keras.equality import WeightCheck
from hvtrain.models.memory import flops_per_example
from hvtrain.step.step_timing import Split
from hvtrain.system.resources import peak_flops
from hvtrain.system.run_files import EpochRecord, last_step_at, read_history, read_rank_seconds
from hvtrain.system.text import duration
from hvtrain.training.run import Run
from hvtrain.watchdog.progress import EXCHANGE

log = logging.getLogger(__name__)

# How rank 0's time is divided. "steps" counts each step of the run once; the time of steps that
# a restart lost, and that run again, is "repeated".
PARTS = ("steps", "data", "start", "checkpoints", "repeated", "restarts")


@dataclass
class Goodput:
    """Seconds of a run, divided into PARTS. Points in time are values of time.time().

    Args:
        began: When the run first started.
        start_began: When this start began.
        seconds: Seconds so far, by part.
    """

    began: float
    start_began: float
    seconds: dict[str, float]

    @classmethod
    def resume(cls, saved: Any, now: float, last_step_at: float = 0.0) -> "Goodput":
        """Continues from a checkpoint's record(); without a valid one, starts from zero.

        The time between the checkpoint and this start was lost. Up to last_step_at it counts as
        "repeated", because those steps run again; the rest counts as "restarts".

        Args:
            saved: The result of record() from the checkpoint; None if there is none.
            now: When this start began.
            last_step_at: When the last step before this start ended; 0 if unknown.

        >>> resumed = Goodput.resume(Goodput(0, 0, dict.fromkeys(PARTS, 1.0)).record(100), 130, 112)
        >>> resumed.seconds["repeated"], resumed.seconds["restarts"]
        (13.0, 19.0)
        """
        try:
            seconds = {part: float(saved["seconds"][part]) for part in PARTS}
            began = float(saved["began"])
            until = float(saved["until"])
            if not math.isfinite(sum(seconds.values(), began + until)):
                raise ValueError("a number that is not finite")
        except (TypeError, LookupError, ValueError):
            return cls(now, now, dict.fromkeys(PARTS, 0.0))
        # Elastic ranks restart within their processes, so this start may
        # have begun before the checkpoint.
        now = max(now, until)
        if last_step_at > now:
            # A file's modification time, which is this late if this start copied the file to this host.
            last_step_at = 0.0
        ended = max(until, last_step_at)
        seconds["repeated"] += ended - until
        seconds["restarts"] += now - ended
        return cls(began, now, seconds)

    def record(self, now: float) -> dict[str, Any]:
        """Returns the state to save in a checkpoint."""
        return {"began": self.began, "until": now, "seconds": dict(self.seconds)}

    def summary(self, now: float) -> dict[str, float]:
        """Returns the total seconds ("all"), the "share" of the steps, and the seconds by part; "other" is the rest.

        >>> Goodput(0, 0, dict.fromkeys(PARTS, 1.0)).summary(10)["other"]
        4.0
        """
        total = max(now - self.began, 1e-9)
        return {
            "share": self.seconds["steps"] / total,
            "all": total,
            **self.seconds,
            "other": max(0.0, total - sum(self.seconds.values())),
        }


def goodput_in_words(summary: Mapping[str, float]) -> str:
    """Formats a summary() in one line, leaving out parts below half a percent.

    >>> seconds = dict.fromkeys(PARTS, 0.0) | {"steps": 40.0, "start": 8.0}
    >>> goodput_in_words(Goodput(0.0, 0.0, seconds).summary(50.0))
    '80% of 50 s went into steps; start 16%, other 4%'
    """
    parts = ", ".join(
        f"{name} {summary[name] / summary['all']:.0%}"
        for name in (*PARTS[1:], "other")
        if summary[name] >= 0.005 * summary["all"]
    )
    return f"{summary['share']:.0%} of {duration(summary['all'])} went into steps; {parts}".rstrip(
        "; "
    )


# Metrics by name, as Keras gives them to callbacks.
Logs = dict[str, Any]


class Position(keras.callbacks.Callback):
    """Counts the run's optimizer steps; after a resume, from the checkpoint's step on (every rank)."""

    def __init__(self, plan: StepPlan, start_step: int) -> None:
        super().__init__()
        self.plan = plan
        self.start_step = start_step
        self.step = start_step
        self.epoch = plan.position(start_step)[0]

    @property
    def in_epoch(self) -> bool:
        """True within an epoch; False after a step that ends an epoch or the run."""
        # is_last, since train.steps may end a run within an epoch.
        return self.plan.position(self.step)[1] > 0 and not self.is_last

    @property
    def is_last(self) -> bool:
        """True after the last step of the plan."""
        return self.step >= self.plan.num_steps

    def is_multiple_of(self, steps: int | None) -> bool:
        """True if the number of steps done is a multiple of `steps`; False if `steps` is 0 or None."""
        return bool(steps and self.step % steps == 0)

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        # Not step + 1: a call of the graph may have done several steps.
        self.step = self.plan.shift + self.epoch * self.plan.steps_per_epoch + batch + 1


@dataclass
class RunReport:
    """Results that callbacks fill in while a run trains, for the end of the run.

    Args:
        records: Rows of history.csv, including those before a resume.
        rank_seconds: Each rank's seconds of own work in a step, by epoch; empty if steps are not timed.
        goodput: How this rank's wall time was spent.
        examples_each_epoch: Examples that went through the steps of each whole epoch, over all
            ranks.
        unreadable: What data.on_error=skip left out on any rank, by location, so that a damaged file that
            several ranks read counts once.
        examples_per_second: Speed of all ranks after the warm-up; None before.
        step_seconds: Mean time of a step after the warm-up; None before.
        split: The time of a step, split by purpose; None if steps are not timed.
        stopped_by: The signal or limit that ended training early, as text; empty if none did.
        exit_code: The process's exit code after a signal; 0 if there was none.
        rebalanced: True if another attempt will continue with other batch sizes, see Balance.
        flops_per_example: Floating-point operations of a training step per example; None if unknown.
        peak_flops: Peak floating-point operations per second of all devices together; None if unknown.
    """

    records: list[EpochRecord]
    rank_seconds: dict[int, list[float]]
    goodput: Goodput
    examples_each_epoch: list[int] = field(default_factory=list)
    unreadable: dict[str, Unreadable] = field(default_factory=dict)
    examples_per_second: float | None = None
    step_seconds: float | None = None
    split: Split | None = None
    stopped_by: str = ""
    exit_code: int = 0
    rebalanced: bool = False
    flops_per_example: float | None = None
    peak_flops: float | None = None

    def flops(self, examples_per_second: float) -> dict[str, float]:
        """Returns the model's FLOP/s and their share of the devices' peak, as far as they are known."""
        if not self.flops_per_example:
            return {}
        speed = {"flops_per_second": examples_per_second * self.flops_per_example}
        if self.peak_flops:
            speed["share_of_peak"] = speed["flops_per_second"] / self.peak_flops
        return speed

    @property
    def num_skipped(self) -> int:
        """Examples that were left out, not counting those of damaged files, whose number is unknown."""
        return sum(part.num_examples or 0 for part in self.unreadable.values())


@dataclass(frozen=True)
class RunContext:
    """Facts about one attempt at a run, for its callbacks and for the code that ends it.

    weights compares the model's weights over the ranks; calling it is collective.
    """

    run: Run
    model: keras.Model
    position: Position
    weights: WeightCheck
    report: RunReport

    @classmethod
    def begin(cls, run: Run, model: keras.Model, start_step: int) -> "RunContext":
        """Makes the context of a run that begins or continues at a step (every rank).

        Raises StorageError on all ranks if the history of a resumed run is damaged.
        """
        position = Position(run.plan, start_step)
        # Tells the watchdog that during a check this rank waits for others,
        # and makes no progress of its own.
        weights = WeightCheck(
            model,
            run.config.guard.every > 0,
            lambda: run.strategy.watchdog.phase(EXCHANGE),
        )
        folder = run.folder
        records, seconds, last_step_ended = run.strategy.comm.on_chief(
            lambda: (read_history(folder), read_rank_seconds(folder), last_step_at(folder))
        )
        # Rows of later epochs belong to steps that were lost and are trained again. Compared by epoch,
        # since an earlier plan of the run may have counted steps differently.
        records = [record for record in records if record.epoch <= position.epoch]
        written = {record.epoch for record in records}
        lost = [str(epoch) for epoch in range(1, position.epoch + 1) if epoch not in written]
        if lost:
            log.warning("history.csv lacks rows of epochs before the resume: %s", ", ".join(lost))
        began = time.time() - (time.monotonic() - run.state.began)
        peak = peak_flops(run.config.train.precision)
        report = RunReport(
            records,
            {epoch: row for epoch, row in seconds.items() if epoch <= position.epoch},
            Goodput.resume(run.meta.get("goodput"), began, last_step_ended),
            flops_per_example=flops_per_example(model),
            peak_flops=peak and peak * run.strategy.num_computing,
        )
        return cls(run, model, position, weights, report)


class RunCallback(keras.callbacks.Callback):
    """A callback with access to its run."""

    def __init__(self, context: RunContext) -> None:
        super().__init__()
        # Without the model: Keras sets self.model before the training begins.
        self.run = context.run
        self.strategy = context.run.strategy
        self.comm = self.strategy.comm
        self.position = context.position
        self.weights = context.weights
        self.report = context.report
        self.plan = context.run.plan
        self.is_chief = context.run.topology.is_chief

    @property
    def step(self) -> int:
        """The number of steps that the run has done."""
        return self.position.step
