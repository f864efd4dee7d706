"""What kind of variable this is, of Keras or of TensorFlow."""

from typing import Any

import tensorflow as tf


def overwrites(variable: Any) -> bool:
    """True if Keras sets this variable to its gradient, as it does for float8 (`overwrite_with_gradient`)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def variable_id(variable: Any) -> int:
    """The same number for a Keras variable and for the TensorFlow variable inside it."""
    return id(variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable))


def is_seed(variable: Any) -> bool:
    """True for the state of a Keras seed generator."""
    return (getattr(variable, "path", None) or variable.name).partition(":")[0].endswith("seed_generator_state")


class VariableList(list[Any]):
    """A list that can be called as well: Keras 2, for which scripts of Horovod were written, had a method."""

    def __call__(self) -> list[Any]:
        return self
