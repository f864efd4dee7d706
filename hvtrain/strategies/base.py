"""Interface of strategies. The base class is the single process, so the runner never asks which strategy it has."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.errors import UserError
from hvtrain.step_timing import StepMarks
from hvtrain.strategies.comm import Comm
from hvtrain.strategies.evaluation import evaluate
from hvtrain.strategies.loop import CallSteps, train
from hvtrain.strategies.parts import Guards, Membership, Timeline
from hvtrain.watchdog import Watchdog


class Strategy:
    """One process on its own, without communication.

    The verbs are start, scope, distribute, fit, evaluate and stop. The parts do nothing here: comm (collectives),
    watchdog, timeline, guards (proof that ranks train together), membership (ranks that leave and join). A method is
    collective (every rank) unless its docstring says otherwise.
    """

    marks: StepMarks
    """Counts and times of this process's steps. Made by start."""

    def __init__(self) -> None:
        self.comm = Comm()
        self.timeline = Timeline()
        self.guards = Guards()
        self.membership = Membership()

    @property
    def topology(self) -> Topology:
        """This rank's place among the ranks; before start, that of a single process."""
        return self.comm.topology

    @property
    def watchdog(self) -> Watchdog:
        """This rank's watchdog, which the collectives tell when they wait; idle before start_watchdog."""
        return self.comm.watchdog

    def start(self) -> Topology:
        """Joins the other ranks, and pins this rank's device before TensorFlow uses one."""
        self.marks = StepMarks()
        return self.topology

    def start_watchdog(self, abort_seconds: float) -> None:
        """Starts to watch the ranks, in place of an earlier watchdog."""

    def scope(self) -> AbstractContextManager[Any]:
        """Returns the context in which the model is built. Not collective."""
        return nullcontext()

    def distribute(
        self, optimizer: keras.optimizers.Optimizer, check_finite: bool = False, divide_losses: bool = False
    ) -> keras.optimizers.Optimizer:
        """Returns an optimizer that steps on the mean of all ranks' gradients. Not collective.

        Args:
            optimizer: that of one process.
            check_finite: a gradient that is not finite on any rank stops the step on all of them.
            divide_losses: the step passes its loss through the optimizer's scale_loss, so the mean may be taken there.
        """
        return optimizer

    def fit(
        self,
        model: keras.Model,
        batches_from: Callable[[int], tf.data.Dataset],
        plan: StepPlan,
        start_step: int,
        callbacks: list[keras.callbacks.Callback],
        verbose: int = 0,
        steps_per_call: int | None = None,
        intervals: Sequence[int] = (),
    ) -> None:
        """Trains from start_step to the end of the plan, or until a callback sets model.stop_training.

        Args:
            model: compiled, with an optimizer that distribute returned.
            batches_from: returns this rank's stream of batches, from a step of the run on.
            plan: the steps of the run.
            start_step: steps already done.
            callbacks: see strategies.loop.train.
            verbose: as in Keras's fit.
            steps_per_call: steps in one call of the graph; None: chosen by timing.
            intervals: step intervals that a call must not cross.
        """
        call_steps = CallSteps(steps_per_call, intervals, self.comm.broadcast)
        train(model, batches_from, plan, start_step, callbacks, verbose, call_steps, self.marks)

    def evaluate(self, model: keras.Model, dataset: tf.data.Dataset) -> dict[str, float]:
        """Returns the metrics over all ranks' shards, which may differ in size."""
        return evaluate(model, dataset, self.comm)

    def stop(self) -> None:
        """Leaves the other ranks. Not collective."""

    def expect_restart(self) -> None:
        """Prepares for restart; call it before start. Not collective."""

    def restart(self, environment: dict[str, str], bucket_mib: float) -> None:
        """Leaves and rejoins the other ranks, with new settings of the reduction."""

    def cause_of(self, error: BaseException) -> UserError | None:
        """Returns the failure of another rank that caused the error, if any. Not collective."""
        return None

    def devices(self) -> list[str]:
        """Returns the device of each rank, by rank, after start. Not collective."""
        return []

    def description(self) -> str:
        """Names the means of communication, for the run's summary. Not collective."""
        return "one process"
