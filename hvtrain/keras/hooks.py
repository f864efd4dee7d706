"""Where in a step of Keras's optimizers the gradients are reduced: the classes behind DistributedOptimizer.

Each is a mixin put before the class of the optimizer that is wrapped, see `make`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.keras.finite import FiniteCheck, are_finite
from hvtrain.keras.reduction import Reducer

_REDUCER, _FINITE, _WRAP = "_hvtrain_reducer", "_hvtrain_finite", "_hvtrain_wrap"


def make(optimizer: Any, mixin: type, reducer: Reducer, finite: FiniteCheck | None, wrap: Callable[[Any], Any]) -> None:
    """Turns the optimizer, in place, into one of its class with the mixin; wrap does the same to a copy."""
    # Past Keras's __setattr__, which would track the counters as state of the optimizer and save them.
    object.__setattr__(optimizer, _REDUCER, reducer)
    object.__setattr__(optimizer, _FINITE, finite)
    base = type(optimizer)
    # The base's own names: Keras writes them into saved models, which then load as the plain class.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    optimizer.__class__ = type(base.__name__, (mixin, base), {**names, _WRAP: staticmethod(wrap)})


def reducer_of(optimizer: Any) -> Reducer | None:
    """The reducer of a distributed optimizer; None of a plain one."""
    return getattr(optimizer, _REDUCER, None)


def finite_check_of(optimizer: Any) -> FiniteCheck | None:
    return getattr(optimizer, _FINITE, None)


class Distributed:
    """What all distributed optimizers share."""

    def register_local_var(self, var: Any) -> None:
        """Leaves the gradient of this variable on its rank."""
        if getattr(self, _FINITE):
            raise ValueError(
                "check_finite=True needs gradients that all ranks share; leave it out with local variables"
            )
        getattr(self, _REDUCER).register_local([var])

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """A copy reduces too. The second base of a class that `make` made is the plain one."""
        return getattr(cls, _WRAP)(cls.__bases__[1].from_config(config, *args, **kwargs))  # type: ignore[attr-defined]


class ReducesInside(Distributed):
    """Reduces once for each step that changes weights, just before clipping."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        # Keras's compile puts its own LossScaleOptimizer around ours under mixed_float16. It would let each
        # rank decide alone whether to step, and the ranks that step would wait for those that skip.
        if _called_from("loss_scale_optimizer.py"):
            raise ValueError(
                "a DistributedOptimizer is inside a LossScaleOptimizer, where one rank's overflow would hang the "
                "others; wrap the outer one: DistributedOptimizer(LossScaleOptimizer(optimizer))"
            )
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def scale_loss(self, loss: Any) -> Any:
        return getattr(self, _REDUCER).share_of(super().scale_loss(loss))  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        getattr(self, _REDUCER).variables = list(trainable_variables)
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        reducer, finite = getattr(self, _REDUCER), getattr(self, _FINITE)
        reduced = reducer(grads, reducer.variables)
        return super()._clip_gradients(finite(grads, reduced) if finite else reduced)  # type: ignore[misc]


class ReducesAccumulated(ReducesInside):
    """Inside a LossScaleOptimizer that lets all ranks skip together."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super(ReducesInside, self).apply(grads, trainable_variables)  # type: ignore[misc]


class _OutsideLossScale(Distributed):
    """For LossScaleOptimizer."""

    def _checked(self, own: Any, reduced: Any) -> Any:
        """An overflow halves the scale and is no fault; at a scale below 1 it is no overflow any more."""
        finite = getattr(self, _FINITE)
        if not finite or not self.built:  # type: ignore[attr-defined]
            return reduced
        return finite(own, reduced, excused=self.dynamic_scale.value >= 1.0)  # type: ignore[attr-defined]


class ReducesOutside(_OutsideLossScale):
    """Reduces the scaled gradients first, so that all ranks see the same overflow."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        variables = trainable_variables or self._trainable_variables  # type: ignore[attr-defined]
        reduced = getattr(self, _REDUCER)(grads, variables)
        return super().apply(self._checked(grads, reduced), trainable_variables)  # type: ignore[misc]


class AgreesOnOverflow(_OutsideLossScale):
    """Around accumulation: one flag travels each micro-step, gradients with each step.

    Ranks that skipped different micro-steps would reduce at different times and wait for each other.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        reducer: Reducer = getattr(self, _REDUCER)
        if not reducer.is_alone:
            fine = tf.cast(are_finite(grads), tf.float32)
            name = f"{reducer.name}_overflow"
            least = hvd.allreduce(fine, op=hvd.Min, name=name, ignore_name_scope=True, process_set=reducer.process_set)
            # Keras looks at the gradients to decide, so an overflow elsewhere is put into the first of them.
            poison = tf.where(least > 0, 0.0, float("nan"))
            first = next(i for i, gradient in enumerate(grads) if gradient is not None)
            own, grads = grads, [_poisoned(g, poison) if i == first else g for i, g in enumerate(grads)]
            grads = self._checked(own, grads)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]


def _poisoned(gradient: Any, poison: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values + tf.cast(poison, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient + tf.cast(poison, gradient.dtype)


def _called_from(filename: str, depth: int = 12) -> bool:
    """True when one of the nearest callers is code of that file."""
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_code.co_filename.endswith(filename):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
