"""Where in the step of a Keras optimizer the gradients are reduced: the classes behind DistributedOptimizer.

Each is a mixin put before the class of the optimizer that is wrapped, see `make`. They reduce where the step is
entered, before anything that the optimizer's own class does. So a class that overrides the step, transforms gradients
or hands them on to other optimizers works on the joint gradient too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.keras.finite import FiniteCheck, are_finite
from hvtrain.keras.reduction import Reducer

_REDUCER, _FINITE, _WRAP = "_hvtrain_reducer", "_hvtrain_finite", "_hvtrain_wrap"
_OPTIONAL_SCALE, _SCALED = "_hvtrain_optional_scale", "_hvtrain_scaled"


class _UnderWay(threading.local):
    def __init__(self) -> None:
        self.optimizers: list[Any] = []
        """Distributed optimizers whose step this thread has entered, the outermost first."""


_under_way = _UnderWay()


def make(optimizer: Any, mixin: type, reducer: Reducer, finite: FiniteCheck | None, wrap: Callable[[Any], Any]) -> None:
    """Turns the optimizer, in place, into one of its class with the mixin; wrap does the same to a copy."""
    # Past Keras's __setattr__, which would track the counters as state of the optimizer and save them.
    object.__setattr__(optimizer, _REDUCER, reducer)
    object.__setattr__(optimizer, _FINITE, finite)
    base = type(optimizer)
    # The base's own names: Keras writes them into saved models, which then load as the plain class.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    optimizer.__class__ = type(base.__name__, (mixin, base), {**names, _WRAP: staticmethod(wrap)})


def scale_only_scaled_losses(optimizer: Any) -> None:
    """Has a LossScaleOptimizer leave gradients as they are, instead of raising, if no loss goes through scale_loss."""
    object.__setattr__(optimizer, _OPTIONAL_SCALE, True)


def reducer_of(optimizer: Any) -> Reducer | None:
    """The reducer of a distributed optimizer; None of a plain one."""
    return getattr(optimizer, _REDUCER, None)


def finite_check_of(optimizer: Any) -> FiniteCheck | None:
    return getattr(optimizer, _FINITE, None)


def own_steps(cls: type) -> list[str]:
    """Methods of Keras's step that a class of optimizers overrides.

    >>> own_steps(keras.optimizers.Adam), own_steps(keras.optimizers.MultiOptimizer)
    ([], ['apply'])
    """
    steps = ("apply", "apply_gradients", "_backend_apply_gradients")
    return [name for name in steps if getattr(cls, name) is not getattr(keras.optimizers.Optimizer, name)]


class Distributed:
    """Reduces the gradients as its step is entered, once, whatever the step calls in turn."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        variables = trainable_variables if trainable_variables is None else list(trainable_variables)
        with _entered(self) as is_outermost:
            return self._step(self._joint(grads, variables) if is_outermost else grads, variables)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        # Keras's own calls apply, which the runner replaces while XLA compiles the rest of the step.
        if "apply_gradients" not in own_steps(type(self).__bases__[1]):
            return super().apply_gradients(grads_and_vars)  # type: ignore[misc]
        grads, variables = zip(*grads_and_vars)
        with _entered(self) as is_outermost:
            grads = self._joint(grads, variables) if is_outermost else grads
            return super().apply_gradients(list(zip(grads, variables)))  # type: ignore[misc]

    def scale_loss(self, loss: Any) -> Any:
        object.__setattr__(self, _SCALED, True)
        return getattr(self, _REDUCER).share_of(super().scale_loss(loss))  # type: ignore[misc]

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

    def _joint(self, grads: Any, variables: Any) -> Any:
        """This rank's gradients in, those of the joint batch out."""
        known = variables or getattr(self, "_trainable_variables", ())
        # Keras itself refuses another number of gradients, once they come to it.
        known = known if len(known) == len(grads) else None
        return self._checked(grads, getattr(self, _REDUCER)(grads, known))

    def _checked(self, own: Any, reduced: Any) -> Any:
        finite = getattr(self, _FINITE)
        return finite(own, reduced) if finite else reduced

    def _step(self, grads: Any, variables: Any) -> Any:
        return super().apply(grads, variables)  # type: ignore[misc]


class DistributedAccumulation(Distributed):
    """Reduces the accumulated gradients instead, once for each step that changes weights, just before clipping."""

    def _joint(self, grads: Any, variables: Any) -> Any:
        return grads

    def _step(self, grads: Any, variables: Any) -> Any:
        reducer: Reducer = getattr(self, _REDUCER)
        before = reducer.num_calls
        result = super()._step(grads, variables)
        if tf.executing_eagerly() and int(self._iterations) % self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            return result  # A micro-step that only accumulates; a graph has both.
        if reducer.num_calls == before and not reducer.is_alone and any(gradient is not None for gradient in grads):
            raise RankError(
                f"{type(self).__name__} stepped without reducing a gradient, so each rank would train alone; "
                "accumulate with one of Keras's own optimizers, or without gradient_accumulation_steps"
            )
        return result

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        object.__setattr__(self, "_hvtrain_variables", list(trainable_variables))
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        reduced = getattr(self, _REDUCER)(grads, self._hvtrain_variables)  # type: ignore[attr-defined]
        return super()._clip_gradients(self._checked(grads, reduced))  # type: ignore[misc]


class DistributedLossScale(Distributed):
    """For LossScaleOptimizer: reduces the scaled gradients first, so that all ranks see the same overflow."""

    built: bool

    def _checked(self, own: Any, reduced: Any) -> Any:
        """An overflow halves the scale and is no fault; at a scale below 1 it is no overflow any more."""
        finite = getattr(self, _FINITE)
        if not finite or not self.built:
            return reduced
        return finite(own, reduced, excused=self.dynamic_scale.value >= 1.0)  # type: ignore[attr-defined]

    def _step(self, grads: Any, variables: Any) -> Any:
        if getattr(self, _SCALED, False):
            return super()._step(grads, variables)
        if not getattr(self, _OPTIONAL_SCALE, False):
            raise ValueError(
                "a LossScaleOptimizer got gradients of a loss that never went through its scale_loss, and would divide "
                "them by a scale that they do not have; call optimizer.scale_loss(loss) before the gradient"
            )
        if not self.built:
            self.build(variables)  # type: ignore[attr-defined]
            self.built = True
        return self.inner_optimizer.apply(grads, variables)  # type: ignore[attr-defined]


class DistributedLossScaleAccumulation(DistributedLossScale):
    """Around accumulation: one flag travels with each micro-step, gradients with each step.

    Ranks that skipped different micro-steps would reduce at different times and wait for each other.
    """

    def _joint(self, grads: Any, variables: Any) -> Any:
        reducer: Reducer = getattr(self, _REDUCER)
        if reducer.is_alone:
            return grads
        fine = tf.cast(are_finite(grads), tf.float32)
        name = f"{reducer.name}_overflow"
        least = hvd.allreduce(fine, op=hvd.Min, name=name, ignore_name_scope=True, process_set=reducer.process_set)
        # Keras looks at the gradients to decide, so an overflow elsewhere is put into the first of them.
        poison = tf.where(least > 0, 0.0, float("nan"))
        first = next(i for i, gradient in enumerate(grads) if gradient is not None)
        return self._checked(grads, [_poisoned(g, poison) if i == first else g for i, g in enumerate(grads)])


@contextmanager
def _entered(optimizer: Any) -> Iterator[bool]:
    """True for the call that enters the optimizer's step, False for those that the step itself makes.

    Raises ValueError inside another optimizer, which would reduce twice, or not on all ranks.
    """
    entered = _under_way.optimizers
    is_outermost = all(other is not optimizer for other in entered)
    outer = entered[-1] if entered else None
    is_accumulation = getattr(outer, "inner_optimizer", None) is optimizer
    if is_outermost and outer is not None and not is_accumulation:
        raise ValueError(
            f"the DistributedOptimizer {optimizer.name} is inside the DistributedOptimizer {outer.name}, so gradients "
            "would be reduced twice; wrap an optimizer once, outermost"
        )
    # Keras's compile puts its own LossScaleOptimizer around ours under mixed_float16. It would let each rank decide
    # alone whether to step, and the ranks that step would wait for those that skip; and it would scale twice.
    if is_outermost and not is_accumulation and _called_from("loss_scale_optimizer.py"):
        raise ValueError(
            "a DistributedOptimizer is inside a LossScaleOptimizer, where one rank's overflow would hang the "
            "others; wrap the outer one: DistributedOptimizer(LossScaleOptimizer(optimizer))"
        )
    entered.append(optimizer)
    try:
        yield is_outermost
    finally:
        entered.pop()


def _poisoned(gradient: Any, poison: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values + tf.cast(poison, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient + tf.cast(poison, gradient.dtype)


def _called_from(filename: str, depth: int = 16) -> bool:
    """True when one of the nearest callers is code of that file."""
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_code.co_filename.endswith(filename):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
