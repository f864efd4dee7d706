"""Typed settings: declaration with range and help, validation, and suggestions for misspelt names. Pure."""

import difflib
import numbers
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, TypeGuard

from hvtrain.errors import ConfigError
from hvtrain.system.secrets import redacted

# Other libraries' names for settings, each with ours, the best first. Which of ours a run has
# depends on its model, data set and so on.
SYNONYMS = {
    name: ours.split()
    for names, ours in {
        "lr": "learning_rate",
        "bs batch": "batch_size",
        "layers num_layers depth": "model.hidden model.blocks model.blocks_per_stage",
        "units hidden hidden_units hidden_size": "model.hidden model.top model.width",
        "path file data_dir": "dataset.dir dataset.file",
        "dir": "run.dir dataset.dir dataset.file",
    }.items()
    for name in names.split()
}

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def setting(
    default: Any, doc: str, *, low: float | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """Declares a setting: a dataclass field with a one-line description and its allowed values.

    Args:
        default: The default value.
        doc: The description, for --help.
        low: The lowest number allowed.
        choices: The strings allowed; empty: any.
    """
    return field(default=default, metadata={"doc": doc, "low": low, "choices": choices})


def typed(schema: type, tree: Any, path: str = "") -> Any:
    """Validates a nested dictionary and returns it as an instance of the dataclass `schema`.

    Args:
        schema: A dataclass whose fields are declared with `setting`.
        tree: A plain nested dictionary.
        path: A prefix for names in messages, such as "model.".

    Raises:
        ConfigError: A name is unknown or missing, or a value has the wrong type or is out of range.
    """
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path.rstrip('.')}={tree!r} is not a group of settings; write {path}NAME=VALUE for each"
        )
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


def _value(name: str, value, hint, rule):
    """Returns the value in its declared type, after checking its range.

    3 is accepted for a float, but 3.5 is refused for an int.
    """
    # Keyed by the class to check with isinstance: list[int] by list, for example.
    options = {typing.get_origin(option) or option: option for option in types_of(hint)}
    if value is None and type(None) in options:
        return None
    if isinstance(value, list) and list in options:
        (item_type,) = typing.get_args(options[list])
        return [_value(name, item, item_type, rule) for item in value]
    if isinstance(value, dict) and dict in options:
        return value

    # Apart from null, lists and dictionaries, only the first type is accepted.
    expected = next(option for option in options if option is not type(None))
    if expected is float and is_number(value):
        with suppress(OverflowError):
            value = float(value)
    if expected is str and is_number(value):
        value = str(value)  # As in run.dir=2026.
    # In Python a bool is an int; true is still refused where a number is needed.
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        or_null = " or null" if type(None) in options else ""
        raise ConfigError(
            f"{name}={redacted(value, name)} is not {_TYPE_NAMES.get(expected, 'a group of settings')}{or_null}"
        )

    choices = rule.get("choices")
    if choices:
        check_choice(name, value, choices)
    low = rule.get("low")
    if low is not None:
        check_least(name, value, low)
    return value


def is_number(value: Any) -> TypeGuard[float]:
    """True for an int or a float, but not for a bool, which Python counts as an int."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def types_of(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a type hint: all types of a union, NoneType included, or the hint alone."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raises ConfigError unless the value of the setting `name` is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}={value} is not one of {', '.join(choices)}")


def check_least(name: str, value: float, low: float) -> None:
    """Raises ConfigError unless the value of the setting `name` is a number of at least `low` and below 2**63."""
    # Written as a chain so that NaN, for which every comparison is false, is refused too. The upper
    # bound is that of int64, which integers become.
    if not (isinstance(value, numbers.Real) and low <= value < 2**63):
        raise ConfigError(f"{name}={value} is out of range; it must be at least {low}")


def check_whole(name: str, value: Any, low: int) -> None:
    """Raises ConfigError unless the value of the setting `name` is an int of at least `low` and below 2**63."""
    # The upper bound is that of int64, which integers become.
    if type(value) is not int or not low <= value < 2**63:
        raise ConfigError(f"{name}={value} is not a whole number of at least {low}")


def nearest(name: str, known: Sequence[str]) -> str:
    """Returns advice on an unknown name: the known name that is probably meant, or a list of all known names."""
    match = closest(name, known)
    if match:
        return f"did you mean '{match}'?"
    return f"known: {', '.join(sorted(known))}"


def closest(name: str, known: Sequence[str]) -> str | None:
    """Returns the known name that is meant by a misspelt name or another library's; None if no name is similar.

    >>> closest("lr", ["train.epochs", "optimizer.learning_rate"]), closest("optimizer.lr", ["optimizer.rho"])
    ('optimizer.learning_rate', None)
    """
    # Compares names without their group first: a shared group would make
    # different settings look similar.
    similar = difflib.get_close_matches(_last_part(name), [*map(_last_part, known)], n=1)
    return same_meaning(name, known, similar)


def same_meaning(name: str, known: Sequence[str], similar: Sequence[str] = ()) -> str | None:
    """Returns the known name whose last part is that of `name`, a synonym of it, or one of `similar`."""
    last = _last_part(name)
    for ending in [*SYNONYMS.get(last, [last]), *similar]:
        matches = [other for other in known if f".{other.lower()}".endswith(f".{ending}")]
        if matches:
            return difflib.get_close_matches(name, matches, n=1, cutoff=0)[0]
    return None


def _last_part(name: str) -> str:
    return name.lower().rpartition(".")[2]


def parse_duration(name: str, duration: str) -> float:
    """Converts a duration such as 1d2h, 11h50m or 90s to seconds. Raises a ConfigError that names the setting.

    >>> parse_duration("time", "1h30m"), parse_duration("time", "90s")
    (5400.0, 90.0)
    """
    # Each unit may occur once, the largest first; only seconds may have a fraction.
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", duration)
    total = 0.0
    if match:
        for number, unit in zip(match.groups(), (86400, 3600, 60, 1)):
            total += float(number or 0) * unit
    if total <= 0:
        raise ConfigError(f"{name}={duration} is not a duration; write it as 11h50m, 45m or 90s")
    return total


def check_mapping(setting: str, value: object, example: str) -> None:
    """Raises ConfigError unless the value of a setting is a mapping or None; `example` is one in YAML."""
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{setting}={value} is not a mapping; write one such as {example}")
