"""Training steps on workers: computes a step without side effects, and keeps track of the workers' calls."""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvtrain.checkpoint.store import rate_factor
from hvtrain.errors import ConfigError, TrainingError
from hvtrain.keras.gradients import NOT_FINITE, are_finite
from hvtrain.step.step_timing import StepMarks


class Computed(NamedTuple):
    """What the model's train step computes on a batch.

    gradients: of the variables. counts: what to add to the state of each metric. statistics: new values of weights that
    no gradient touches, such as moving averages. result: what the step returns.
    """

    gradients: list[Any]
    variables: list[keras.Variable]
    counts: list[tuple[keras.Variable, tf.Tensor]]
    statistics: list[tuple[keras.Variable, tf.Tensor]]
    result: dict[str, tf.Tensor]


def compute(model: keras.Model, batch: Any, number: tf.Tensor, check_finite: bool) -> Computed:
    """Calls the model's train step, and returns what it would have changed. Call it while a graph is traced.

    number: differs between steps and between workers; random numbers depend on it.
    """
    metrics = model.metrics_variables
    known = {id(variable) for variable in (*model.weights, *metrics)}
    seeds = [variable for variable in model.variables if id(variable) not in known]
    start = [(one, tf.zeros(one.shape, one.dtype)) for one in metrics] + [(one, _moved(one, number)) for one in seeds]
    applied: list[tuple[list[Any], list[Any]]] = []

    def take(gradients: Any, variables: Any = None) -> None:
        applied.append((list(gradients), list(model.trainable_variables if variables is None else variables)))

    with replaced(model.optimizer, "apply", take), keras.StatelessScope(state_mapping=start) as scope:
        result = model.train_step(batch)
    if len(applied) != 1:
        raise ConfigError(
            f"{type(model).__name__}.train_step steps {len(applied)} times with the model's optimizer, and parameter "
            "servers need one step for each batch; choose strategy=horovod"
        )
    gradients, variables = applied[0]
    if check_finite:
        present = [gradient for gradient in gradients if gradient is not None]
        with tf.control_dependencies([tf.debugging.Assert(are_finite(present), [NOT_FINITE])]):
            gradients = [tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in gradients]
    new = [(one, scope.get_current_value(one)) for one in model.non_trainable_variables if id(one) in known]
    statistics = [(one, value) for one, value in new if value is not None and one not in metrics]
    return Computed(
        gradients, variables, [(one, scope.get_current_value(one)) for one in metrics], statistics, dict(result)
    )


def _moved(seed: keras.Variable, number: tf.Tensor) -> tf.Tensor:
    """The state of a random generator for this step: the number plus the model's own state, which stays."""
    step = tf.concat([number[None], tf.zeros([seed.shape[0] - 1], number.dtype)], axis=0)
    return tf.cast(tf.cast(seed.value, number.dtype) + step, seed.dtype)


def packed(result: dict[str, tf.Tensor]) -> tf.Tensor:
    """The numbers that a step returns in one tensor, since each tensor of a worker takes a fetch of its own."""
    return tf.stack([tf.cast(tf.reduce_mean(value), tf.float32) for _, value in sorted(result.items())] or [0.0])


def reader(batches: Any, marks: StepMarks, num_parts: int = 1) -> tuple[Callable[[], list[Any]], Any]:
    """Makes a function that takes the next batch, cut into equal parts, and marks that a step begins with it.

    Returns it and the spec of a part.
    """

    def cut(batch: Any) -> list[Any]:
        parts = [tf.split(one, num_parts) for one in tf.nest.flatten(batch)]
        return [tf.nest.pack_sequence_as(batch, list(part)) for part in zip(*parts)]

    @tf.function(autograph=False)
    def take(iterator: Any) -> Any:
        began = marks.ended([])
        with tf.control_dependencies([began]):
            data = iterator.get_next()
        return cut(marks.arrived(data, began))

    traced = take.get_concrete_function(batches)
    return lambda: traced(batches), traced.structured_outputs[0]


class Workers:
    """Calls of functions on workers, one at a time on each."""

    def __init__(self, number: int, ranks: list[int]) -> None:
        self.number = number
        self._ranks = ranks
        self._pool = ThreadPoolExecutor(number, "hvtrain worker")
        self._calls: dict[Future[Any], tuple[int, int]] = {}

    @property
    def free(self) -> list[int]:
        """Workers without a call."""
        busy = {worker for worker, _ in self._calls.values()}
        return [worker for worker in range(self.number) if worker not in busy]

    def call(self, worker: int, step: int, function: Callable[..., tf.Tensor], *arguments: Any) -> None:
        """Begins a call for a step of the run, on a free worker."""

        def run() -> Any:
            with tf.device(f"/job:worker/replica:0/task:{worker}"):
                output = function(*arguments)
            return output.numpy()

        self._calls[self._pool.submit(run)] = worker, step

    def finished(self) -> list[tuple[int, int, Any]]:
        """Waits until a call has finished; returns worker, step and result of all that have. Raises their errors."""
        done, _ = wait(self._calls, return_when=FIRST_COMPLETED)
        ended = []
        for call in done:
            worker, step = self._calls.pop(call)
            try:
                ended.append((worker, step, call.result()))
            except tf.errors.InvalidArgumentError as error:
                if NOT_FINITE not in str(error):
                    raise
                raise TrainingError(
                    f"the gradient of step {step + 1:,} is not finite on worker {worker} (rank {self._ranks[worker]}); "
                    "nothing of it reached the weights; the last checkpoint is from before; lower "
                    "optimizer.learning_rate, clip gradients (+optimizer.global_clipnorm=1), or look at that data"
                ) from error
        return ended

    def join(self) -> list[tuple[int, int, Any]]:
        """Waits for all calls; returns worker, step and result of each."""
        ended = []
        while self._calls:
            ended += self.finished()
        return ended


_MISSING = object()


class ServerState:
    """Variables on the parameter servers for all that a step reads or changes.

    TensorFlow places them on the servers in turn. `push` and `pull` copy between them and the model, so that
    callbacks, checkpoints and evaluation deal with an ordinary model.

    Args:
        model: built and compiled, with all metrics built.
        replicas: makes the variables.
    """

    def __init__(self, model: keras.Model, replicas: tf.distribute.ParameterServerStrategy) -> None:
        self.model = model
        factor = rate_factor(model)
        small = [*model.metrics_variables, model.optimizer._iterations, *([] if factor is None else [factor])]
        everything = [*small, *model.variables, *model.optimizer.variables]
        self.variables = list({id(variable): variable for variable in everything}.values())
        with replicas.scope():
            self.remote = [
                tf.Variable(variable.value.read_value(), trainable=variable.trainable, name=variable.name)
                for variable in self.variables
            ]
        self._known: list[np.ndarray | None] = [variable.numpy() for variable in self.variables]
        self._num_small = len(small)
        self._readers: dict[int, Callable[[], Any]] = {}

    def pull(self, everything: bool) -> None:
        """Copies to the model what the servers hold; without everything only metrics and counters."""
        count = len(self.variables) if everything else self._num_small
        for at, value in enumerate(self._read(count)):
            self.variables[at].value.assign(value)
            self._known[at] = value.numpy()

    def push(self) -> None:
        """Copies to the servers what changed in the model since the last pull."""
        for at, (variable, known) in enumerate(zip(self.variables, self._known)):
            own = variable.numpy()
            if known is None or own.tobytes() != known.tobytes():
                self.remote[at].assign(own)
                self._known[at] = np.array(own)

    def _read(self, count: int) -> list[tf.Tensor]:
        """The first `count` variables of the servers, on this process's CPU."""
        if count not in self._readers:
            read = tf.function(lambda: [tf.identity(one) for one in self.remote[:count]], autograph=False)
            self._readers[count] = read.get_concrete_function()
        return self._readers[count]()

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Makes the model and its optimizer use the servers' variables, for tracing functions."""
        optimizer = self.model.optimizer
        with ExitStack() as stack:
            for variable, remote in zip(self.variables, self.remote):
                stack.enter_context(replaced(variable, "_value", remote))
            indices = {optimizer._var_key(one): at for at, one in enumerate(optimizer._trainable_variables)}
            stack.enter_context(replaced(optimizer, "_trainable_variables_indices", indices))
            stack.enter_context(replaced(optimizer, "update_step", on_its_server(optimizer.update_step)))
            # Keras reads the counter and writes it back, and increments of other workers in between would be lost.
            counter = optimizer._iterations
            stack.enter_context(replaced(counter, "assign_add", lambda by: counter.value.assign_add(by)))
            yield


def on_its_server(update_step: Callable[..., Any]) -> Callable[..., Any]:
    """update_step, run on the server that holds the variable, so that its slots do not travel."""

    def update(gradient: Any, variable: Any, learning_rate: Any) -> Any:
        with tf.device(variable.device):
            return update_step(gradient, variable, learning_rate)

    return update


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of the object for a while, without what Keras does when one is set."""
    own = vars(thing)
    before = own.get(name, _MISSING)
    own[name] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del own[name]
        else:
            own[name] = before
