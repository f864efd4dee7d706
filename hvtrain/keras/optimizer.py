"""DistributedOptimizer: a Keras 3 optimizer that steps on the gradients of all ranks.

Horovod's own version hooks _aggregate_gradients, which Keras 3 never calls, so it silently reduces
nothing (horovod#4290). The one here reduces on entry to the step or, with Keras's gradient
accumulation, just before clipping. So there is one reduction for each step that changes weights,
and clipping, weight decay and everything else in the optimizer's class act on the reduced gradient
(tests/keras compares it with one process on the joint batch).
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import h5py
import horovod.tensorflow as hvd
import keras
import numpy as np
from keras.optimizers import LossScaleOptimizer, Optimizer
from keras.src.legacy.saving.legacy_h5_format import load_attributes_from_hdf5_group

from hvtrain.keras.gradients import FiniteCheck
from hvtrain.keras.hooks import (
    Distributed,
    DistributedAccumulation,
    DistributedLossScale,
    DistributedLossScaleAccumulation,
    Hook,
    hook_of,
    make_distributed,
)
from hvtrain.keras.reduction import Reducer
from hvtrain.keras.sharded_optimizer import shard_slots
from hvtrain.keras.table_steps import clip_tables
from hvtrain.step.joint_loss import overridden_steps


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Optimizer,
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
    groups: int | list[list[Any]] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    check_finite: bool = False,
    bucket_bytes: int = 0,
    shard: bool = False,
) -> Optimizer:
    """Makes an optimizer, in place, reduce gradients over all ranks before it steps, and returns it.

    The optimizer's class becomes a subclass of the same name, so existing slots and iterations stay,
    and a saved model loads anywhere, with the plain Keras optimizer. After `keras.models.load_model`
    wrap the loaded optimizer again, `DistributedOptimizer(model.optimizer)`, or use
    hvtrain.keras.load_model.

    It either steps on the joint gradient or raises. Methods that the optimizer's class overrides
    (apply, apply_gradients) get gradients that are already reduced. If the class computes gradients
    of its own within the step, it has to reduce them itself, with DistributedGradientTape.

    Under the mixed_float16 policy the optimizer is first wrapped in a LossScaleOptimizer, which is returned instead,
    so that all ranks see an overflow on any of them and skip the step together. The loss is scaled only if it goes
    through scale_loss, which compile(auto_scale_loss=False) and some custom loops leave out.

    Args:
        optimizer: any keras.optimizers.Optimizer, built or not.
        name: a new name for the optimizer.
        op: Average, Sum or Adasum (Maleki et al. 2020), over the ranks.
        compression: the format on the wire: Compression.none, fp16, bf16, int8 or powersgd(rank). The
            last two keep the error of each gradient and add it to the next one.
        sparse_as_dense: reduce IndexedSlices as dense tensors.
        gradient_predivide_factor: divides gradients before the sum, and multiplies the sum; needs
            op=Average.
        backward_passes_per_step: number of batches to accumulate for each step (Keras's
            gradient_accumulation_steps); their gradients are summed, or averaged if
            average_aggregated_gradients is true. Either way there is one reduction per step.
        num_groups, groups: number of fused messages for each type of gradient (default: one), or
            lists of variables whose gradients are sent together.
        process_set: the ranks that exchange gradients; others step on their own.
        scale_local_gradients: divide the gradients of local variables (see the result's
            register_local_var, and PartialDistributedOptimizer) by the number of ranks, as averaging does.
        device_dense, device_sparse: as in Horovod.
        check_finite: fail the step on all ranks, before it changes weights, if a reduced gradient
            is not finite (not in Horovod; costs one pass over the gradients).
        bucket_bytes: in place of num_groups and groups: send messages of about this many bytes, the
            last variables first, while other gradients are still computed; gradients of 4 MiB or
            more are sent alone (not in Horovod).
        shard: each rank keeps optimizer slots only for its part of the weights, updates that part, and
            gathers the other parts (ZeRO stage 1, not in Horovod). The weights are the same as without
            sharding. The optimizer must not be built yet; see gather_slots.

    Raises:
        TypeError: optimizer is not a Keras 3 optimizer.
        ValueError: the optimizer is wrapped twice, or steps inside another one; arguments exclude each
            other or are out of range; or gradient_accumulation_steps is set on an optimizer that
            overrides Keras's step.
        RankError: in the first step that is traced, if the ranks' gradients differ in number,
            names, shapes or types.

    Example:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
        model.compile(optimizer, "mse", jit_compile=False)
    """
    # Copies of the optimizer are wrapped with the same arguments except these two.
    options = {key: value for key, value in locals().items() if key not in ("optimizer", "name")}
    options["backward_passes_per_step"] = 1  # A copy made from the config has its own accumulation.
    check_is_plain(optimizer)
    if check_finite and process_set is not None:
        raise ValueError(
            "check_finite=True needs gradients that all ranks share; leave process_set out"
        )

    is_scaled = isinstance(optimizer, LossScaleOptimizer)
    # A LossScaleOptimizer that is added here, not by the user, accepts a loss that bypasses its scale_loss.
    requires_scaled_loss = is_scaled
    if keras.config.dtype_policy().name == "mixed_float16" and not is_scaled:
        optimizer = LossScaleOptimizer(optimizer)
        is_scaled = True

    inner = getattr(optimizer, "inner_optimizer", optimizer)
    _accumulate(inner, backward_passes_per_step)
    if name:
        optimizer.name = name

    reducer = Reducer(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        groups=groups or num_groups or None,
        bucket_bytes=bucket_bytes,
        predivide_factor=gradient_predivide_factor,
        # Keras averages the gradients that it accumulates; Horovod sums them by default.
        scale=1.0 if average_aggregated_gradients else float(backward_passes_per_step),
        device_dense=device_dense,
        device_sparse=device_sparse,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        gathers_weights=shard,
    )
    if is_scaled and getattr(compression, "keeps_errors", False):
        raise ValueError(
            f"compression {compression.name} keeps errors from step to step, but a loss scale changes their unit; use "
            "compression bf16, or the precision mixed_bfloat16"
        )

    if shard:
        shard_slots(inner, reducer)
    clip_tables(inner)
    hook = Hook(reducer, FiniteCheck() if check_finite else None, requires_scaled_loss)
    wrap = partial(_wrap_copy, scale=reducer.scale, **options)
    if not inner.gradient_accumulation_steps:
        make_distributed(optimizer, DistributedLossScale if is_scaled else Distributed, hook, wrap)
    else:
        # The inner optimizer accumulates, so it is the one that reduces. A loss scale around it sees
        # each micro-step.
        make_distributed(inner, DistributedAccumulation, hook, wrap)
        if is_scaled:
            make_distributed(optimizer, DistributedLossScaleAccumulation, hook, wrap)
    if inner.built:
        optimizer._prepare_variables(inner._trainable_variables)
    return optimizer


def check_is_plain(optimizer: Any) -> None:
    """Raises TypeError unless this is a Keras 3 optimizer, and ValueError if it is distributed already."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not a keras.optimizers.Optimizer; pass an optimizer of Keras 3"
        )
    # LossScaleOptimizer and MultiOptimizer hold other optimizers.
    parts = [
        optimizer,
        getattr(optimizer, "inner_optimizer", None),
        *(getattr(optimizer, "optimizers", None) or []),
    ]
    distributed = [part.name for part in parts if is_distributed(part)]
    if distributed:
        raise ValueError(
            f"{distributed[0]} is a DistributedOptimizer already; wrap only the outermost optimizer"
        )


def _accumulate(optimizer: Optimizer, num_passes: int) -> None:
    """Makes an optimizer accumulate the gradients of this many backward passes, if there are several.

    Raises:
        ValueError: the number is out of range, or the optimizer cannot accumulate.
    """
    if num_passes < 1:
        raise ValueError(
            f"backward_passes_per_step={num_passes} is out of range; it must be at least 1"
        )
    if num_passes > 1:
        # Keras creates the accumulators when it builds the optimizer.
        if optimizer.built or optimizer.gradient_accumulation_steps:
            raise ValueError(
                f"backward_passes_per_step={num_passes} needs an optimizer that is not built yet and has no "
                "gradient_accumulation_steps of its own; set one of the two, before the first step"
            )
        optimizer.gradient_accumulation_steps = num_passes

    # An overridden step need not be linear in the gradients; the mean of the ranks' steps would
    # then not be the step of the joint batch.
    own_steps = overridden_steps(type(optimizer))
    if optimizer.gradient_accumulation_steps and own_steps:
        raise ValueError(
            f"{type(optimizer).__name__} overrides {', '.join(own_steps)} and has gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}; use one of Keras's own optimizers, or do not accumulate"
        )


def _wrap_copy(optimizer: Optimizer, scale: float, **options: Any) -> Optimizer:
    """Wraps a copy of an optimizer, with the original's scale. The copy's config says whether it accumulates."""
    wrapped = DistributedOptimizer(optimizer, **options)
    hook_of(wrapped).reducer.scale = scale  # type: ignore[union-attr]
    return wrapped


def PartialDistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Optimizer,
    *args: Any,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    **kwargs: Any,
) -> Optimizer:
    """Makes a DistributedOptimizer that keeps the gradients of local_layers on their rank.

    The layers must be built. Keep them out of the broadcast too:
    BroadcastGlobalVariablesCallback(0, local_variables=layer.trainable_weights).
    """
    weights = local_weights(local_layers)
    wrapped = DistributedOptimizer(optimizer, *args, **kwargs)
    for weight in weights:
        wrapped.register_local_var(weight)
    return wrapped


def local_weights(local_layers: Any) -> list[Any]:
    """Returns the trainable weights of one Keras layer or of several.

    Raises:
        ValueError: for anything else, and for a layer that is not built.
    """
    if isinstance(local_layers, keras.layers.Layer):
        local_layers = [local_layers]
    layers = list(local_layers or [])
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                f"local_layers holds an object of type {type(layer).__name__}; pass Keras layers"
            )
        if not layer.built:
            raise ValueError(
                f"local layer {layer.name} has no weights yet; build the model before its optimizer"
            )
    return [weight for layer in layers for weight in layer.trainable_weights]


def is_distributed(optimizer: Any) -> bool:
    """Returns True if DistributedOptimizer, LocalSGD or DiLoCo has wrapped the optimizer."""
    return hook_of(optimizer) is not None


def num_reductions(optimizer: Any) -> int:
    """Returns how many reductions this optimizer has run on this rank, counted in the graph.

    0 for a plain optimizer.
    """
    hook = hook_of(optimizer)
    return int(hook.reducer.count.numpy()) if hook else 0


def sent_bytes(optimizer: Any) -> int:
    """Returns the bytes that this rank sends in a reduction.

    0 for a plain optimizer, and before the first step is traced.
    """
    hook = hook_of(optimizer)
    return round(hook.reducer.sent_bytes) if hook else 0


def divide_losses(optimizer: Any) -> None:
    """Makes the optimizer divide the loss instead of all gradients: see Reducer.divide_losses.

    Only for a model whose step passes its loss through scale_loss exactly once, as Keras's own step
    does. Has no effect on a LossScaleOptimizer.
    """
    hook = hook_of(optimizer)
    if hook and not isinstance(optimizer, LossScaleOptimizer):
        hook.reducer.divide_losses()


def ranks_at_fault(optimizer: Any) -> list[int]:
    """Returns the ranks whose own gradients were not finite, after a step failed with NOT_FINITE."""
    hook = hook_of(optimizer)
    if not hook or not hook.finite_check:
        return []
    return np.flatnonzero(hook.finite_check.at_fault.numpy()).tolist()


def gradient_norm(optimizer: Any) -> float | None:
    """Returns the norm of the last step's mean gradient, before clipping.

    It includes only this rank's rows of sharded tables. None if it is not measured: without
    check_finite, or if ranks step on their own gradients.
    """
    hook = hook_of(optimizer)
    if not hook or not hook.finite_check or hook.averages_weights:
        return None
    return hook.finite_check.norm


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Loads a model as Keras does, and wraps its optimizer in DistributedOptimizer.

    The optimizer's slots and iterations are kept, and the model has jit_compile=False. A model that was
    saved without an optimizer stays without one.

    Args:
        filepath: a file that keras.models.load_model reads: .keras, .h5 or .hdf5.
        custom_optimizers: your own optimizer classes.
        custom_objects: as in Keras; as in Horovod's examples, a value may also be a function that makes
            an optimizer from its configuration.
        compression: as in DistributedOptimizer.
        legacy_opts: for compatibility with Horovod; must be False.

    Raises:
        ValueError: for legacy_opts=True (Keras 3 has no legacy optimizers), and, as Keras does, for
            a file that holds code, such as a Lambda layer's, unless
            keras.config.enable_unsafe_deserialization() was called.
    """
    if legacy_opts:
        raise ValueError(
            "legacy_opts=True asks for tf.keras.optimizers.legacy, which Keras 3 does not have; leave it out"
        )
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    for name, factory in (custom_objects or {}).items():
        objects[name] = _as_class(name, factory)
    model = keras.models.load_model(filepath, custom_objects=objects)

    if model.optimizer is None:
        return model

    # Keras chooses XLA when it compiles a model on a GPU, and saves that choice with the model.
    model.jit_compile = False
    if Path(filepath).suffix in (".h5", ".hdf5"):
        model.optimizer = _h5_optimizer(model, filepath)
    if not is_distributed(model.optimizer):
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _as_class(name: str, factory: Any) -> Any:
    """Wraps a function that makes an optimizer in a class with the from_config that Keras calls.

    A function under its own name, such as a loss, is returned unchanged, since Keras accepts functions.
    """
    if not isinstance(factory, FunctionType) or factory.__name__ == name:
        return factory

    class OptimizerClass:
        from_config = staticmethod(lambda config: factory(**config))

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return factory(*args, **kwargs)

    return OptimizerClass


def _h5_optimizer(model: keras.Model, path: str | Path) -> Optimizer:
    """Restores an optimizer from an .h5 file, with its slots if it has taken a step.

    Keras 3.15 drops the slots, because it builds the optimizer for an empty list of variables (legacy_h5_format.py).
    """
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    with h5py.File(path) as file:
        group = file.get("optimizer_weights")
        if group:
            # Keras splits a long list of names over several attributes.
            names = load_attributes_from_hdf5_group(group, "weight_names")
            if len(names) > len(optimizer.variables):
                optimizer.build(model.trainable_variables)
            # Not set_weights, which would leave out the variables inside a LossScaleOptimizer.
            for variable, name in zip(optimizer.variables, names, strict=True):
                variable.assign(group[name][()])
    return optimizer
