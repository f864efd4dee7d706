"""Facts: what a data set and a task know of themselves, by name, for builders that declare them as arguments."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hvtrain.errors import ConfigError

ALWAYS = ("image_shape", "num_classes")
"""Given to a builder that takes any keyword and declares no fact."""


def declared(
    builder: Callable[..., Any], settings: Collection[str], facts: Mapping[str, Any], name: str, giver: str
) -> dict[str, Any]:
    """The facts that the builder declares as arguments.

    Raises ConfigError for an argument that has no default, no setting and no fact.

    Args:
        settings: names of the arguments that the user has set.
        name: of the builder, to begin the message.
        giver: of the data set that has the facts.
    """
    function = getattr(builder, "__init__", builder) if inspect.isclass(builder) else builder
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # Some built-in functions have no signature.
        return {name: facts[name] for name in ALWAYS if name in facts}
    parameters = parameters[1:] if inspect.isclass(builder) else parameters
    found: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name in facts and parameter.name not in settings:
            found[parameter.name] = facts[parameter.name]
        elif (
            parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.name not in settings
        ):
            raise ConfigError(
                f"{name} needs {parameter.name}, which is no setting of it and which the data set {giver} does not "
                f"give (it gives {', '.join(facts)}); set it, or choose another data set"
            )
    if not found and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return {name: facts[name] for name in ALWAYS if name in facts}
    return found
