"""Typed settings: declaration with range and help, validation, flattening, suggestions for misspelt names. Pure."""

import difflib
import math
import re
import types
import typing
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any

from hvtrain.errors import ConfigError
from hvtrain.system.secrets import redacted

# Names that other libraries use, with the last part of our settings' names.
SYNONYMS = {
    "lr": "learning_rate",
    "bs": "batch_size",
    "batch": "batch_size",
    "units": "hidden",
    "layers": "hidden",
}

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def setting(
    default: Any, doc: str, *, low: float | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """Returns a dataclass field with a one-line description and the values allowed.

    `low` is the lowest one; `choices` lists all of them, if they are few.
    """
    return field(default=default, metadata={"doc": doc, "low": low, "choices": choices})


def typed(schema: type, tree: Any, path: str = "") -> Any:
    """Checks a tree and returns it as the dataclass `schema`.

    Args:
        schema: A dataclass whose fields `setting` made.
        tree: A plain nested dictionary.
        path: The beginning of all names in messages, such as "model.".

    Raises:
        ConfigError: A name is unknown or missing, or a value has the wrong type or range.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"{path.rstrip('.')}={tree!r} is not a group of settings")
    known = {item.name: item for item in fields(schema)}
    for key in tree:
        if key not in known:
            name = f"{path}{key}"
            raise ConfigError(
                f"unknown setting '{name}'; {nearest(name, [f'{path}{item}' for item in known])}"
            )

    hints = typing.get_type_hints(schema)
    values = {}
    for name, item in known.items():
        if name in tree:
            if is_dataclass(hints[name]):
                values[name] = typed(hints[name], tree[name], f"{path}{name}.")
            else:
                values[name] = _value(f"{path}{name}", tree[name], hints[name], item.metadata)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"no {name} was chosen; add {name}=NAME (--help lists the names)")
    return schema(**values)


def _value(name: str, value: Any, hint: Any, rule: Any) -> Any:
    """Returns the value as its declared type, within its range.

    3 is accepted as 3.0, but 3.5 is not accepted as 3.
    """
    # By the class of their values: list[int] by list, for example.
    options = {typing.get_origin(option) or option: option for option in types_of(hint)}
    if value is None and type(None) in options:
        return None
    if isinstance(value, list) and list in options:
        (item_type,) = typing.get_args(options[list])
        return [_value(name, item, item_type, rule) for item in value]
    if isinstance(value, dict) and dict in options:
        return value

    # The first of several types is the one that messages name.
    expected = next(option for option in options if option is not type(None))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if expected is float and is_number:
        with suppress(OverflowError):
            value = float(value)
    if expected is str and is_number:
        value = str(value)  # As in run.dir=2026.
    # A bool is an int in Python, but not a number to a user.
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        needed = _TYPE_NAMES.get(expected, "a group of settings")
        or_null = " or null" if type(None) in options else ""
        raise ConfigError(f"{name}={redacted(value, name)} is not {needed}{or_null}")

    choices = rule.get("choices")
    if choices:
        check_choice(name, value, choices)
    low = rule.get("low")
    if low is not None:
        check_least(name, value, low)
    return value


def types_of(hint: Any) -> tuple[Any, ...]:
    """Returns the types that a setting may have, None's among them."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raises ConfigError unless the setting `name` has one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}={value} is not one of {', '.join(choices)}")


def check_least(name: str, value: float, low: float) -> None:
    """Raises ConfigError unless the setting `name` is a finite number of at least `low`."""
    # Written so that it also refuses NaN, for which every comparison is false.
    if not low <= value < math.inf:
        raise ConfigError(f"{name}={value} is out of range; it must be at least {low}")


def nearest(name: str, known: Sequence[str]) -> str:
    """Suggests the known name that a wrong one stands for, or lists all known names."""
    match = closest(name, known)
    if match:
        return f"did you mean '{match}'?"
    return f"known: {', '.join(sorted(known))}"


def closest(name: str, known: Sequence[str]) -> str | None:
    """Returns the known name that a misspelt one, or one of another library, stands for.

    None if no name is similar.

    >>> closest("lr", ["train.epochs", "optimizer.learning_rate"]), closest("optimizer.lr", ["optimizer.rho"])
    ('optimizer.learning_rate', None)
    """
    last = name.lower().rpartition(".")[2]
    # Names are compared without their group: equal groups would make different settings look similar.
    by_last = defaultdict(list)
    for other in known:
        by_last[other.lower().rpartition(".")[2]].append(other)
    for meant in (SYNONYMS.get(last, last), last):
        matches = difflib.get_close_matches(meant, by_last, n=1)
        if matches:
            return difflib.get_close_matches(name, by_last[matches[0]], n=1, cutoff=0)[0]
    return None


def seconds(name: str, duration: str) -> float:
    """Converts a duration such as 1d2h, 11h50m or 90s. Raises ConfigError that names the setting.

    >>> seconds("time", "1h30m"), seconds("time", "90s")
    (5400.0, 90.0)
    """
    # Each unit at most once, the largest first; only seconds have a fraction.
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", duration)
    total = 0.0
    if match:
        for number, unit in zip(match.groups(), (86400, 3600, 60, 1)):
            total += float(number or 0) * unit
    if total <= 0:
        raise ConfigError(f"{name}={duration} is not a duration; write it as 11h50m, 45m or 90s")
    return total
