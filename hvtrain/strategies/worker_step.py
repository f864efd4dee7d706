"""Training steps on the workers of parameter servers.

`compute` calls the model's train step without its side effects, so that a worker can run it.
`ServerState` holds the variables on the servers. `Workers` keeps track of the workers' calls.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvtrain.checkpoint.model_state import seeds_of
from hvtrain.core.schedule import rate_factor
from hvtrain.errors import NOT_FINITE_ADVICE, ConfigError, TrainingError
from hvtrain.keras.gradients import NOT_FINITE, are_finite, map_values
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.loop import replaced, split_batch


class StepResults(NamedTuple):
    """The results of the model's train step on a batch; all but `result` are paired with their variables."""

    gradients: list[tuple[keras.Variable, Any]]
    # Numbers to add to the state of the metrics.
    counts: list[tuple[keras.Variable, tf.Tensor]]
    # New values of weights that no gradient trains, such as moving averages.
    statistics: list[tuple[keras.Variable, tf.Tensor]]
    # The step's return value.
    result: dict[str, tf.Tensor]


def compute(
    model: keras.Model, batch: Any, seed_offset: tf.Tensor, check_finite: bool
) -> StepResults:
    """Calls the model's train step in a graph, and returns the changes that it would have made.

    Args:
        model: a compiled model; its variables do not change.
        batch: a batch, as the train step takes it.
        seed_offset: added to the random seeds; an int64 scalar that differs between steps and between workers.
        check_finite: True if the computation must fail with NOT_FINITE unless all gradients are finite.

    Raises:
        ConfigError: the train step does not apply the model's optimizer exactly once.
    """
    metrics = model.metrics_variables
    # Metrics begin at zero, so that their new state is what this batch adds to them.
    start = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metrics]
    start += [(seed, _offset_seed(seed, seed_offset)) for seed in seeds_of(model)]

    steps: list[Any] = []

    def capture(gradients, variables=None):
        steps.append((list(gradients), variables or model.trainable_variables))

    # The scope intercepts what the step assigns, and `capture` gets the gradients in place of the
    # optimizer.
    with (
        replaced(model.optimizer, "apply", capture),
        keras.StatelessScope(state_mapping=start) as scope,
    ):
        result = model.train_step(batch)
    if len(steps) != 1:
        raise ConfigError(
            f"{type(model).__name__}.train_step applies the model's optimizer {len(steps)} times, "
            "but parameter servers need it applied once per batch; choose strategy=horovod"
        )

    gradients, variables = steps[0]
    if check_finite:
        check = tf.debugging.Assert(are_finite(gradients), [NOT_FINITE])
        with tf.control_dependencies([check]):
            gradients = [map_values(tf.identity, gradient) for gradient in gradients]
    weights = model.non_trainable_weights
    new_values = [(variable, scope.get_current_value(variable)) for variable in weights]
    return StepResults(
        # None: a gradient that does not exist, or a weight that the step did not assign.
        gradients=[pair for pair in zip(variables, gradients) if pair[1] is not None],
        counts=[(variable, scope.get_current_value(variable)) for variable in metrics],
        statistics=[pair for pair in new_values if pair[1] is not None],
        result=dict(result),
    )


def _offset_seed(seed: keras.Variable, seed_offset: tf.Tensor) -> tf.Tensor:
    """Returns a random generator's state for this step: the model's state plus `seed_offset`."""
    padded_offset = tf.pad(seed_offset[None], [[0, seed.shape[0] - 1]])
    return tf.cast(tf.cast(seed.value, seed_offset.dtype) + padded_offset, seed.dtype)


def reader(
    batches: Any, marks: StepMarks, sizes: Sequence[int]
) -> tuple[Callable[[], list[Any]], Any]:
    """Returns a function that reads the next batch and splits it into parts, and the parts' specs.

    The function also marks the beginning of a step.

    Args:
        batches: an iterator over batches.
        marks: counts and times the steps.
        sizes: number of examples in each part.
    """

    @tf.function(autograph=False)
    def read(iterator):
        # To the coordinator, the previous step ends when it reads the next batch.
        began = marks.ended([])
        with tf.control_dependencies([began]):
            data = iterator.get_next()
        return split_batch(marks.arrived(data, began), sizes)

    traced = read.get_concrete_function(batches)
    return lambda: traced(batches), traced.structured_outputs


class Workers:
    """Runs functions on the workers, one at a time on each.

    Args:
        ranks: the workers' ranks, for messages.
    """

    def __init__(self, ranks: list[int]) -> None:
        self._ranks = ranks
        self._pool = ThreadPoolExecutor(len(ranks), "hvtrain worker")
        # Worker and step of each call in progress.
        self.calls: dict[Future[Any], tuple[int, int]] = {}

    @property
    def free(self) -> list[int]:
        """Workers with no call in progress."""
        busy = {worker for worker, _ in self.calls.values()}
        return [worker for worker in range(len(self._ranks)) if worker not in busy]

    def call(
        self, worker: int, step: int, function: Callable[..., tf.Tensor], *arguments: Any
    ) -> None:
        """Begins a call on a free worker, for a step of the run."""

        def run():
            with tf.device(f"/job:worker/replica:0/task:{worker}"):
                output = function(*arguments)
            return output.numpy()  # Waits for the worker, and raises the error if its step failed.

        # The pool has a thread for each worker, since calling a remote function blocks the thread.
        self.calls[self._pool.submit(run)] = worker, step

    def finished(self) -> Iterator[tuple[int, int, Any]]:
        """Waits until a call has finished; yields worker, step and result of every finished call.

        Raises TrainingError if a worker's gradient is not finite.
        """
        done, _ = wait(self.calls, return_when=FIRST_COMPLETED)
        for call in done:
            worker, step = self.calls.pop(call)
            try:
                result = call.result()
            except tf.errors.InvalidArgumentError as error:
                if NOT_FINITE not in str(error):
                    raise
                raise TrainingError(
                    f"the gradient of step {step + 1:,} is not finite on worker {worker} (rank "
                    f"{self._ranks[worker]}); it did not reach the weights; {NOT_FINITE_ADVICE}"
                ) from error
            yield worker, step, result


class ServerState:
    """Variables on the parameter servers for everything that a step reads or changes.

    TensorFlow places them on the servers in turn. The coordinator's model is a copy: `push` and `pull`
    copy between the two, so that callbacks, checkpoints and evaluation deal with an ordinary model.

    Args:
        model: a built and compiled model, with all metrics built.
        replicas: TensorFlow's strategy, which creates the variables.
    """

    def __init__(self, model: keras.Model, replicas: tf.distribute.ParameterServerStrategy) -> None:
        self.model = model
        # Metrics and counters come first, since most pulls copy only these.
        small = [*model.metrics_variables, model.optimizer._iterations]
        factor = rate_factor(model)
        if factor is not None:
            small.append(factor)
        variables = [*small, *model.variables, *model.optimizer.variables]
        # Removes duplicates by identity, since == on Keras variables compares their values.
        self.variables = list({id(variable): variable for variable in variables}.values())
        self._num_small = len(small)

        with replicas.scope():
            self.remote = [
                tf.Variable(
                    variable.value.read_value(),
                    trainable=variable.trainable,
                    name=variable.name,
                )
                for variable in self.variables
            ]
        # The values that the servers hold, as far as this process knows.
        self._known = [variable.numpy() for variable in self.variables]
        # Traced once for each count: small variables only, or all.
        self._read = tf.function(
            lambda count: [tf.identity(variable) for variable in self.remote[:count]],
            autograph=False,
        )

    def pull(self, all_variables: bool) -> None:
        """Copies the servers' values to the model: all of them, or only metrics and counters."""
        count = len(self.variables) if all_variables else self._num_small
        for index, value in enumerate(self._read(count)):
            self.variables[index].value.assign(value)
            self._known[index] = value.numpy()

    def push(self) -> None:
        """Copies to the servers the model's variables that have changed since the last copy."""
        for index, variable in enumerate(self.variables):
            value = variable.numpy()
            # Compared as bytes, because NaN differs from itself.
            if value.tobytes() != self._known[index].tobytes():
                self.remote[index].assign(value)
                self._known[index] = np.array(value)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Makes the model and its optimizer use the servers' variables, for tracing functions."""
        optimizer = self.model.optimizer
        update_step = optimizer.update_step

        def update_on_server(gradient, variable, learning_rate):
            # The slots of a variable are on the same server.
            with tf.device(variable.device):
                return update_step(gradient, variable, learning_rate)

        with ExitStack() as stack:
            for variable, remote in zip(self.variables, self.remote):
                stack.enter_context(replaced(variable, "_value", remote))

            # Keras finds a variable's slots by a key made from its value, which is a different object
            # now.
            indices = {
                optimizer._var_key(variable): index
                for index, variable in enumerate(optimizer._trainable_variables)
            }
            stack.enter_context(replaced(optimizer, "_trainable_variables_indices", indices))
            stack.enter_context(replaced(optimizer, "update_step", update_on_server))

            # Keras would read the counter and write it back, and lose increments by other workers in
            # between.
            counter = optimizer._iterations
            stack.enter_context(replaced(counter, "assign_add", counter.value.assign_add))
            yield
