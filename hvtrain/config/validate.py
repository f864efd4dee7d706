"""Typed settings: declaration with range and help, validation, flattening, suggestions for misspelt names. Pure."""

import difflib
import math
import re
import types
import typing
from contextlib import suppress
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any

from hvtrain.errors import ConfigError
from hvtrain.system.secrets import redacted


def setting(default: Any, doc: str, *, low: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with a one-line description and a range; `low` is the lowest value allowed."""
    return field(default=default, metadata={"doc": doc, "low": low, "choices": choices})


def typed(schema: type, tree: Any, path: str = "") -> Any:
    """The tree as the dataclass `schema`, whose fields `setting` made; else ConfigError. path begins all names."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{path.rstrip('.')}={tree!r} is not a group of settings")
    known = {item.name: item for item in fields(schema)}
    for key in tree:
        if key not in known:
            raise ConfigError(f"unknown setting '{path}{key}'; {nearest(str(key), list(known))}")
    hints = typing.get_type_hints(schema)
    values = {
        name: typed(hints[name], tree[name], f"{path}{name}.")
        if is_dataclass(hints[name])
        else _value(f"{path}{name}", tree[name], hints[name], known[name].metadata)
        for name in known
        if name in tree
    }
    for item in fields(schema):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise ConfigError(f"no {item.name} was chosen; add {item.name}=NAME (--help lists the names)")
    return schema(**values)


def _value(name: str, value: Any, hint: Any, rule: Any) -> Any:
    """The value as its declared type, within its range; 3 is accepted as 3.0, but 3.5 is not accepted as 3."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    of_list = next((typing.get_args(option)[0] for option in options if typing.get_origin(option) is list), None)
    if isinstance(value, list) and of_list:
        return [_value(name, item, of_list, rule) for item in value]
    if isinstance(value, dict) and any(typing.get_origin(option) is dict for option in options):
        return value
    kind = next(option for option in options if option is not type(None))
    if typing.get_origin(kind) is dict:
        kind = dict
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        with suppress(OverflowError):
            value = float(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # As run.dir=2026 has it.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        or_null = " or null" if type(None) in options else ""
        raise ConfigError(f"{name}={redacted(value, name)} is not {expected.get(kind, 'a group of settings')}{or_null}")
    if rule.get("choices") and value not in rule["choices"]:
        raise ConfigError(f"{name}={value} is not one of {', '.join(rule['choices'])}")
    low = rule.get("low")
    if low is not None and not (low <= value < math.inf):
        raise ConfigError(f"{name}={value} is out of range; it must be at least {low}")
    return value


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested dictionary by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nearest(word: str, known: list[str]) -> str:
    """A suggestion for a misspelt name, or the list of known names."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"


def seconds(name: str, duration: str) -> float:
    """Seconds of a duration such as 1d2h, 11h50m or 90s. Raises ConfigError that names the setting.

    >>> seconds("time", "1h30m"), seconds("time", "90s")
    (5400.0, 90.0)
    """
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", duration)
    total = sum(float(part or 0) * unit for part, unit in zip(found.groups(), (86400, 3600, 60, 1))) if found else 0.0
    if total <= 0:
        raise ConfigError(f"{name}={duration} is not a duration; write it as 11h50m, 45m or 90s")
    return total
