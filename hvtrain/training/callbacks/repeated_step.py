"""guard.layers=true: repeats a failed train step, and names its first value that is not finite."""

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvtrain.errors import NOT_FINITE_ADVICE, ConfigError, TrainingError, in_one_line
from hvtrain.strategies.loop import replaced
from hvtrain.training.callbacks.guard import ranks_in_words, ranks_not_finite
from hvtrain.training.callbacks.run_context import Logs, RunCallback, RunContext

log = logging.getLogger(__name__)

# Phases of a step, in order.
BATCH, WEIGHTS, FORWARD, LOSS, BACKWARD = range(5)


class Origin(NamedTuple):
    """A value that is not finite. Origins sort in the order in which a step computes them.

    position is the order within the phase: the number of the operation's call in the forward pass, and
    the negative of that number in the backward pass.
    """

    phase: int
    position: int
    description: str


class LayerSearch(RunCallback):
    """Checks the loss of each step, and repeats a step that fails (every rank).

    To repeat a step, it keeps a copy of the model's variables from before each one. So each call of the
    graph must be a single step (see call_steps).

    Raises:
        ConfigError: The strategy does not run the model's own train step on each rank.
        TrainingError: The loss of a step is not finite. The message names the first value that is not.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        if not self.strategy.is_plain:
            raise ConfigError(
                "guard.layers=true repeats the model's own train step on each rank, which "
                f"strategy={self.strategy.name} does not run; choose strategy=horovod, elastic or single"
            )

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        # All variables, including dropout seeds and moving statistics.
        self._before = [
            (variable, tf.identity(variable.value)) for variable in self.model.variables
        ]

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if hasattr(self.model.optimizer, "dynamic_scale"):
            return  # A loss scale skips steps that overflow; their loss is not an error.

        ranks = ranks_not_finite(self.comm, logs.get("loss", 0.0))
        if ranks:
            origin = self.find_origin(self.step)
            raise TrainingError(
                f"the loss of step {self.step:,} is not finite on {ranks_in_words(ranks)}{origin}; "
                f"{NOT_FINITE_ADVICE}"
            )

    def find_origin(self, step: int) -> str:
        """Repeats the last step that began, numbered `step` from 1, and describes where it fails (every rank)."""
        for variable, value in self._before:
            variable.assign(value)
        origins = self.comm.gather(self._repeat(step - 1))
        first = min((origin for origin in origins if origin), default=None)
        if first is None:
            return "; when the step is repeated layer by layer, all values are finite"
        # Compared by phase and position, since descriptions differ between
        # ranks, for instance in the number of the example.
        ranks = [rank for rank, origin in enumerate(origins) if origin and origin[:2] == first[:2]]
        return (
            f"; non-finite values first appear in {first.description}, on {ranks_in_words(ranks)}"
        )

    def _repeat(self, steps_before: int) -> Origin | None:
        batch = next(iter(self.run.batches_from(steps_before)))
        try:
            return first_not_finite(self.model, batch, not self.plan.is_even)
        except Exception as error:
            # Not raised: the other ranks wait for this rank's answer, and the run fails anyway.
            log.warning("the step cannot be repeated layer by layer: %s", in_one_line(error))
            return None


def first_not_finite(
    model: keras.Model,
    batch: Any,
    has_batch_weight: bool = False,
) -> Origin | None:
    """Finds the first value of a train step that is not finite.

    Every rank must call it, since the loss may add values of all ranks. The step is the model's own,
    with augmentation and loss scale, but without the update. The batch and the weights are checked
    first, then the outputs of layers, the loss, and the gradients in the order of the backward pass.

    Args:
        model: A compiled model whose optimizer is built.
        batch: A batch as the model's train step takes it.
        has_batch_weight: True if `batch` is a pair (batch, weight), as for ranks with batches of different sizes.

    Returns:
        The value's origin; None if all values are finite.
    """
    origin = _origin_in_batch(batch[0] if has_batch_weight else batch) or _origin_in_weights(model)
    if origin:
        step_without_update(model, batch)  # Other ranks may wait for this rank in the loss.
        return origin

    watch = _Watch(model)
    with ExitStack() as stack:
        for operation in watch.operations:
            stack.enter_context(replaced(operation, "call", watch.wrap_call(operation)))
        logs, gradients = step_without_update(model, batch)
    if watch.forward:
        return watch.forward
    if not math.isfinite(logs.get("loss", 0.0)):
        return Origin(LOSS, 0, "the loss itself, after finite outputs of all layers")
    backward = [
        origin for origin in (watch.backward, watch.origin_in_gradients(gradients)) if origin
    ]
    return min(backward, key=lambda origin: origin.position, default=None)


def step_without_update(
    model: keras.Model, batch: Any
) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """Runs a train step without the optimizer's update.

    Returns the logs of this step alone, and pairs (gradient, variable).
    """
    optimizer = model.optimizer
    pairs: list[tuple[Any, Any]] = []
    model.reset_metrics()

    def collect(grads, variables=None):
        pairs.extend(zip(grads, variables or model.trainable_weights))

    # The optimizer's own methods would reduce the gradients and update the weights.
    with (
        replaced(optimizer, "apply_gradients", pairs.extend),
        replaced(optimizer, "apply", collect),
    ):
        return dict(model.train_step(batch) or {}), pairs


def _origin_in_batch(batch: Any) -> Origin | None:
    for part, value in zip(("inputs", "targets", "weights"), batch):
        for array in tf.nest.flatten(value):
            if not array.dtype.is_floating:
                continue
            is_finite = tf.math.is_finite(array).numpy()
            if not is_finite.all():
                num_examples = len(is_finite)
                example = is_finite.reshape(num_examples, -1).all(axis=1).argmin()
                text = f"the {part} of the batch, in example {example} of {num_examples}"
                return Origin(BATCH, 0, text)
    return None


def _origin_in_weights(model: keras.Model) -> Origin | None:
    for variable in model.weights:
        if not _is_finite(tf.convert_to_tensor(variable.value)):
            return Origin(WEIGHTS, 0, f"the weights before the step, in {variable.path}")
    return None


def _is_finite(value: Any) -> bool:
    """True if all values are finite. Non-float and symbolic tensors count as finite."""
    dense = value.values if isinstance(value, tf.IndexedSlices) else value
    has_numbers = (
        isinstance(dense, tf.Tensor) and hasattr(dense, "numpy") and dense.dtype.is_floating
    )
    return not has_numbers or bool(tf.reduce_all(tf.math.is_finite(dense)))


class _Watch:
    """Records the first operation whose output, or whose gradient, is not finite."""

    def __init__(self, model: keras.Model) -> None:
        layers = model._flatten_layers()
        # A Functional model also has operations that are not layers, such as keras.ops.log.
        operations = [
            item for layer in layers for item in (layer, *getattr(layer, "operations", ()))
        ]
        self.operations = list(dict.fromkeys(operations))
        self._num_calls = 0
        self._last_call: dict[int, int] = {}  # By the id() of an operation.
        self.forward: Origin | None = None
        self.backward: Origin | None = None

    def origin_in_gradients(self, gradients: list[tuple[Any, Any]]) -> Origin | None:
        """Returns the origin in the first layer of the backward pass whose weights got a non-finite gradient."""
        owners = {
            id(weight): id(operation)
            for operation in self.operations
            for weight in getattr(operation, "_trainable_variables", ())
        }
        origins = []
        for gradient, weight in gradients:
            if gradient is not None and not _is_finite(gradient):
                call = self._last_call.get(owners.get(id(weight), 0), 0)
                origins.append(Origin(BACKWARD, -call, f"the gradient of {weight.path}"))
        return min(origins, default=None)

    def wrap_call(self, operation: Any) -> Callable[..., Any]:
        """Returns the function that replaces the operation's `call`."""
        call = operation.call
        name = f"{operation.name} ({type(operation).__name__})"
        check_outgoing = partial(
            self._with_gradient_check, operation, f"the gradient that {name} passes back"
        )
        # The gradient that reaches a layer is not the one that the next layer passes back if other
        # code, which is not an operation of the model, lies between the two.
        check_incoming = partial(
            self._with_gradient_check,
            operation,
            f"the gradient that {name} receives from what follows it",
        )

        @wraps(call)
        def watched_call(*args, **kwargs):
            args, kwargs = tf.nest.map_structure(check_outgoing, (args, kwargs))
            outputs = call(*args, **kwargs)
            self._num_calls += 1
            self._last_call[id(operation)] = self._num_calls
            if not self.forward and not all(map(_is_finite, tf.nest.flatten(outputs))):
                self.forward = Origin(FORWARD, self._num_calls, f"the output of {name}")
            return tf.nest.map_structure(check_incoming, outputs)

        return watched_call

    def _with_gradient_check(self, operation: Any, description: str, value: Any) -> Any:
        """Returns an equal tensor whose gradient is checked; returns anything but a float tensor unchanged."""
        if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
            return value

        @tf.custom_gradient
        def same(tensor):
            def gradient(upstream):
                if not self.backward and not _is_finite(upstream):
                    self.backward = Origin(BACKWARD, -self._last_call[id(operation)], description)
                return upstream

            return tf.identity(tensor), gradient

        return same(value)
