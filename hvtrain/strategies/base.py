"""Interface of strategies. Each base class is the single process, so the runner never asks which strategy it has."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.errors import UserError
from hvtrain.step_timing import StepMarks
from hvtrain.strategies.loop import CallSteps, train
from hvtrain.watchdog import Watchdog
from hvtrain.watchdog.progress import CHECKPOINT, VALIDATION

T = TypeVar("T")


class Comm:
    """`strategy.comm`: collectives, here of one process. Every rank must enter each. The watchdog learns of waits."""

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = topology or Topology()
        self.watchdog = Watchdog()

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Returns the root's value on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Returns all ranks' values, by rank, on every rank."""
        return [value]

    def sum_arrays(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Returns element-wise sums over the ranks, as float64."""
        return [np.asarray(array, np.float64) for array in arrays]

    def broadcast_model(self, model: keras.Model) -> None:
        """Sets weights and optimizer state on all ranks to the chief's."""

    def on_chief(self, action: Callable[[], T]) -> T:
        """Runs the action on the chief and returns its result on all ranks; if it raises a UserError, all ranks do."""
        return self.on_rank(0, action)

    def on_rank(self, root: int, action: Callable[[], T]) -> T:
        """Does the same on any rank, which an error names unless it is the chief."""
        outcome: tuple[Any, UserError | None] = (None, None)
        if self.topology.rank == root:
            with self.watchdog.phase(CHECKPOINT):
                outcome = _attempt(action)
        value, error, host = self.broadcast((*outcome, self.topology.host), root)
        if error is not None:
            raise type(error)(f"rank {root} on {host}: {error}") if root else error
        return value

    def all_or_raise(self, action: Callable[[], T]) -> T:
        """Runs the action on every rank and returns its own result; if it fails on one rank, all raise that error."""
        value, error = _attempt(action)
        errors = self.gather(error and (error, self.topology.host))
        rank = next((rank for rank, failed in enumerate(errors) if failed), None)
        if rank is not None:
            first, host = errors[rank]
            where = "" if all(errors) else f"rank {rank} on {host}: "
            raise type(first)(f"{where}{first}")
        return value


def _attempt(action: Callable[[], T]) -> tuple[Any, UserError | None]:
    try:
        return action(), None
    except UserError as error:
        return None, error


class Timeline:
    """`strategy.timeline`: a trace of the reductions (every rank). Here there is none."""

    def start(self, path: Path) -> None:
        """Starts tracing; the chief writes the file, which chrome://tracing shows."""

    def stop(self) -> None:
        """Stops tracing and completes the file."""


class Membership:
    """`strategy.membership`: ranks that leave and join during a run. Here none does."""

    commit_steps = 0
    """Steps between commits of the state to every rank's memory; 0: never."""

    def run_with_restarts(self, attempt: Callable[[], T]) -> T:
        """Runs the attempt, again after ranks leave or join, and returns its result. Not collective."""
        return attempt()

    def check(self) -> None:
        """Restarts the attempt if ranks are joining or leaving (every rank)."""


class Strategy:
    """One process on its own, without communication.

    The verbs are start, scope, distribute, fit, evaluate and stop. The parts do nothing here: comm (collectives),
    watchdog, timeline, membership (ranks that leave and join). A method is collective (every rank) unless its docstring
    says otherwise.
    """

    marks: StepMarks
    """Counts and times of this process's steps. Made by start."""
    devices: Sequence[str] = ()
    """The device of each rank, by rank, after start."""

    def __init__(self) -> None:
        self.comm = Comm()
        self.timeline = Timeline()
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
        """Returns the optimizer, which now steps on the mean of all ranks' gradients. Not collective.

        check_finite: a gradient that is not finite on any rank stops the step on all of them. divide_losses: the step
        passes its loss through the optimizer's scale_loss, so the mean may be taken there.
        """
        return optimizer

    def fit(
        self,
        model: keras.Model,
        batches_from: Callable[[int], tf.data.Dataset],
        plan: StepPlan,
        start_step: int,
        callbacks: list[keras.callbacks.Callback],
        verbose: int,
        call_steps: CallSteps,
    ) -> None:
        """Trains from start_step to the end of the plan, or until a callback sets model.stop_training.

        Args:
            model: compiled, with an optimizer that distribute returned.
            batches_from: returns this rank's stream of batches, from a step of the run on.
            plan: the steps of the run.
            start_step: steps already done.
            callbacks: all of them, in their order.
            verbose: as in Keras's fit.
            call_steps: chooses the steps in one call of the graph.
        """
        train(model, batches_from, plan, start_step, callbacks, verbose, call_steps, self.marks)

    def metrics_over_ranks(self, model: keras.Model) -> dict[str, float]:
        """Returns the model's metrics over all ranks, and keeps their own state.

        The state of a Keras metric is sums (total and count of a mean, the counts of an AUC). Their sums over the
        ranks are the state of one process on all the data, so the result is exact even if shards differ in size:
        sum of values over sum of counts, never a mean of means.
        """
        own = [variable.numpy() for variable in model.metrics_variables]
        _assign(model.metrics_variables, self.comm.sum_arrays(own))
        results = {name: float(value) for name, value in model.get_metrics_result().items()}
        _assign(model.metrics_variables, own)
        return results

    def evaluate(self, model: keras.Model, dataset: tf.data.Dataset) -> dict[str, float]:
        """Returns the metrics over all ranks' shards, which may differ in size or be empty.

        The training metrics of an unfinished epoch keep their state.
        """
        training = [variable.numpy() for variable in model.metrics_variables]
        if int(dataset.cardinality().numpy()) == 0:
            build_metrics(model, dataset)
        else:
            with self.watchdog.phase(VALIDATION):
                progress = self.watchdog.progress
                beat = keras.callbacks.LambdaCallback(on_test_batch_begin=lambda batch, logs: progress.beat())
                model.evaluate(dataset, verbose=0, callbacks=[beat])
        results = self.metrics_over_ranks(model)
        _assign(model.metrics_variables, training)
        return results

    def guards(self) -> list[keras.callbacks.Callback]:
        """Returns callbacks that prove that ranks train together; they come before all others. Not collective."""
        return []

    def stop_callbacks(self) -> list[keras.callbacks.Callback]:
        """Returns callbacks that stop all ranks if one requests it, to come after those that may. Not collective."""
        return []

    def stop(self) -> None:
        """Leaves the other ranks. Not collective, as report_failure."""

    def report_failure(self, error: BaseException) -> None:
        """Tells the other ranks why this one fails, so that none waits for it; gives up after two seconds."""
        self.watchdog.fail(error)
        stopping = threading.Thread(target=self.stop, daemon=True)
        stopping.start()
        stopping.join(timeout=2.0)

    def expect_restart(self) -> None:
        """Prepares for restart; call it before start. Not collective."""

    def restart(self, environment: dict[str, str], bucket_mib: float) -> None:
        """Leaves and rejoins the other ranks, with new settings of the reduction."""

    def cause_of(self, error: BaseException) -> UserError | None:
        """Returns the failure of another rank that caused the error, if any. Not collective."""
        return None

    def description(self) -> str:
        """Names the means of communication, for the run's summary. Not collective."""
        return "one process"


def build_metrics(model: keras.Model, dataset: tf.data.Dataset) -> None:
    """Creates the state of the model's metrics, which Keras defers to the first batch, and resets it."""
    images, labels = dataset.element_spec[:2]
    blank = [np.zeros([1, *spec.shape[1:]], spec.dtype.as_numpy_dtype) for spec in (images, labels)]
    model.evaluate(*blank, verbose=0)
    model.reset_metrics()


def _assign(variables: list[keras.Variable], values: list[np.ndarray]) -> None:
    for variable, value in zip(variables, values):
        variable.assign(value.astype(variable.dtype))
