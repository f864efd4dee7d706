"""Settings of any model, whatever builds it: its first weights, and which of its parts train. Pure.

They stand in the group `model`, beside the builder's own, which never gets them.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from hvtrain.config.validate import setting, typed
from hvtrain.errors import ConfigError


@dataclass
class ModelOptions:
    """The settings, by the names that they have in the group."""

    weights: str | None = setting(
        None, "begin with the weights of a .keras or .weights.h5 file, a run or a keras-hub preset"
    )
    weights_except: str | list[str] | None = setting(  # noqa: RUF009
        None, "layers or variables that stay new under model.weights, by name or path: [aspp*,decoder*]"
    )
    freeze: str | list[str] | None = setting(  # noqa: RUF009
        None, "layers or variables that do not train, by name or path: [conv*,*/bias]"
    )
    lora_rank: int | None = setting(
        None, "train the head, and two matrices of this rank for each dense or embedding kernel, alone", low=1
    )


NAMES = tuple(item.name for item in fields(ModelOptions))


def model_options(group: dict[str, Any]) -> ModelOptions:
    """The options of a group `model`. Raises ConfigError."""
    options: ModelOptions = typed(ModelOptions, {name: group[name] for name in NAMES if name in group}, "model.")
    for name in ("freeze", "weights_except"):
        if isinstance(patterns := getattr(options, name), str):
            setattr(options, name, [patterns])
    if options.weights_except and not options.weights:
        raise ConfigError("model.weights_except came without model.weights; name the source of the other weights there")
    return options


def of_builder(group: dict[str, Any], get: Callable[[str], Any]) -> dict[str, Any]:
    """The other settings of a group `model`, which are the builder's. get: imports what a dotted path names.

    Raises ConfigError if the builder has an argument of the same name.
    """
    arguments: set[str] = set()
    with suppress(Exception):  # To build it fails in the same way, and says why.
        arguments = set(inspect.signature(get(group["_target_"])).parameters)
    if taken := arguments.intersection(NAMES):
        name = min(taken)
        raise ConfigError(
            f"model._target_={group['_target_']} has an argument {name}, but model.{name} is a setting of every model, "
            "which builders do not get; rename the argument"
        )
    return {name: value for name, value in group.items() if name not in NAMES}


def check_rates(rates: dict[str, Any] | None) -> None:
    """Raises ConfigError unless every pattern of train.rates has a factor above 0."""
    for pattern, factor in (rates or {}).items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
            raise ConfigError(
                f"train.rates.{pattern}={factor} is not a factor above 0; model.freeze=[{pattern}] trains it not at all"
            )
