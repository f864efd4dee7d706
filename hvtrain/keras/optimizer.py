"""DistributedOptimizer: a Keras 3 optimizer that steps on the gradients of all ranks.

Horovod's own hooks a method that Keras 3 does not call, and so reduces nothing and says nothing. Ours
reduces where Keras clips: after loss scaling was undone and micro-steps were accumulated, before clipping,
weight decay and the step. So there is one reduction for each step that changes weights, and clipping acts
on the reduced gradient (checked against one process on the joint batch, see tests/distributed).
"""

from __future__ import annotations

import sys
from typing import Any

import horovod.tensorflow as hvd
import keras
from keras.optimizers import LossScaleOptimizer

from hvtrain.keras.reduction import Reducer

_REDUCER = "_hvtrain_reducer"


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | None = None,
    process_set: Any = None,
) -> keras.optimizers.Optimizer:
    """The same optimizer object, which from now on reduces gradients over all ranks before it steps.

    Its class becomes a subclass of its own that keeps the name, so slots and iterations it already has
    stay, and a saved model loads as the plain Keras optimizer anywhere. After `load_model` wrap the loaded
    optimizer again: `DistributedOptimizer(model.optimizer)`.

    Under the mixed_float16 policy the optimizer is first put into a LossScaleOptimizer, and that is wrapped:
    an overflow on one rank is then seen by all of them, and all skip the step together.

    Args:
        optimizer: any keras.optimizers.Optimizer, built or not.
        op: Average, Sum or Adasum, over the ranks.
        compression: Compression.none or Compression.fp16 on the wire.
        sparse_as_dense: reduce IndexedSlices as dense tensors.
        gradient_predivide_factor: divide by it before and multiply after the sum; needs op=Average.
        backward_passes_per_step: accumulate that many batches for each step (Keras's
            gradient_accumulation_steps); their gradients are summed, or averaged where
            average_aggregated_gradients is true.
        num_groups, groups: number of fused messages; 0 is one for each type of gradient.
        device_dense, device_sparse, process_set: as in Horovod.

    Raises:
        TypeError: not a Keras 3 optimizer.
        ValueError: wrapped twice, wrapped inside a LossScaleOptimizer, or arguments that exclude each other.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"{type(optimizer).__name__} came where a keras.optimizers.Optimizer was needed")
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise ValueError(f"{optimizer.name} is a DistributedOptimizer already; wrap an optimizer once, outermost")
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor needs op=Average; leave one of the two out")
    if isinstance(groups, list):
        raise ValueError("groups as lists of variables is not supported; give the number of groups")
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, LossScaleOptimizer):
        optimizer = LossScaleOptimizer(optimizer)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if backward_passes_per_step > 1:
        _accumulate(inner, backward_passes_per_step)
    if name:
        optimizer.name = name
    scale = 1.0 if average_aggregated_gradients else float(backward_passes_per_step)
    reducer = Reducer(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        num_groups=groups or num_groups,
        predivide_factor=gradient_predivide_factor,
        scale=scale,
        device_dense=device_dense,
        device_sparse=device_sparse,
        process_set=process_set,
    )
    # Past Keras's __setattr__, which would track the counter as state of the optimizer and save it.
    object.__setattr__(optimizer, _REDUCER, reducer)
    mixin = _ReducesOutside if isinstance(optimizer, LossScaleOptimizer) else _ReducesInside
    base = type(optimizer)
    # The base's own names: Keras writes them into saved models, which then load as the plain class.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    optimizer.__class__ = type(base.__name__, (mixin, base), names)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """True for what DistributedOptimizer returned."""
    return hasattr(optimizer, _REDUCER)


def num_reductions(optimizer: Any) -> int:
    """Reductions that this optimizer ran on this rank, counted in the graph; 0 for a plain optimizer."""
    return getattr(optimizer, _REDUCER).num_reductions if is_distributed(optimizer) else 0


class _ReducesInside:
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

    def _clip_gradients(self, grads: Any) -> Any:
        return super()._clip_gradients(getattr(self, _REDUCER)(grads))  # type: ignore[misc]


class _ReducesOutside:
    """For LossScaleOptimizer: reduces the scaled gradients first, so that all ranks see the same overflow.

    With gradient accumulation inside it, that is one reduction for each micro-step.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply(getattr(self, _REDUCER)(grads), trainable_variables)  # type: ignore[misc]


def _accumulate(optimizer: keras.optimizers.Optimizer, steps: int) -> None:
    if optimizer.built or optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"backward_passes_per_step={steps} needs an optimizer that is not built yet and has no "
            "gradient_accumulation_steps of its own; set one of the two, before the first step"
        )
    optimizer.gradient_accumulation_steps = steps


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
