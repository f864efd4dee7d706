"""The interface of strategies. The base class is the null object: a single process.

So no other code has to ask which strategy a run has. A strategy has parts: comm (collectives, see comm.py),
timeline, membership (ranks that leave and join) and watchdog. The base class of each part does for one process
what the subclasses do for many.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import Callback, CallbackList
from keras.optimizers import Optimizer

from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError, FailedRankError, LostRankError, UserError
from hvtrain.step.joint_loss import joint_loss
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies import loop
from hvtrain.strategies.comm import Comm
from hvtrain.strategies.loop import CallSteps, Steps
from hvtrain.system import console
from hvtrain.system.resources import physical_gpus
from hvtrain.watchdog import Watchdog
from hvtrain.watchdog.progress import StopReason

T = TypeVar("T")

# Time limit for stop() after a failure: shutting down Horovod may block then, and the process has to end anyway.
STOP_SECONDS = 2.0


class Timeline:
    """`strategy.timeline`: traces the reductions; this base class traces nothing. Every rank calls both methods."""

    def start(self, path: Path) -> None:
        """Starts tracing; the chief writes the file, to be opened in chrome://tracing."""

    def stop(self) -> None:
        """Stops tracing and completes the file."""


class Membership:
    """`strategy.membership`: lets ranks leave and join during a run; in this base class, none do."""

    # Steps between commits of the state to every rank's memory; 0: never.
    commit_steps = 0

    def run_with_restarts(self, attempt: Callable[[], T]) -> T:
        """Runs the attempt and returns its result; repeats it when ranks leave or join (every rank)."""
        return attempt()

    def check(self) -> None:
        """Restarts the attempt if ranks are joining or leaving (every rank)."""


class Strategy:
    """One process on its own, without communication.

    Main methods, in the order of calls: start, scope, distribute, fit, evaluate, stop. A method is
    collective (every rank) unless its docstring says otherwise.
    """

    # The strategy's name in messages.
    name = "single"
    # Counts and times of this process's steps. Created by start.
    marks: StepMarks
    # A description of each rank's device, by rank. Set by start; empty here.
    devices: Sequence[str] = ()
    # Number of the plan's ranks that this process represents: it trains on their batches as one.
    # Known after start.
    num_replicas = 1
    # The units among which the batch of a step is divided, for messages.
    unit = "ranks"
    # True if a rank's batch is split into parts that another rank may compute after a restart.
    cuts_batches = False
    # False if every array of a batch must have one row for each example, as with batches sent to workers.
    augments_in_step = True
    # False if batches need the same shape in all steps (no bucketing by length).
    takes_varying_shapes = True
    # False if all steps need batches of one size.
    takes_short_batches = True
    # False if restart() is impossible, or would change nothing.
    can_restart = True
    # How a run under this strategy differs from the same run under others; for the summary and the record.
    differences: Sequence[str] = ()
    # Steps from one synchronization of the ranks' weights to the next, and the number of synchronizations so far.
    sync_every = 1
    num_synchronizations = 0
    # For each worker of parameter servers, the number of this start's steps that used its gradient.
    steps_by_worker: Sequence[int] = ()

    def __init__(self) -> None:
        self.comm = Comm()
        self.timeline = Timeline()
        self.membership = Membership()

    @property
    def topology(self) -> Topology:
        """This rank's place among the ranks (rank, size, ...). Before start it is that of a single process."""
        return self.comm.topology

    @property
    def num_computing(self) -> int:
        """Number of ranks, replicas or workers that compute gradients at the same time."""
        return self.topology.size * self.num_replicas

    @property
    def watchdog(self) -> Watchdog:
        """This rank's watchdog; collectives tell it when they wait. Idle before start_watchdog."""
        return self.comm.watchdog

    @property
    def is_plain(self) -> bool:
        """True if every process takes part in each step, running the model's own train step on its own batch.

        Not collective.
        """
        own = type(self)
        return own.make_steps is Strategy.make_steps and own.train_step is Strategy.train_step

    def start(self) -> Topology:
        """Joins the other ranks, pins this rank's device before TensorFlow uses one, and returns the topology."""
        self.marks = StepMarks()
        gpus = physical_gpus()
        if gpus:
            # Imported here because it imports Horovod, which hvtrain.plan does not need.
            from hvtrain.keras.devices import use_only

            use_only(gpus[0])
        return self.topology

    def hosts(self) -> list[str]:
        """Returns the host of each process of the run, by rank."""
        return self.comm.gather(self.topology.host)

    def start_watchdog(self, abort_seconds: float) -> None:
        """Starts a watchdog over all ranks, replacing an earlier one; 0 seconds: starts none.

        Raises ConfigError if a launcher started several ranks, since each would train alone.
        """
        # Not checked in start, because hvtrain.load() calls that too, in scripts that a launcher may have started.
        refuse_several_processes(self.name, "horovod")

    def scope(self) -> AbstractContextManager[Any]:
        """Returns the context in which the model is built. Not collective."""
        return nullcontext()

    def exclude(self, settings: dict[str, Any]) -> None:
        """Raises ConfigError for the first of these settings whose value is truthy. Not collective."""
        for setting, is_set in settings.items():
            if is_set:
                raise ConfigError(
                    f"strategy={self.name} and {setting} exclude each other; leave one of them out"
                )

    def distribute(self, optimizer: Optimizer, check_finite: bool) -> Optimizer:
        """Returns the optimizer, changed to step on the mean of all ranks' gradients. Not collective.

        Args:
            optimizer: not built yet.
            check_finite: True if a non-finite gradient on any rank must fail the step on all ranks.
        """
        return optimizer

    def distribute_loss(self, loss: keras.losses.Loss) -> keras.losses.Loss:
        """Returns a loss whose gradient, averaged over the ranks, is that of the joint batch. Not collective."""
        return joint_loss(loss, lambda denominator: denominator, lambda: 1)

    def prepare(self, model: keras.Model) -> None:
        """Changes a built and compiled model so that this strategy can train it. Not collective.

        Raises ConfigError if it cannot.
        """

    def fit(
        self,
        model: keras.Model,
        batches_from: Callable[[int], tf.data.Dataset],
        plan: StepPlan,
        start_step: int,
        callbacks: list[Callback],
        call_steps: CallSteps,
    ) -> None:
        """Trains from start_step to the end of the plan, or until a callback sets model.stop_training.

        Args:
            model: compiled, with an optimizer from `distribute`.
            batches_from: returns this rank's endless stream of batches, beginning at a step of the run.
            callbacks: in the order in which they are called. They get the number of a step within its
                epoch, as in Keras's fit with steps_per_execution.
            call_steps: chooses the number of steps in each call of the graph.
        """
        self.check_plan(plan)
        callback_list = CallbackList(
            callbacks,
            add_history=True,
            model=model,
            verbose=0,
            epochs=plan.num_epochs,
            steps=plan.steps_per_epoch,
        )
        model.stop_training = False
        callback_list.on_train_begin()

        steps = self.make_steps(model, batches_from(start_step), start_step, call_steps)
        step = start_step
        logs: dict[str, Any] = {}
        while step < plan.num_steps and not model.stop_training:
            epoch, in_epoch = plan.position(step)
            begin = step - in_epoch
            end = min(begin + plan.steps_per_epoch, plan.num_steps)
            model.reset_metrics()
            callback_list.on_epoch_begin(epoch)

            while step < end and not model.stop_training:
                num_steps = call_steps.next(step, end)
                callback_list.on_train_batch_begin(step - begin)
                started = time.perf_counter()
                logs = steps(num_steps)
                call_steps.record(time.perf_counter() - started)
                step += num_steps
                callback_list.on_train_batch_end(step - begin - 1, logs)

            # Called even if a callback has cut the epoch short.
            self.settle()
            # As in Keras's fit: the metrics if a step returns exactly these, otherwise the last step's result.
            metrics = model.get_metrics_result()
            logs = dict(metrics if set(metrics) == set(logs) else logs)
            callback_list.on_epoch_end(epoch, logs)

        # Called only at the end, since this overwrites the weights with their moving average, if there is one.
        model.optimizer.finalize_variable_values(model.trainable_variables)
        callback_list.on_train_end(logs)

    def make_steps(
        self, model: keras.Model, batches: tf.data.Dataset, start_step: int, call_steps: CallSteps
    ) -> Steps:
        """Returns the function that runs training steps; batches begin at start_step."""
        gpus = tf.config.list_logical_devices("GPU")
        iterator = iter(loop.to_device(batches, gpus[0].name) if gpus else batches)
        return loop.make_steps(model, iterator, self.marks, self.train_step(model))

    def settle(self) -> None:
        """Completes pending changes of the model at the end of an epoch (every rank)."""

    def check_plan(self, plan: StepPlan) -> None:
        """Raises ConfigError for batches that this strategy cannot take. Not collective."""
        if not (plan.is_full or self.takes_short_batches):
            raise ConfigError(
                f"strategy={self.name} needs batches of one size in all steps; choose data.uneven=trim, and another "
                "run.dir if this run began with short batches"
            )

    def train_step(self, model: keras.Model) -> Callable[[Any], Any] | None:
        """Returns the train step, a function from a batch to logs; None: the model's own. Not collective."""
        return None

    def metrics_over_ranks(self, model: keras.Model) -> dict[str, float]:
        """Returns the model's metrics over all ranks. Each rank's metric state stays as it was.

        The state of a Keras metric consists of sums (total and count of a mean, the counts of an AUC).
        Summed over the ranks, they are the state of one process on all the data. So the result is exact
        even if shards differ in size, unlike a mean of means.
        """
        local_state = _metric_state(model)
        _set_metric_state(model, self.comm.sum_arrays(local_state))
        results = {name: float(value) for name, value in model.get_metrics_result().items()}
        _set_metric_state(model, local_state)
        return results

    def evaluate(
        self, model: keras.Model, dataset: tf.data.Dataset, callbacks: Sequence[Callback] = ()
    ) -> dict[str, float]:
        """Returns the metrics over all ranks' shards, which may differ in size or be empty.

        The training metrics of an unfinished epoch keep their state.
        """
        training_state = _metric_state(model)
        num_batches = int(dataset.cardinality())
        num_blank = 0
        if self.calls_together(model):
            # All ranks must call the model equally often, so one with fewer batches adds batches of zeros.
            num_calls = max(1, num_batches)
            num_blank = max(self.comm.gather(num_calls)) - num_calls
        # A rank without examples still takes part in the sum, so its metrics need their variables.
        if num_batches == 0:
            names = loop.build_metrics(model, dataset.element_spec)
        else:
            names = loop.evaluate_shard(model, dataset, callbacks, self.watchdog)
        if num_blank:
            own_state = _metric_state(model)
            loop.evaluate_blank(model, dataset.element_spec, num_blank)
            _set_metric_state(model, own_state)
        results = self.metrics_over_ranks(model)
        _set_metric_state(model, training_state)
        # `names` leaves out metrics that only the train step computes.
        return {name: value for name, value in results.items() if name in names}

    def calls_together(self, model: keras.Model) -> bool:
        """Returns True if calling the model is collective; this method is not."""
        return False

    def guards(self) -> list[Callback]:
        """Returns callbacks that check that the ranks train together; they go first. Not collective."""
        return []

    def stop_callbacks(self) -> list[Callback]:
        """Returns callbacks that stop all ranks if one stops; they go last. Not collective."""
        return []

    def stop(self) -> None:
        """Stops the watchdog and leaves the other ranks. Not collective."""

    def expect_restart(self) -> None:
        """Makes restart possible, or raises ConfigError; call it before start. Not collective."""
        self.exclude({"comm.tune=true": not self.can_restart})

    def restart(self, cycle_ms: float, bucket_mib: float) -> None:
        """Leaves and rejoins the other ranks, with another cycle time of Horovod and another bucket size."""

    def is_lost_rank(self, error: BaseException) -> bool:
        """Returns True if the error says that communication between ranks broke. Not collective."""
        return False

    def cause_of(self, error: BaseException) -> UserError | None:
        """Returns another rank's failure if that caused this error, else None. Not collective."""
        reason = self.watchdog.cause() if self.is_lost_rank(error) else None
        return error_of(reason, self.watchdog) if reason else None

    def description(self) -> str:
        """Describes the communication, for the run's summary. Not collective."""
        return "one process"


@contextmanager
def report_failures(
    strategy: Strategy, note: Callable[[BaseException], None] | None = None
) -> Iterator[None]:
    """Reports an error of the block to the other ranks and raises it, or the failure of another rank that caused it.

    Args:
        strategy: connects this rank to the others.
        note: called with the error to report, before the other ranks learn of it.
    """
    try:
        yield
    except BaseException as error:
        # The launcher signals all ranks once one has ended, but this rank still has to say why it failed.
        console.take_signals(console.note_signal)
        cause = strategy.cause_of(error)
        if note:
            note(cause or error)
        strategy.watchdog.fail(cause or error)
        console.within(STOP_SECONDS, strategy.stop, None)
        if cause:
            raise cause from error
        raise


def error_of(reason: StopReason, watchdog: Watchdog) -> UserError:
    """Returns the error that this rank raises when another one has failed or is lost."""
    error_type = FailedRankError if reason.is_failure else LostRankError
    error = error_type(f"stopped because {reason.text}")
    error.exit_code = reason.code
    error.culprit = reason.rank
    error.reporting_rank = watchdog.reporting_rank
    return error


def refuse_several_processes(strategy: str, alternative: str) -> None:
    """Raises ConfigError if a launcher started several processes, since each would train alone."""
    size = console.launched_size() or 1
    if size > 1:
        raise ConfigError(
            f"strategy={strategy} is one process, but the launcher started {size}; start it with "
            f"python -m hvtrain, or choose strategy={alternative}"
        )


def _metric_state(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.metrics_variables]


def _set_metric_state(model: keras.Model, state: list[np.ndarray]) -> None:
    for variable, value in zip(model.metrics_variables, state):
        variable.assign(value)
