"""train.ema: a moving average of the trained weights, which is validated and saved while training goes on without it.

Keras's optimizers keep it among their variables (use_ema), so checkpoints have it; at the end of the training it
becomes the weights. Moving statistics are averages already.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvtrain.errors import ConfigError
from hvtrain.models.inner_step import inner_of, overridden_steps


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
