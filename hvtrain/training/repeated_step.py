"""Repeats a train step operation by operation, to find where a value is the first that is not finite."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf


class Place(NamedTuple):
    """Where a value is not finite; places compare in the order in which a step comes to them."""

    phase: int
    position: int
    words: str


BATCH, WEIGHTS, FORWARD, LOSS, BACKWARD = range(5)


def first_not_finite(model: keras.Model, batch: Any, has_batch_weight: bool = False) -> Place | None:
    """The first value of a train step that is not finite; None if all are (every rank, since a loss may be joint).

    The step goes as the model's own, augmentation and loss scale included, but changes no weight. Batch and weights
    come first, then outputs of layers, the loss, and gradients on their way back.
    """
    if found := _in_batch(batch[0] if has_batch_weight else batch) or _in_weights(model):
        step_without_update(model, batch)  # Other ranks may wait for this one in the loss.
        return found
    watch = _Watch(model)
    with _replaced_calls(watch.calls()):
        logs, gradients = step_without_update(model, batch)
    if watch.forward:
        return watch.forward
    if not np.isfinite(float(logs.get("loss", 0.0))):
        return Place(LOSS, 0, "the loss itself, after finite outputs of all layers")
    back = [place for place in (watch.backward, watch.of_weights(gradients)) if place]
    return min(back, key=lambda place: place.position, default=None)


def step_without_update(model: keras.Model, batch: Any) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """Logs of this step alone, and pairs of gradients and variables, which the optimizer does not get."""
    optimizer = model.optimizer
    pairs: list[tuple[Any, Any]] = []
    model.reset_metrics()
    # On the object, where they hide the methods of its class, which would reduce.
    optimizer.apply_gradients = pairs.extend
    optimizer.apply = lambda grads, variables=None: pairs.extend(zip(grads, variables or model.trainable_weights))
    try:
        return dict(model.train_step(batch) or {}), pairs
    finally:
        del optimizer.apply_gradients, optimizer.apply


def _in_batch(batch: Any) -> Place | None:
    for part, value in zip(("inputs", "targets", "weights"), batch):
        for array in tf.nest.flatten(value):
            if array.dtype.is_floating and not (fine := tf.math.is_finite(array).numpy()).all():
                row = int(np.argmin(fine.reshape(len(fine), -1).all(axis=1)))
                return Place(BATCH, 0, f"the {part} of the batch, in its example {row} of {len(fine)}")
    return None


def _in_weights(model: keras.Model) -> Place | None:
    for variable in model.weights:
        if not _is_finite(tf.convert_to_tensor(variable.value)):
            return Place(WEIGHTS, 0, f"the weights before the step, in {variable.path}")
    return None


def _is_finite(value: Any) -> bool:
    """Whether it is. What is not a tensor of floats is; so is a tensor of a graph, which has no value yet."""
    dense = value.values if isinstance(value, tf.IndexedSlices) else value
    has_numbers = isinstance(dense, tf.Tensor) and hasattr(dense, "numpy") and dense.dtype.is_floating
    return not has_numbers or bool(tf.reduce_all(tf.math.is_finite(dense)))


class _Watch:
    """Notes the first operation of a model that gives, or passes back, what is not finite."""

    def __init__(self, model: keras.Model) -> None:
        layers = model._flatten_layers()
        # A functional model has operations without weights too, such as keras.ops.log.
        every = [one for layer in layers for one in (layer, *getattr(layer, "operations", ()))]
        self._operations = list({id(one): one for one in every}.values())
        self._calls = 0
        self._last_call: dict[int, int] = {}  # By the identity of a layer.
        self.forward: Place | None = None
        self.backward: Place | None = None

    def calls(self) -> list[tuple[Any, Callable[..., Any]]]:
        """Pairs of an operation and the method that replaces its `call`."""
        return [(one, self._watched(one)) for one in self._operations]

    def of_weights(self, gradients: list[tuple[Any, Any]]) -> Place | None:
        """The last layer that got a gradient of its weights which is not finite."""
        owned = [(one, weight) for one in self._operations for weight in getattr(one, "_trainable_variables", ())]
        owners = {id(weight): id(one) for one, weight in owned}
        bad = [weight for gradient, weight in gradients if gradient is not None and not _is_finite(gradient)]
        last = {weight.path: self._last_call.get(owners.get(id(weight), 0), 0) for weight in bad}
        return min((Place(BACKWARD, -at, f"the gradient of {path}") for path, at in last.items()), default=None)

    def _watched(self, operation: Any) -> Callable[..., Any]:
        call, name = operation.call, f"{operation.name} ({type(operation).__name__})"
        passed = partial(self._see_gradient, operation, f"the gradient that {name} passes back")
        came = partial(self._see_gradient, operation, f"the gradient that comes back to {name} from what follows it")

        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tf.nest.map_structure(partial(_with_gradient_seen, passed), (args, kwargs))
            outputs = call(*args, **kwargs)
            self._calls += 1
            self._last_call[id(operation)] = self._calls
            if not self.forward and not all(map(_is_finite, tf.nest.flatten(outputs))):
                self.forward = Place(FORWARD, self._calls, f"the output of {name}")
            return tf.nest.map_structure(partial(_with_gradient_seen, came), outputs)

        return watched

    def _see_gradient(self, operation: Any, words: str, gradient: Any) -> None:
        if not self.backward and not _is_finite(gradient):
            self.backward = Place(BACKWARD, -self._last_call[id(operation)], words)


@contextmanager
def _replaced_calls(calls: Sequence[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    before = [(operation, vars(operation).get("call")) for operation, _ in calls]
    for operation, call in calls:
        object.__setattr__(operation, "call", call)  # Past Keras's, which tracks what belongs to a layer.
    try:
        yield
    finally:
        for operation, own in before:
            object.__delattr__(operation, "call")
            if own:
                object.__setattr__(operation, "call", own)


def _with_gradient_seen(see: Callable[[Any], None], value: Any) -> Any:
    """The value, whose gradient is shown to `see`; what is not a tensor of floats stays as it is."""
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value

    @tf.custom_gradient
    def same(tensor: tf.Tensor) -> Any:
        def gradient(upstream: Any) -> Any:
            see(upstream)
            return upstream

        return tf.identity(tensor), gradient

    return same(value)
