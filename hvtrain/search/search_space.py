"""The settings that a sweep searches, read from YAML and checked before anything starts. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hvtrain.config.compose import CONFIGS, own_folders
from hvtrain.config.validate import nearest
from hvtrain.errors import ConfigError, in_one_line

Number = int | float
_FORM = "write {low: 1, high: 9}, with log: true or a step if need be, or {choices: [a, b]}"


@dataclass(frozen=True)
class Setting:
    """One searched setting: numbers from low to high, both included and whole if both are, or some choices."""

    low: Number | None = None
    high: Number | None = None
    log: bool = False
    step: Number | None = None
    choices: tuple[Any, ...] = ()

    def example(self, at: int) -> Any:
        """One of its values; those at 0, 1, ... reach both ends and every choice."""
        return self.choices[at % len(self.choices)] if self.choices else (self.low, self.high)[at % 2]


@dataclass(frozen=True)
class SearchSpace:
    """The searched settings by name. place: the file that they are from."""

    place: Path
    settings: Mapping[str, Setting]

    def examples(self) -> list[dict[str, Any]]:
        """Values of all settings, which between them reach both ends and every choice of each."""
        number = max(2, *(len(one.choices) for one in self.settings.values()))
        return [{name: one.example(at) for name, one in self.settings.items()} for at in range(number)]

    def described(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        return json.loads(json.dumps({name: asdict(one) for name, one in self.settings.items()}))


def read_space(name: str, words: Sequence[str]) -> SearchSpace:
    """The space of sweep=NAME, in the folder sweep of conf or of --config-dir, or of a file. Raises ConfigError."""
    import yaml
    from omegaconf import OmegaConf

    path = _place(name, list(words))
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {in_one_line(error)}; fix the file") from error
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{path} names no setting; a line of it is NAME: {{low: 1, high: 9}} or {{choices: [a, b]}}")
    given = {str(key): value for key, value in tree.items()}
    return SearchSpace(path, {name: _setting(f"{path}: {name}", value) for name, value in given.items()})


def _place(name: str, words: list[str]) -> Path:
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ConfigError(f"sweep={name} does not exist; name a YAML file, or one of the folder sweep")
        return Path(name)
    known = {path.stem: path for folder in (CONFIGS, *own_folders(words)) for path in (folder / "sweep").glob("*.yaml")}
    if name not in known:
        raise ConfigError(f"sweep={name} is not a search space; {nearest(name, list(known))} (or name a YAML file)")
    return known[name]


def _setting(place: str, given: Any) -> Setting:
    known = [item.name for item in fields(Setting)]
    if not isinstance(given, dict):
        raise ConfigError(f"{place} is {given!r}, which is not what to search; {_FORM}")
    if unknown := next((key for key in given if key not in known), None):
        raise ConfigError(f"{place}: unknown key '{unknown}'; {nearest(str(unknown), known)}")
    return _of_choices(place, given) if "choices" in given else _range(place, given)


def _of_choices(place: str, given: Mapping[str, Any]) -> Setting:
    choices = given["choices"]
    if len(given) > 1 or not isinstance(choices, list) or not choices:
        raise ConfigError(f"{place} is {dict(given)}; {_FORM}")
    if bad := next((one for one in choices if not _is_plain(one)), None):
        raise ConfigError(f"{place}: {bad} is not a value, or a list of values; choose among these")
    return Setting(choices=tuple(choices))


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list) else value is None or isinstance(value, str | Number)


def _range(place: str, given: Mapping[str, Any]) -> Setting:
    numbers = {key: given[key] for key in ("low", "high", "step") if given.get(key) is not None}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Number) or not math.isfinite(value):
            raise ConfigError(f"{place}: {key} is {value!r}, which is not a number; {_FORM}")
    if not {"low", "high"} <= {*numbers} or not isinstance(given.get("log", False), bool):
        raise ConfigError(f"{place} is {dict(given)}; {_FORM}")
    found = Setting(numbers["low"], numbers["high"], given.get("log", False), numbers.get("step"))
    if numbers["low"] >= numbers["high"]:
        raise ConfigError(f"{place}: low {numbers['low']:g} is not below high {numbers['high']:g}; widen the range")
    if found.log and (numbers["low"] <= 0 or found.step):
        raise ConfigError(f"{place}: log needs a low above 0, and no step; change the range or leave out log")
    _check_step(place, numbers)
    return found


def _check_step(place: str, numbers: Mapping[str, Number]) -> None:
    low, high, step = numbers["low"], numbers["high"], numbers.get("step")
    if step is None:
        return
    if step <= 0 or abs((high - low) / step - round((high - low) / step)) > 1e-9:
        raise ConfigError(f"{place}: steps of {step:g} do not lead from {low:g} to {high:g}; change one of them")
    if isinstance(low, int) and isinstance(high, int) and not isinstance(step, int):
        raise ConfigError(f"{place}: whole numbers take no steps of {step:g}; write low as {low:.1f}")
