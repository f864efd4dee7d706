"""Mixins behind DistributedOptimizer: they decide where in a step the gradients are reduced.

`make_distributed` puts a mixin before the class of the wrapped optimizer. The mixin reduces on entry
to the step, before any code of the optimizer's own class runs. So a class that overrides the step,
transforms gradients or passes them on to other optimizers works on the joint gradient too.
"""

import io
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from keras.src.saving.keras_saveable import KerasSaveable

from hvtrain.errors import RankError
from hvtrain.keras.gradients import FiniteCheck, are_finite, variable_id
from hvtrain.keras.reduction import Reducer
from hvtrain.keras.table_rows import with_nan
from hvtrain.keras.table_steps import VariableRecorder, prepare_tables
from hvtrain.step.joint_loss import overridden_steps, subclass_under_its_name

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Hook:
    """State that DistributedOptimizer adds to an optimizer."""

    reducer: Reducer
    finite_check: FiniteCheck | None
    # If no loss went through its scale_loss, a LossScaleOptimizer raises an error (True) or steps
    # without dividing the gradients by its scale (False).
    requires_scaled_loss: bool = True
    loss_was_scaled: bool = False
    # Number of steps from one exchange with the other ranks to the next.
    every: int = 1
    # True for LocalSGD and DiLoCo, which exchange weights.
    averages_weights: bool = False

    def on_weights_set(self) -> None:
        """Called after a broadcast of the weights."""

    def have_diverged(self, step: int) -> bool:
        """Returns True if the ranks' weights differ after this step because they are not synchronized yet."""
        return False


# Attribute `optimizers`: the stack of distributed optimizers whose step this thread has entered,
# outermost first.
_active = threading.local()


def make_distributed(optimizer: Any, mixin: type, hook: Hook, wrap: Callable[[Any], Any]) -> None:
    """Changes the optimizer's class, in place, to a subclass with the mixin.

    Args:
        optimizer: a Keras optimizer.
        mixin: Distributed, or a subclass of it.
        hook: state that the mixin needs.
        wrap: a function that makes a copy of this optimizer distributed too.
    """
    # Bypasses Keras's __setattr__, which would track the counters as state and save them.
    object.__setattr__(optimizer, "_hvtrain", hook)
    optimizer.__class__ = subclass_under_its_name(
        type(optimizer), mixin, _hvtrain_wrap=staticmethod(wrap)
    )


def _load_copy(saved: io.BytesIO, wrap: Callable[[Any], Any]) -> Any:
    return wrap(KerasSaveable._unpickle_model(saved))


def hook_of(optimizer: Any) -> Hook | None:
    """Returns the hook of a distributed optimizer, or None for a plain one."""
    return getattr(optimizer, "_hvtrain", None)


class VariableList(list[Any]):
    """A list that can also be called, since optimizer.variables was a method in Keras 2."""

    def __call__(self) -> list[Any]:
        return self


class Distributed:
    """Reduces the gradients once, on entry to the step, even if the step calls other optimizers' steps."""

    _hvtrain: Hook

    @property
    def variables(self) -> list[Any]:
        return VariableList(super().variables)  # type: ignore[misc]

    @property
    def rank_variables(self) -> dict[str, Any]:
        """State that a plain optimizer does not have, by name; see CompressedReduction.prepare."""
        compressed = self._hvtrain.reducer.compressed
        return compressed.memory if compressed else {}

    def build(self, variables: Any) -> None:
        super().build(variables)  # type: ignore[misc]
        self._prepare_variables(variables)

    def _prepare_variables(self, variables: Any) -> None:
        """Prepares the compression and sharded tables for all variables that the optimizer is built with.

        A step may use only some of these variables.
        """
        reducer = self._hvtrain.reducer
        if reducer.compressed and not reducer.is_alone:
            reducer.compressed.prepare(list(variables))
        prepare_tables(self, variables)

    def save_own_variables(self, store: Any) -> None:
        if not any(hasattr(variable, "rank_part") for variable in self.variables):
            super().save_own_variables(store)  # type: ignore[misc]
            return
        # Only one rank saves, and it has only a part of the slots.
        log.warning(
            "the model is saved without the optimizer's state, which is sharded over the ranks; save what "
            "hvd.gather_slots(optimizer), called on every rank, returns on rank 0"
        )

    def __reduce__(self) -> Any:
        """Pickles and copies through the plain class, as Keras does; the copy reduces too."""
        reducer = self._hvtrain.reducer
        if reducer.local_ids or isinstance(reducer.groups, list):
            raise ValueError(
                "a DistributedOptimizer with local variables, or with lists of variables as groups, cannot be copied: "
                "a copy has other variables; copy the plain optimizer, and wrap the copy"
            )
        # Keras returns (function, (buffer,)).
        saved = super().__reduce__()[1][0]
        return _load_copy, (saved, self._hvtrain_wrap)  # type: ignore[attr-defined]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        known = getattr(self, "_trainable_variables", ())
        # Keras would count a sharded optimizer's parts as variables too.
        if trainable_variables is None and len(known) == len(grads):
            trainable_variables = known
        variables = None if trainable_variables is None else list(trainable_variables)
        with _entering_step(self, grads, variables) as reduced:
            return self._step(reduced, variables)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        # Keras's own method calls apply, and so must this: strategies replace apply while they
        # trace a step, for example for XLA (strategies/loop.py).
        if "apply_gradients" not in overridden_steps(type(self).__bases__[1]):
            return super().apply_gradients(grads_and_vars)  # type: ignore[misc]
        grads, variables = zip(*grads_and_vars)
        with _entering_step(self, grads, variables) as reduced:
            return super().apply_gradients(list(zip(reduced, variables)))  # type: ignore[misc]

    def scale_loss(self, loss: Any) -> Any:
        self._hvtrain.loss_was_scaled = True
        return self._hvtrain.reducer.scale_loss(super().scale_loss(loss))  # type: ignore[misc]

    def register_local_var(self, var: Any) -> None:
        """Makes each rank use its own gradient of this variable.

        Raises:
            ValueError: with check_finite, shard or global_clipnorm, which need gradients that all ranks share.
        """
        inner: Any = getattr(self, "inner_optimizer", self)
        options = {
            "check_finite": self._hvtrain.finite_check,
            "shard": self._hvtrain.reducer.gathers_weights,
            # The global norm would differ between ranks, and with it the steps of shared weights.
            "global_clipnorm": inner.global_clipnorm,
        }
        for name, is_set in options.items():
            if is_set:
                raise ValueError(
                    f"{name} needs gradients that all ranks share; leave it out with local variables"
                )
        self._hvtrain.reducer.local_ids.add(variable_id(var))

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Creates an optimizer from its config, and makes it distributed too."""
        # make_distributed puts the class that it wraps second among the bases.
        wrapped_class: Any = cls.__bases__[1]
        return cls._hvtrain_wrap(wrapped_class.from_config(config, *args, **kwargs))  # type: ignore[attr-defined]

    def _reduce(self, grads, variables):
        """Returns the gradients of the joint batch, reduced over all ranks."""
        reducer = self._hvtrain.reducer
        are_from_tape = any(getattr(gradient, "_hvtrain_reduced", False) for gradient in grads)
        # Averaging what is already averaged changes nothing.
        if are_from_tape and (reducer.op != hvd.Average or reducer.scale != 1.0):
            raise ValueError(
                "these gradients come from a DistributedGradientTape, and a DistributedOptimizer that does not average "
                "would reduce them twice; use a plain optimizer, or a plain tape"
            )
        if variables and len(variables) != len(grads):
            variables = None  # Keras refuses a wrong number of gradients later.
        # Keras divides by loss_scale_factor later.
        return self._check(grads, reducer(grads, variables), self.loss_scale_factor or 1.0)  # type: ignore[attr-defined]

    def _check(self, own, reduced, loss_scale=1.0):
        check = self._hvtrain.finite_check
        return check(own, reduced, loss_scale=loss_scale) if check else reduced

    def _step(self, grads, variables):
        return super().apply(grads, variables)  # type: ignore[misc]


class DistributedAccumulation(Distributed, VariableRecorder):
    """Reduces accumulated gradients just before clipping, once for each step that changes weights."""

    def _reduce(self, grads, variables):
        return grads

    def _overwrite_variables_directly_with_gradients(self, grads, vars):
        grads = self._hvtrain.reducer.maxima(grads, vars)
        return super()._overwrite_variables_directly_with_gradients(grads, vars)

    def _step(self, grads, variables):
        reducer = self._hvtrain.reducer
        calls_before = reducer.num_calls
        result = super()._step(grads, variables)
        # An eager micro-step that only accumulates reduces nothing. A graph contains both branches,
        # so tracing it must reduce.
        if tf.executing_eagerly() and int(self._iterations) % self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            return result
        if (
            reducer.num_calls == calls_before
            and not reducer.is_alone
            and any(gradient is not None for gradient in grads)
        ):
            raise RankError(
                f"{type(self).__name__} stepped without reducing a gradient, so each rank would train alone; "
                "use one of Keras's own optimizers, or leave gradient_accumulation_steps out"
            )
        return result

    def _clip_gradients(self, grads):
        reduced = self._hvtrain.reducer(grads, self._hvtrain_stepped)
        return super()._clip_gradients(self._check(grads, reduced))  # type: ignore[misc]


class DistributedLossScale(Distributed):
    """Wraps LossScaleOptimizer: reduces scaled gradients, so that all ranks see an overflow."""

    built: bool

    def _reduce(self, grads, variables):
        # Without a scale no step is skipped, and a NaN in a local variable's gradient stays on its
        # rank.
        self._hvtrain.reducer.shares_overflow = self._hvtrain.loss_was_scaled
        return super()._reduce(grads, variables)

    def _check(self, own, reduced, loss_scale=1.0):
        """Checks the gradients, but excuses an overflow, after which Keras halves the scale.

        With a scale below 1, scaling cannot overflow, so non-finite values come from the gradient itself.
        """
        if not self._hvtrain.loss_was_scaled:
            return super()._check(own, reduced, loss_scale)  # No step is skipped.
        check = self._hvtrain.finite_check
        if not check or not self.built:
            return reduced
        scale = self.dynamic_scale.value  # type: ignore[attr-defined]
        return check(own, reduced, excused=scale >= 1.0, loss_scale=loss_scale and scale)

    def _step(self, grads, variables):
        if self._hvtrain.loss_was_scaled:
            return super()._step(grads, variables)
        if self._hvtrain.requires_scaled_loss:
            raise ValueError(
                "a LossScaleOptimizer got gradients of a loss that never went through its scale_loss, and would divide "
                "them by a scale that they do not have; call optimizer.scale_loss(loss) before taking the gradient"
            )
        if not self.built:
            self.build(variables)
        return self.inner_optimizer.apply(grads, variables)  # type: ignore[attr-defined]


class DistributedLossScaleAccumulation(DistributedLossScale):
    """Wraps a LossScaleOptimizer whose inner optimizer accumulates.

    The ranks exchange one number in each micro-step, and gradients in each step. Without that
    number they could skip different micro-steps, reduce at different times, and wait for each other
    forever.
    """

    def _reduce(self, grads, variables):
        reducer = self._hvtrain.reducer
        poisoned = list(grads)
        if not reducer.is_alone:
            all_finite = hvd.allreduce(
                tf.cast(are_finite(grads), tf.float32),
                op=hvd.Min,
                name=f"{reducer.name}_overflow",
                ignore_name_scope=True,
                process_set=reducer.process_set,
            )
            # Keras checks the gradients themselves, so NaN is added to the first one if any rank
            # overflowed.
            poison = tf.where(all_finite > 0, 0.0, float("nan"))
            first = next(i for i, gradient in enumerate(grads) if gradient is not None)
            poisoned[first] = with_nan(grads[first], poison)
        # The inner optimizer checks the gradients of the step, and measures their norm.
        return self._check(grads, poisoned, loss_scale=None)


@contextmanager
def _entering_step(optimizer: Any, grads: Any, variables: Any) -> Iterator[Any]:
    """Yields the gradients to step on: reduced in the call that enters the step, else unchanged.

    Raises:
        ValueError: the optimizer is inside another, where gradients would be reduced twice, or not on all ranks.
    """
    active = vars(_active).setdefault("optimizers", [])
    is_outermost = optimizer not in active
    outer = active[-1] if active else None
    is_accumulation = getattr(outer, "inner_optimizer", None) is optimizer
    begins_step = is_outermost and not is_accumulation
    if begins_step and outer is not None:
        raise ValueError(
            f"the DistributedOptimizer {optimizer.name} is inside the DistributedOptimizer {outer.name}, so gradients "
            "would be reduced twice; wrap only the outermost optimizer"
        )
    # Under mixed_float16 Keras's compile puts its own LossScaleOptimizer around ours. Each rank
    # would then decide alone whether to step, ranks that step would wait for those that skip, and
    # the loss would be scaled twice. Only the call stack reveals such an optimizer.
    caller_files = (
        frame.f_code.co_filename for frame, _ in islice(traceback.walk_stack(sys._getframe()), 16)
    )
    if begins_step and any(name.endswith("loss_scale_optimizer.py") for name in caller_files):
        raise ValueError(
            "a DistributedOptimizer is inside a LossScaleOptimizer, where one rank's overflow would hang the "
            "others; wrap the outer one: DistributedOptimizer(LossScaleOptimizer(optimizer))"
        )
    active.append(optimizer)
    try:
        yield optimizer._reduce(grads, variables) if is_outermost else grads
    finally:
        active.pop()
