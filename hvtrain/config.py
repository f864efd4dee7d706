"""The typed schema of a run; every rule about a single value is checked here. Pure.

`__main__` turns Hydra's composed tree into a RunConfig with `from_dict`; no other module sees the tree.
The groups model, dataset, optimizer, schedule and strategy stay open dictionaries with a `_target_`,
so that anything a user's own package offers can come in by YAML alone.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from typing import Any

from hvtrain.errors import ConfigError

GROUPS = ("model", "dataset", "optimizer", "schedule", "strategy")
UNEVEN = ("trim", "pad", "error")


def setting(default: Any, doc: str, *, low: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field with its one-line description and its range; `low` is the lowest value allowed."""
    return field(default=default, metadata={"doc": doc, "low": low, "choices": choices})


@dataclass
class TrainConfig:
    """How long and how to train."""

    epochs: int = setting(12, "passes over the training data", low=1)
    steps: int | None = setting(None, "total optimizer steps; where it is set, epochs does not count", low=1)
    divide_steps_by_size: bool = setting(False, "divide train.steps by the number of ranks (same samples seen)")
    batch_size: int | list[int] = setting(  # noqa: RUF009
        32, "training examples a step of one rank; a list: one for each rank, or each host, of unlike speed", low=1
    )
    evaluation_batch_size: int = setting(256, "examples a step of one rank in validation and test", low=1)
    learning_rate_scale: str = setting(
        "linear", "peak = base x size, base x sqrt(size), or base", choices=("linear", "sqrt", "none")
    )
    validate_every_epochs: int | None = setting(1, "validate after every N epochs; null: not by epochs", low=1)
    validate_every_steps: int | None = setting(None, "validate after every N steps too", low=1)
    max_time: str | None = setting(None, "stop after this time (11h50m, 90s), saved, to go on later")
    precision: str = setting("float32", "Keras's dtype policy", choices=("float32", "mixed_bfloat16", "mixed_float16"))
    deterministic: bool = setting(False, "TensorFlow's deterministic operations: same run, same bits (slower)")
    jit_compile: bool = setting(False, "compile the step with XLA (only where nothing is reduced: one process)")


@dataclass
class RunFolderConfig:
    """Where the results lie."""

    dir: str | None = setting(None, "run folder; default: runs/DATE_TIME-MODEL-DATASET, the same on all ranks")


@dataclass
class CheckpointConfig:
    """When rank 0 writes checkpoints and which of them it keeps."""

    every_epochs: int | None = setting(1, "after every N epochs; null: not by epochs", low=1)
    every_steps: int | None = setting(None, "after every N steps too", low=1)
    every_minutes: float | None = setting(None, "after every N minutes of training too", low=0.001)
    keep: int = setting(2, "newest checkpoints kept, besides the best one", low=1)
    best: str = setting("val_accuracy", "metric whose best checkpoint is kept (lower is better for a loss)")


@dataclass
class GuardConfig:
    """What is proved while training; `guard.every=0 guard.finite=false guard.batches=false` turns all of it off."""

    every: int = setting(500, "compare all ranks' weights and slots after every N steps; 0: never", low=0)
    finite: bool = setting(True, "stop all ranks before a gradient that is not finite reaches the weights")
    batches: bool = setting(True, "refuse two ranks that read the same first batch")


@dataclass
class RunConfig:
    """A whole run, as the runner is given it."""

    model: dict[str, Any] = field(metadata={"doc": "a model builder"})
    dataset: dict[str, Any] = field(metadata={"doc": "a data source"})
    optimizer: dict[str, Any] = field(metadata={"doc": "a Keras optimizer; its learning_rate is for one rank"})
    schedule: dict[str, Any] = field(metadata={"doc": "the learning rate over the steps"})
    strategy: dict[str, Any] = field(metadata={"doc": "how ranks work together"})
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunFolderConfig = field(default_factory=RunFolderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    callbacks: dict[str, Any] = field(default_factory=dict, metadata={"doc": "more Keras callbacks"})
    resume: str = setting(
        "auto",
        "go on from the newest valid checkpoint in run.dir, or never",
        choices=("auto", "never"),
    )
    seed: int = setting(1, "seed of weights, shuffling and augmentation", low=0)
    verbose: bool = setting(False, "show the notes of TensorFlow, CUDA and oneDNN")
    debug: bool = setting(False, "show tracebacks for errors in the input too")


def from_dict(tree: dict[str, Any]) -> RunConfig:
    """The checked RunConfig of a plain nested dictionary.

    Raises ConfigError, whose message names the setting, what it was, and what it may be.
    """
    config: RunConfig = typed(RunConfig, tree)
    for group in GROUPS:
        _check_group(group, getattr(config, group))
    for name, callback in config.callbacks.items():
        _check_group(f"callbacks.{name}", callback if isinstance(callback, dict) else {})
    config.optimizer["learning_rate"] = _base_learning_rate(config.optimizer)
    config.dataset = {"uneven": UNEVEN[0], **config.dataset}
    if config.dataset["uneven"] not in UNEVEN:
        raise ConfigError(f"dataset.uneven={config.dataset['uneven']} is not one of {', '.join(UNEVEN)}")
    if config.train.max_time is not None:
        seconds(config.train.max_time)
    return config


def default_run_dir(config: RunConfig) -> str:
    """runs/DATE_TIME-MODEL-DATASET, of now; where run.dir is not set."""
    names = [str(group["_target_"]).split(".")[-1] for group in (config.model, config.dataset)]
    return "/".join(["runs", "-".join([datetime.now().strftime("%Y-%m-%d_%H-%M-%S"), *names])])


def seconds(duration: str) -> float:
    """Seconds of a duration such as 1d2h, 11h50m or 90s. Raises ConfigError.

    >>> seconds("1h30m"), seconds("90s")
    (5400.0, 90.0)
    """
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", duration)
    total = sum(float(part or 0) * unit for part, unit in zip(found.groups(), (86400, 3600, 60, 1))) if found else 0.0
    if total <= 0:
        raise ConfigError(f"train.max_time={duration} is no duration; write it as 11h50m, 45m or 90s")
    return total


def to_dict(config: Any) -> dict[str, Any]:
    """The plain nested dictionary of a RunConfig (or a section of one), for records and checkpoints."""
    return {
        item.name: to_dict(value) if is_dataclass(value := getattr(config, item.name)) else value
        for item in fields(config)
    }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names and their values.

    >>> flatten({"train": {"epochs": 3}, "seed": 1})
    {'train.epochs': 3, 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nearest(word: str, known: list[str]) -> str:
    """A hint for a misspelt name, or the list of the known ones.

    >>> nearest("epoch", ["epochs", "batch_size"])
    "did you mean 'epochs'?"
    >>> nearest("xyz", ["a", "b"])
    'known: a, b'
    """
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"


def typed(schema: type, tree: Any, path: str = "") -> Any:
    """The tree as the dataclass `schema`, whose fields `setting` made; path stands before names in messages.

    Raises ConfigError, whose message names the setting, what it was, and what it may be.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"{path.rstrip('.')}: {tree!r} came where a group of settings was needed")
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
    missing = [name for name in GROUPS if schema is RunConfig and name not in values]
    if missing:
        raise ConfigError(f"no {missing[0]} was chosen; add {missing[0]}=NAME (--help lists the names)")
    return schema(**values)


def _value(name: str, value: Any, hint: Any, rule: Any) -> Any:
    """The value as its declared type, within its range; 3 is taken for 3.0 but 3.5 not for 3."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    if isinstance(value, list) and list[int] in options:
        return [_value(name, item, int, rule) for item in value]
    kind = next(option for option in options if option is not type(None))
    if typing.get_origin(kind) is dict:
        kind = dict
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        or_null = " or null" if type(None) in options else ""
        raise ConfigError(f"{name}={value} is not {expected.get(kind, 'a group of settings')}{or_null}")
    if rule.get("choices") and value not in rule["choices"]:
        raise ConfigError(f"{name}={value} is not one of {', '.join(rule['choices'])}")
    low = rule.get("low")
    if low is not None and not (low <= value < math.inf):
        raise ConfigError(f"{name}={value} is out of range; it must be at least {low}")
    return value


def _check_group(name: str, group: dict[str, Any]) -> None:
    target = group.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise ConfigError(
            f"{name}._target_={target!r} names nothing to call; it must be a dotted path such as package.module.name"
        )
    for key, value in flatten(group, f"{name}.").items():
        if value == "???":
            raise ConfigError(f"{key} is not set and has no default; give {key}=VALUE")


def _base_learning_rate(optimizer: dict[str, Any]) -> float:
    """The rate of one rank. A float always: Keras 3 refuses a whole number."""
    value = optimizer.get("learning_rate")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"optimizer.learning_rate={value} is not a number; give the rate for one rank")
    if not 0 < value < math.inf:
        raise ConfigError(f"optimizer.learning_rate={value} is out of range; it must be above 0")
    return float(value)
