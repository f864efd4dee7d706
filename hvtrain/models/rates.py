"""Implements train.rates, train.weight_decay and train.ema, which extend a Keras optimizer's step.

With train.ema, the moving average of the weights is validated and saved, while training continues
from the weights themselves. The average is kept in variables of the Keras optimizer (use_ema), so
checkpoints include it; at the end of training it replaces the weights. Moving statistics are not
averaged: they are averages already.
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

# Attributes of Keras's optimizers. Muon has the second, for the variables that it leaves to Adam.
WEIGHT_DECAYS = ("weight_decay", "adam_weight_decay")


def factors_of(model: keras.Model, rates: Mapping[str, float] | None) -> list[float]:
    """Returns the learning-rate factors of model.trainable_variables, in their order; 1 by default.

    Args:
        model: the model.
        rates: factors by pattern (see find_variables). The last match of a variable wins.

    Raises:
        ConfigError: a pattern matches nothing trainable.
    """
    factors: dict[int, float] = {}
    for pattern, factor in (rates or {}).items():
        matched_ids = find_variables(model, [pattern], "train.rates")
        factors |= dict.fromkeys(matched_ids, float(factor))
    return [factors.get(id(variable), 1.0) for variable in model.trainable_variables]


def multiply_rates(
    optimizer: Optimizer, variables: Sequence[Any], factors: Sequence[float]
) -> None:
    """Multiplies the learning rate of each variable by its factor, changing the optimizer in place.

    A Keras optimizer updates variables one by one and passes the learning rate to each update. The
    factor is applied there, because Adam would cancel a factor on the gradient. Weight decay, which
    Keras also multiplies by the learning rate, is scaled as well.

    Args:
        optimizer: a Keras optimizer.
        variables: the trainable variables.
        factors: their factors, in the same order.

    Raises:
        ConfigError: the optimizer overrides methods of Keras's step.
    """
    if all(factor == 1 for factor in factors):
        return
    inner = _checked_inner_optimizer(optimizer, "train.rates")
    # Keyed by index, since with parameter servers the variables in a step are different objects.
    index_of = inner._get_variable_index
    factor_of = {index_of(variable): factor for variable, factor in zip(variables, factors)}
    update_step = inner.update_step
    apply_weight_decay = inner._apply_weight_decay
    # Read here, not in `decay`: replicas of tf.distribute run `decay` in turns, and one would read
    # another's product.
    # An attribute is None if the optimizer does not decay weights.
    decays = {name: getattr(inner, name) for name in WEIGHT_DECAYS if getattr(inner, name, None)}

    def update(gradient, variable, learning_rate):
        factor = factor_of.get(index_of(variable), 1.0)
        return update_step(gradient, variable, learning_rate * factor)

    def decay(variables):
        # Keras reads weight_decay once per call, so each variable gets a call of its own.
        for variable in variables:
            set_decays(factor_of.get(index_of(variable), 1.0))
            apply_weight_decay([variable])
        set_decays(1.0)

    def set_decays(factor):
        for name, value in decays.items():
            setattr(inner, name, value * factor)

    inner.update_step = update
    inner._apply_weight_decay = decay


def decay_kernels(optimizer: Optimizer, weight_decay: float) -> None:
    """Makes an optimizer add weight_decay x kernel to the gradient of each kernel, changing it in place.

    This is the weight decay of PyTorch's SGD and of many papers, such as that on ResNet; it passes
    through the momentum. Keras's optimizer.weight_decay instead decays the weights themselves
    (Loshchilov and Hutter 2017); in SGD with a momentum of 0.9, that decays a tenth as much. A
    regularizer would have the same gradient but would be part of every reported loss.

    Args:
        optimizer: a Keras optimizer. Kernels are its variables with two or more axes. Biases and
            parameters of normalization layers have one axis, and do not decay.
        weight_decay: the factor; 0 changes nothing.

    Raises:
        ConfigError: the optimizer overrides methods of Keras's step.
    """
    if not weight_decay:
        return
    inner = _checked_inner_optimizer(optimizer, f"train.weight_decay={weight_decay}")
    update_step = inner.update_step

    def update(gradient, variable, learning_rate):
        if len(variable.shape) > 1:
            # The sparse gradient of an embedding becomes dense, because all rows decay.
            gradient = tf.convert_to_tensor(gradient) + weight_decay * variable
        return update_step(gradient, variable, learning_rate)

    inner.update_step = update


def keep_averages(optimizer: Optimizer, momentum: float | None) -> None:
    """Makes an optimizer keep a moving average of the weights, changing it in place.

    Args:
        optimizer: a Keras optimizer that is not built yet.
        momentum: the weight of the old average, in each step that changes the weights:
            average = momentum * average + (1 - momentum) * weights. None changes nothing.

    Raises:
        ConfigError: the optimizer already averages weights, or overrides methods of Keras's step.
    """
    if momentum is None:
        return
    inner = _checked_inner_optimizer(optimizer, f"train.ema={momentum}")
    if inner.use_ema:
        raise ConfigError(
            f"train.ema={momentum} and optimizer.use_ema exclude each other; leave "
            "optimizer.use_ema out: train.ema also validates the average"
        )
    inner.use_ema = True
    inner.ema_momentum = momentum

    # Keras's averages are zeros before the first step. A loss scale may skip all steps of a short run.
    use_averages = inner.finalize_variable_values

    def use_averages_after_a_step(variables):
        if inner.iterations.numpy():
            use_averages(variables)

    inner.finalize_variable_values = use_averages_after_a_step

    # Keras would also average after steps that only accumulate gradients.
    accumulation_steps = inner.gradient_accumulation_steps
    if accumulation_steps:
        average = inner._update_model_variables_moving_average

        def average_after_steps(variables):
            changes_weights = (inner._iterations + 1) % accumulation_steps == 0
            keras.ops.cond(changes_weights, lambda: average(variables), lambda: None)

        inner._update_model_variables_moving_average = average_after_steps


@contextmanager
def averaged_weights(model: keras.Model, momentum: float | None) -> Iterator[None]:
    """Sets the model's weights to their averages within the block, then restores them exactly.

    Does nothing if `momentum` is None or no step has changed the weights.
    """
    if momentum is None:
        yield
        return
    inner = _inner_optimizer(model.optimizer)
    variables = [variable.value for variable in inner._trainable_variables]
    # The copies stay on the device of the weights.
    weights = [tf.identity(variable) for variable in variables]
    inner.finalize_variable_values(inner._trainable_variables)
    try:
        yield
    finally:
        for variable, weight in zip(variables, weights):
            variable.assign(weight)


def _inner_optimizer(optimizer):
    """Returns the optimizer inside a LossScaleOptimizer; any other optimizer is returned unchanged."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _checked_inner_optimizer(optimizer, setting: str):
    """Returns the inner optimizer. Raises ConfigError if it overrides methods of Keras's step."""
    inner = _inner_optimizer(optimizer)
    optimizer_class = type(inner)
    if hasattr(inner, "_hvtrain"):
        # A distributed optimizer's class has two bases: a mixin, and the class that the user chose.
        optimizer_class = optimizer_class.__bases__[1]
    overridden = overridden_steps(optimizer_class)
    if overridden:
        raise ConfigError(
            f"{setting} and {optimizer_class.__name__}, which overrides {', '.join(overridden)}, "
            "exclude each other; choose an optimizer that updates each variable in update_step"
        )
    return inner
