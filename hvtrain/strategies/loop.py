"""The parts of the training loop, Strategy.fit, which runs several train steps in one call of the graph.

Keras's own fit can do that too (steps_per_execution), but always with the same number of steps, so
a call may run past the end of an epoch or past a checkpoint. Besides, the overhead of its calls
exceeds the time of a small step.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import keras
import tensorflow as tf
from keras.callbacks import Callback, LambdaCallback

from hvtrain.step.step_timing import StepMarks
from hvtrain.watchdog import Watchdog
from hvtrain.watchdog.progress import VALIDATION

# Runs a number of steps and returns the logs of the last one.
Steps = Callable[[int], dict[str, Any]]

# Long enough that the 1.4 ms of Python in each call do not matter, and short enough not to delay
# callbacks, signals and progress.
CALL_SECONDS = 0.2
MAX_CALL_STEPS = 200
# Earlier steps trace the graph and fill the data pipeline.
FIRST_TIMED_STEP = 5
TIMED_STEPS = 10


class CallSteps:
    """Chooses the number of steps in the next call of the graph, the same on all ranks.

    Args:
        steps: the maximum number of steps in a call. None: as many as fit into CALL_SECONDS, according to
            the time of the first calls, each of a single step.
        intervals: step intervals, such as that of checkpoints, whose multiples a call must not cross.
        broadcast: a function that returns the chief's value on all ranks.
        accumulate: steps per weight update. The ranks learn of a request to stop during an update,
            and obey it at the end of the call. At that point no rank may hold accumulated
            gradients, since these differ between ranks, so a call that includes an update must
            also end with one.
    """

    def __init__(
        self,
        steps: int | None,
        intervals: Sequence[int],
        broadcast: Callable[[Any], Any],
        accumulate: int = 1,
    ) -> None:
        self._steps = steps or 1
        self._is_fixed = steps is not None
        self._intervals = intervals
        self._broadcast = broadcast
        self._accumulate = accumulate
        self._end = 0
        self._timed: list[float] | None = None if steps else []

    def next(self, step: int, end: int) -> int:
        """Returns the number of steps to take from this step of the run, at most up to `end`."""
        self._end = end
        num_steps = min(
            self._steps,
            end - step,
            *(interval - step % interval for interval in self._intervals),
        )
        # Cut back to the last weight update, if the call includes one; see `accumulate`.
        past_update = (step + num_steps) % self._accumulate
        return num_steps - past_update if past_update < num_steps else num_steps

    def is_boundary(self, step: int) -> bool:
        """Returns True if callbacks may look at the model after this step, the last of a call."""
        is_due = any(step % interval == 0 for interval in self._intervals)
        return self._is_fixed or is_due or step == self._end

    def record(self, seconds: float) -> None:
        """Records the time of a call (every rank).

        After enough calls the ranks agree on a number of steps.
        """
        if self._timed is None:
            return
        self._timed.append(seconds)
        if len(self._timed) == FIRST_TIMED_STEP + TIMED_STEPS:
            # The median, so that a single slow call has no effect.
            steps = CALL_SECONDS / max(median(self._timed[FIRST_TIMED_STEP:]), 1e-6)
            self._steps = self._broadcast(int(min(max(steps, 1), MAX_CALL_STEPS)))
            self._timed = None


def evaluate_shard(
    model: keras.Model, dataset: tf.data.Dataset, callbacks: Sequence[Callback], watchdog: Watchdog
) -> Collection[str]:
    """Evaluates on this rank's data; returns the names of the metrics. Not collective."""
    # The watchdog would otherwise mistake a long validation for a hang.
    beat = LambdaCallback(on_test_batch_begin=lambda batch, logs: watchdog.progress.beat())
    with watchdog.phase(VALIDATION), warnings.catch_warnings():
        # Keras warns when a dataset of unknown length ends, as with data.on_error=skip.
        warnings.filterwarnings("ignore", "Your input ran out of data")
        return model.evaluate(dataset, verbose=0, callbacks=[beat, *callbacks], return_dict=True)


def add_batch_axis(spec: Any) -> Any:
    """Returns the spec of a batch, given the spec of its elements."""
    return tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape], part.dtype), spec)


def blank_batch(batch_spec: Any, num_examples: int) -> Any:
    """Returns a batch of zeros; dimensions of unknown size get size 1."""

    def blank(part):
        return tf.zeros([num_examples, *(extent or 1 for extent in part.shape[1:])], part.dtype)

    return tf.nest.map_structure(blank, batch_spec)


def split_batch(batch: Any, sizes: int | Sequence[int]) -> list[Any]:
    """Splits a batch into parts of these sizes or, given a number, into that many equal parts."""
    arrays = [tf.split(array, sizes) for array in tf.nest.flatten(batch)]
    return [tf.nest.pack_sequence_as(batch, part) for part in zip(*arrays)]


def forward_of(model: keras.Model) -> Callable[[Any], Any]:
    """Returns a function from a batch of inputs to the model's outputs.

    Batches of all sizes share a graph.
    """
    return tf.function(lambda inputs: model(inputs, training=False), reduce_retracing=True)


def evaluate_blank(model: keras.Model, batch_spec: Any, num_batches: int) -> Collection[str]:
    """Evaluates batches that each hold one example of zeros; returns the metrics' names. Not collective."""
    batches = tf.data.Dataset.from_tensors(blank_batch(batch_spec, 1)).repeat(num_batches)
    return model.evaluate(batches, verbose=0, return_dict=True)


def build_metrics(model: keras.Model, batch_spec: Any) -> Collection[str]:
    """Creates the state of the model's metrics, which Keras defers to the first batch.

    Returns the names of an evaluation's metrics.
    """
    names = evaluate_blank(model, batch_spec, 1)
    model.reset_metrics()
    return names


def to_device(batches: tf.data.Dataset, device: str) -> tf.data.Dataset:
    """Returns a dataset that copies batches to the device ahead of time, while earlier steps compute."""
    return batches.apply(tf.data.experimental.prefetch_to_device(device, buffer_size=2))


def make_steps(
    model: keras.Model,
    batches: Any,
    marks: StepMarks,
    train_step: Callable[[Any], Any] | None = None,
) -> Steps:
    """Returns the function that runs training steps of a model.

    Args:
        model: the compiled model.
        batches: an iterator; each step takes its next batch.
        marks: counts and times the steps.
        train_step: used instead of the model's own train_step.
    """
    train_step = train_step or (_xla_train_step(model) if model.jit_compile else model.train_step)
    traced_step = tf.function(train_step, reduce_retracing=True)
    outputs = traced_step.get_concrete_function(batches.element_spec).structured_outputs
    spec = tf.nest.map_structure(lambda output: tf.TensorSpec(output.shape, output.dtype), outputs)
    # The loop in the graph needs an initial result, whose values are never read.
    blank = tf.nest.map_structure(
        lambda part: tf.zeros([extent or 0 for extent in part.shape], part.dtype), spec
    )

    def step(iterator, previous):
        # Marks the end of the previous step. A mark within that step would make the host wait for
        # the GPU, and the GPU would run out of work.
        began = marks.ended(previous)
        with tf.control_dependencies([began] if marks.host_only else []):
            data = iterator.get_next()
        result = traced_step(marks.arrived(data, began))
        # Any result's operation is the call of the whole step, so weights are updated, too,
        # before the results are passed on.
        with tf.control_dependencies([tf.nest.flatten(result)[0].op]):
            return tf.nest.map_structure(tf.identity, result)

    # AutoGraph would only cost time: the loop, the only control flow on tensors, is tf.while_loop.
    @tf.function(autograph=False)
    def loop_of_steps(iterator, num_steps):
        # One iteration at a time, since a rank can run only one reduction of each name at once.
        _, result = tf.while_loop(
            lambda done, _: done < num_steps,
            lambda done, previous: (done + 1, step(iterator, previous)),
            (tf.constant(0), blank),
            (tf.TensorShape([]), spec),
            parallel_iterations=1,
        )
        marks.ended(result)
        return result

    # Concrete functions, because a tf.function spends 0.3 ms per call on finding its trace.
    if marks.host_only:
        traced_loop = loop_of_steps.get_concrete_function(batches, tf.TensorSpec([], tf.int32))
        return lambda num_steps: traced_loop(batches, tf.constant(num_steps))

    # With GPUs each step is a call of its own. A loop in the graph starts an iteration only
    # after everything in the previous one is done, and so waits for the GPU; a call returns while
    # the GPU is still updating weights.
    call = tf.function(step, autograph=False).get_concrete_function(batches, spec)
    ended = tf.function(marks.ended, autograph=False).get_concrete_function(spec)

    def separate_steps(num_steps):
        result = blank
        for _ in range(num_steps):
            result = call(batches, result)
        ended(result)
        return result

    return separate_steps


def _xla_train_step(model: keras.Model) -> Callable[[Any], Any]:
    """Returns a train step whose forward and backward pass XLA compiles together.

    The optimizer's step stays outside, because XLA cannot compile a reduction (horovod#2590). While the
    compiled function is traced, a stand-in for optimizer.apply captures the gradients.
    """
    optimizer = model.optimizer

    @tf.function(jit_compile=True, reduce_retracing=True)
    def result_and_gradients(data):
        captured: list[Any] = []
        with replaced(
            optimizer, "apply", lambda gradients, variables=None: captured.extend(gradients)
        ):
            result = model.train_step(data)
        return result, captured

    def train_step(data):
        result, gradients = result_and_gradients(data)
        optimizer.apply(gradients, model.trainable_weights)
        return result

    return train_step


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of the object temporarily, bypassing Keras's __setattr__."""
    attributes = vars(target)
    before = dict(attributes)
    attributes[name] = value
    try:
        yield
    finally:
        if name in before:
            attributes[name] = before[name]
        else:
            del attributes[name]
