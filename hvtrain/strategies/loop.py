"""The training loop: Keras's train step and Keras's callbacks, with several steps to a call of the graph.

Keras's own fit can do several steps to a call too, but only one number of them for all calls, which then run past the
end of an epoch, past checkpoints and past what else is due; and it spends more on a call than a small step takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import keras
import tensorflow as tf

from hvtrain.core.step_plan import StepPlan
from hvtrain.step_timing import StepMarks

# A call costs 1.4 ms of Python: long enough that this does not count, short enough for callbacks, signals and progress.
SECONDS_OF_A_CALL = 0.2
MOST_STEPS_OF_A_CALL = 200
# Those are timed one by one; before them steps are traced, and the data pipeline fills.
FIRST_TIMED_STEP, TIMED_STEPS = 5, 10


class Calls:
    """How many steps the next call takes, the same on all ranks.

    Args:
        steps: as many where nothing is due before; None: what takes SECONDS_OF_A_CALL, found by timing.
        periods: something is due after every N steps of the run, for each N.
        broadcast: gives the chief's value to all ranks.
    """

    def __init__(self, steps: int | None, periods: Sequence[int], broadcast: Callable[[Any], Any]) -> None:
        self._steps = steps or 1
        self._periods = periods
        self._broadcast = broadcast
        self._timed: list[float] | None = None if steps else []
        self._single = 0

    def next(self, step: int, end: int) -> int:
        """From a step of the run, to `end` at most.

        >>> calls = Calls(10, [25], lambda value: value)
        >>> calls.next(0, 100), calls.next(20, 100), calls.next(95, 98)
        (10, 5, 3)
        """
        return min(self._steps, end - step, *(period - step % period for period in self._periods))

    def took(self, seconds: float) -> None:
        """What a call took. Some of the first ones make the ranks agree on the number of steps (every rank)."""
        if self._timed is None:
            return
        self._single += 1
        if self._single > FIRST_TIMED_STEP:
            self._timed.append(seconds)
        if len(self._timed) == TIMED_STEPS:
            found = SECONDS_OF_A_CALL / max(median(self._timed), 1e-6)
            self._steps = self._broadcast(int(min(max(found, 1), MOST_STEPS_OF_A_CALL)))
            self._timed = None


def train(
    model: keras.Model,
    batches_from: Callable[[int], tf.data.Dataset],
    plan: StepPlan,
    start_step: int,
    callbacks: list[keras.callbacks.Callback],
    verbose: int,
    calls: Calls,
    marks: StepMarks,
) -> None:
    """Trains from start_step to the end of the plan, or until a callback sets model.stop_training.

    Callbacks are told the number of a step within its epoch, as by Keras's fit with steps_per_execution.
    """
    callback_list = keras.callbacks.CallbackList(
        callbacks,
        add_history=True,
        add_progbar=verbose > 0,
        model=model,
        verbose=verbose,
        epochs=plan.num_epochs,
        steps=plan.steps_per_epoch,
    )
    model.stop_training = False
    callback_list.on_train_begin()
    batches = batches_from(start_step)
    iterator = iter(batches)
    steps = make_steps(model, iterator, marks)
    step, logs = start_step, {}
    while step < plan.num_steps and not model.stop_training:
        epoch, in_epoch = plan.position(step)
        begin = step - in_epoch
        end = min(begin + plan.steps_per_epoch, plan.num_steps)
        model.reset_metrics()
        callback_list.on_epoch_begin(epoch)
        while step < end and not model.stop_training:
            number = calls.next(step, end)
            callback_list.on_train_batch_begin(step - begin)
            began = time.perf_counter()
            logs = steps(number)
            calls.took(time.perf_counter() - began)
            step += number
            callback_list.on_train_batch_end(step - begin - 1, logs)
        metrics = model.get_metrics_result()
        logs = dict(metrics if set(metrics) == set(logs) else logs)
        callback_list.on_epoch_end(epoch, logs)
    # Here and not after each epoch: it overwrites weights with their moving average, where one is kept.
    model.optimizer.finalize_variable_values(model.trainable_variables)
    callback_list.on_train_end(logs)


def make_steps(model: keras.Model, batches: Any, marks: StepMarks) -> Callable[[int], dict[str, Any]]:
    """A call (number) does so many steps on the next batches, of an iterator; what the last one returned."""
    one_step = tf.function(_by_xla(model) if model.jit_compile else model.train_step, reduce_retracing=True)
    outputs = one_step.get_concrete_function(batches.element_spec).structured_outputs
    shapes = tf.nest.map_structure(lambda output: output.shape, outputs)
    blank = tf.nest.map_structure(lambda output: tf.zeros([d or 0 for d in output.shape], output.dtype), outputs)

    @tf.function
    def several(iterator: Any, number: tf.Tensor) -> Any:
        def step(done: tf.Tensor, _: Any) -> tuple[tf.Tensor, Any]:
            began = marks.now()
            with tf.control_dependencies([began]):
                data = iterator.get_next()
            data, arrived = marks.arrived(data)
            result = one_step(data)
            marks.ended(tf.nest.flatten(result)[0].op, began, arrived)
            return done + 1, result

        begin = (tf.constant(0), blank)
        invariants = (tf.TensorShape([]), shapes)
        # One after the other: a rank has one reduction of a name under way.
        _, result = tf.while_loop(lambda done, _: done < number, step, begin, invariants, parallel_iterations=1)
        return result

    # Of one signature: a tf.function looks for it at each call, in 0.3 ms.
    traced = several.get_concrete_function(batches, tf.TensorSpec([], tf.int32))
    return lambda number: traced(batches, tf.constant(number))


def _by_xla(model: keras.Model) -> Callable[[Any], Any]:
    """model.train_step with forward and backward pass compiled by XLA, as one.

    What the optimizer does with the gradients stays outside, for XLA cannot compile a reduction (horovod#2590).
    """
    optimizer = model.optimizer

    @tf.function(jit_compile=True, reduce_retracing=True)
    def result_and_gradients(data: Any) -> tuple[Any, list[Any]]:
        came: list[Any] = []
        apply, optimizer.apply = optimizer.apply, lambda gradients, variables=None: came.extend(gradients)
        try:
            result = model.train_step(data)
        finally:
            optimizer.apply = apply
        return result, came

    def train_step(data: Any) -> Any:
        result, gradients = result_and_gradients(data)
        optimizer.apply(gradients, model.trainable_weights)
        return result

    return train_step
