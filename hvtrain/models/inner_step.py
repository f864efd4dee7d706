"""The optimizer that does the step, inside what is around it. Without Horovod, as plans are made."""

from typing import Any

import keras


def inner_of(optimizer: Any) -> Any:
    """The optimizer inside a LossScaleOptimizer, or itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def overridden_steps(optimizer: Any) -> tuple[str, str]:
    """The name of its class, and the methods of Keras's step that this overrides, in words; empty for none.

    Of a distributed optimizer that is the class that the user chose: the mixin comes first, see keras/hooks.py.
    """
    kind = type(optimizer).__bases__[1] if hasattr(optimizer, "_hvtrain") else type(optimizer)
    steps = ("apply", "apply_gradients", "_backend_apply_gradients")
    base = keras.optimizers.Optimizer
    return kind.__name__, ", ".join(name for name in steps if getattr(kind, name) is not getattr(base, name))
