"""train.rates: parts of the model that learn at another rate."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvtrain.errors import ConfigError
from hvtrain.models.inner_step import inner_of, overridden_steps
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
