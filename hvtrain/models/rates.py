"""Implements train.rates, train.weight_decay and train.ema, which extend the step of a Keras optimizer.

With train.ema, the moving average of the weights is validated and saved, while training continues
from the weights themselves. It is among the variables of Keras's optimizer (use_ema), so checkpoints
include it, and at the end of training it replaces the weights. Moving statistics are not averaged:
they are averages already.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from hvtrain.errors import ConfigError
from hvtrain.models.parts import find_variables
from hvtrain.step.joint_loss import overridden_steps


def factors_of(model: keras.Model, rates: Mapping[str, float] | None) -> list[float]:
    """Returns the learning-rate factor of each trainable variable, in the order of model.trainable_variables.

    If several patterns match a variable, the last one wins. Raises ConfigError for a pattern that
    matches nothing trainable.
    """
    factors: dict[int, float] = {}
    for pattern, factor in (rates or {}).items():
        factors |= dict.fromkeys(find_variables(model, [pattern], "train.rates"), float(factor))
    return [factors.get(id(variable), 1.0) for variable in model.trainable_variables]


def multiply_rates(
    optimizer: Optimizer, variables: Sequence[Any], factors: Sequence[float]
) -> None:
    """Multiplies the learning rate of each variable by its factor, changing the optimizer in place.

    A Keras optimizer updates one variable after another, and passes the learning rate to each update;
    the rate itself is scaled there. A factor on the gradient would have no effect with Adam. Weight
    decay, which Keras also multiplies by the learning rate, is scaled as well.

    Args:
        optimizer: a Keras optimizer.
        variables: the trainable variables.
        factors: their factors, in the same order.

    Raises:
        ConfigError: the optimizer overrides Keras's step.
    """
    if all(factor == 1 for factor in factors):
        return
    inner = _plain_steps(optimizer, "train.rates")
    # Keyed by index, not identity, since with parameter servers the variables are other objects.
    index_of = inner._get_variable_index
    factor_of = {index_of(variable): factor for variable, factor in zip(variables, factors)}
    update_step = inner.update_step
    apply_weight_decay = inner._apply_weight_decay

    def update(gradient, variable, learning_rate):
        factor = factor_of.get(index_of(variable), 1.0)
        return update_step(gradient, variable, learning_rate * factor)

    def decay(variables):
        # Keras reads weight_decay once per call.
        weight_decay = inner.weight_decay
        for variable in variables:
            factor = factor_of.get(index_of(variable), 1.0)
            inner.weight_decay = weight_decay and weight_decay * factor
            apply_weight_decay([variable])
        inner.weight_decay = weight_decay

    inner.update_step = update
    inner._apply_weight_decay = decay


def decay_kernels(optimizer: Optimizer, weight_decay: float) -> None:
    """Makes an optimizer add weight_decay times each kernel to the kernel's gradient, in place.

    This is the weight decay of the ResNet paper and many others, and of PyTorch's SGD; it passes
    through the momentum. Keras's optimizer.weight_decay is instead subtracted from the weights
    themselves (Loshchilov and Hutter 2017); in SGD with a momentum of 0.9 that decays a tenth as
    much. A regularizer would have the same gradient, but would be part of every reported loss.

    Args:
        optimizer: a Keras optimizer. Kernels are its variables with two or more axes; biases and the
            parameters of normalization have one, and do not decay.
        weight_decay: the factor; 0 changes nothing.

    Raises:
        ConfigError: the optimizer overrides Keras's step.
    """
    if not weight_decay:
        return
    inner = _plain_steps(optimizer, f"train.weight_decay={weight_decay}")
    update_step = inner.update_step

    def update(gradient, variable, learning_rate):
        if len(variable.shape) > 1:
            # The sparse gradient of an embedding becomes dense, because all rows decay.
            gradient = tf.convert_to_tensor(gradient) + weight_decay * variable
        return update_step(gradient, variable, learning_rate)

    inner.update_step = update


def keep_averages(optimizer: Optimizer, momentum: float | None) -> None:
    """Makes an optimizer that is not built yet keep a moving average of the weights.

    Args:
        optimizer: a Keras optimizer without variables yet.
        momentum: the share of itself that the average keeps in each step that changes weights; None
            changes nothing.

    Raises:
        ConfigError: the optimizer averages weights already, or overrides Keras's step.
    """
    if momentum is None:
        return
    inner = _plain_steps(optimizer, f"train.ema={momentum}")
    if inner.use_ema:
        raise ConfigError(
            f"train.ema={momentum} and optimizer.use_ema exclude each other; leave "
            "optimizer.use_ema out: train.ema also validates the average"
        )
    inner.use_ema = True
    inner.ema_momentum = momentum

    # Keras would also average after steps that only accumulate gradients.
    accumulate = inner.gradient_accumulation_steps
    if accumulate:
        average = inner._update_model_variables_moving_average

        def average_after_steps(variables):
            changes_weights = (inner._iterations + 1) % accumulate == 0
            keras.ops.cond(changes_weights, lambda: average(variables), lambda: None)

        inner._update_model_variables_moving_average = average_after_steps


@contextmanager
def averaged(model: keras.Model, momentum: float | None) -> Iterator[None]:
    """Sets the model's weights to their averages within the block, and restores them exactly.

    Does nothing if `momentum` is None or no step has been taken.
    """
    inner = _inner(model.optimizer)
    # Keras's averages are zeros before the first step.
    if momentum is None or int(inner.iterations.numpy()) == 0:
        yield
        return
    variables = [variable.value for variable in inner._trainable_variables]
    # Copied on the device, where the weights are.
    weights = [tf.identity(variable) for variable in variables]
    for variable, average in zip(variables, inner._model_variables_moving_average):
        variable.assign(average)
    try:
        yield
    finally:
        for variable, weight in zip(variables, weights):
            variable.assign(weight)


def take_averages(model: keras.Model) -> None:
    """Sets the trained weights to their averages, if the optimizer keeps them."""
    model.optimizer.finalize_variable_values(model.trainable_variables)


def _inner(optimizer):
    """Returns the optimizer inside a LossScaleOptimizer, or the optimizer itself if it is not one."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _plain_steps(optimizer, setting: str):
    """Returns the inner optimizer. Raises ConfigError if it overrides Keras's step."""
    inner = _inner(optimizer)
    # A distributed optimizer's class has two bases: a mixin, and the class that the user chose.
    kind = type(inner).__bases__[1] if hasattr(inner, "_hvtrain") else type(inner)
    overridden = overridden_steps(kind)
    if overridden:
        raise ConfigError(
            f"{setting} and {kind.__name__}, which overrides {', '.join(overridden)}, exclude each other; choose an "
            "optimizer that updates each variable in update_step"
        )
    return inner
