"""train.rates: parts of the model that learn at another rate."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvtrain.errors import ConfigError
from hvtrain.models.parts import find


def factors_of(model: keras.Model, rates: Mapping[str, float] | None) -> list[float]:
    """The factor of each trainable variable; of several patterns that match it the last one counts.

    Raises ConfigError for a pattern that matches none.
    """
    factors = {
        id(variable): float(factor)
        for pattern, factor in (rates or {}).items()
        for variable in find(model, pattern, "train.rates")
    }
    return [factors.get(id(variable), 1.0) for variable in model.trainable_variables]


def multiply_rates(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], by: Sequence[float]) -> None:
    """Multiplies the learning rate of each variable by its factor, in place.

    A step of a Keras optimizer updates one variable after the other, each by the learning rate that it is given. So the
    rate is another one, which a factor on the gradient would not be: Adam's updates do not depend on it. Weight decay,
    which Keras multiplies by the learning rate too, follows. Raises ConfigError for an optimizer that steps otherwise.
    """
    if all(factor == 1 for factor in by):
        return
    inner = inner_of(optimizer)
    kind, names = overridden_steps(inner)
    if names:
        raise ConfigError(
            f"train.rates and {kind}, which overrides {names}, exclude each other; choose an optimizer that updates "
            "each variable in update_step"
        )
    index = inner._get_variable_index  # Not by the variable itself: parameter servers hold another one.
    factors = {index(variable): factor for variable, factor in zip(variables, by)}
    update_step, apply_weight_decay = inner.update_step, inner._apply_weight_decay

    def update(gradient: Any, variable: Any, learning_rate: Any) -> Any:
        return update_step(gradient, variable, learning_rate * factors.get(index(variable), 1.0))

    def decay(variables: Any) -> None:
        groups = defaultdict(list)
        for variable in variables:
            groups[factors.get(index(variable), 1.0)].append(variable)
        whole = inner.weight_decay
        for factor, group in groups.items():
            inner.weight_decay = whole if whole is None else whole * factor
            apply_weight_decay(group)
        inner.weight_decay = whole

    inner.update_step, inner._apply_weight_decay = update, decay


def keep_averages(optimizer: keras.optimizers.Optimizer, momentum: float | None) -> None:
    """Makes an optimizer that is not built yet average the weights, which keep `momentum` of the average a step.

    None changes nothing. A step is one that changes weights: Keras by itself would average after each of the steps that
    only accumulate too. Raises ConfigError.
    """
    if momentum is None:
        return
    inner = inner_of(optimizer)
    if inner.use_ema:
        raise ConfigError(
            f"train.ema={momentum} and optimizer.use_ema exclude each other; leave optimizer.use_ema out: train.ema "
            "also validates the average"
        )
    kind, names = overridden_steps(inner)
    if names:
        raise ConfigError(
            f"train.ema={momentum} and {kind}, which overrides {names} and may not average; leave one out"
        )
    inner.use_ema, inner.ema_momentum = True, momentum
    if number := inner.gradient_accumulation_steps:
        average = inner._update_model_variables_moving_average

        def average_after_steps(variables: Any) -> None:
            is_step = (inner._iterations + 1) % number == 0
            keras.ops.cond(is_step, lambda: average(variables), lambda: None)

        inner._update_model_variables_moving_average = average_after_steps


@contextmanager
def averaged(model: keras.Model, momentum: float | None) -> Iterator[None]:
    """While it lasts, the model's weights are their averages; then they have the same bits as before.

    Without a momentum, and before the first step, nothing changes.
    """
    inner = inner_of(model.optimizer)
    if momentum is None or int(inner.iterations.numpy()) == 0:
        yield
        return
    variables = [variable.value for variable in inner._trainable_variables]
    raw = [tf.identity(variable) for variable in variables]
    for variable, average in zip(variables, inner._model_variables_moving_average):
        variable.assign(average)
    try:
        yield
    finally:
        for variable, value in zip(variables, raw):
            variable.assign(value)


def take_averages(model: keras.Model) -> None:
    """Sets the trained weights to their averages, if the optimizer keeps them."""
    model.optimizer.finalize_variable_values(model.trainable_variables)


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
