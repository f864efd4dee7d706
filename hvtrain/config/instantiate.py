"""Builds the object that a configuration group names, with errors that a user can act on."""

import inspect
import logging
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from hvtrain.config.choices import choice_files
from hvtrain.config.schema import MODEL_OPTIONS, RunConfig, Settings
from hvtrain.errors import ConfigError, UserError, in_one_line, location_of
from hvtrain.system.secrets import HIDDEN
from hvtrain.system.text import flatten

# What the target of each group must return, for messages.
RETURN_TYPES = {
    "model": "a keras.Model",
    "dataset": "an hvtrain.data.Source; hvtrain.data.from_arrays(images, labels) makes one",
    "task": "an hvtrain.tasks.Task",
    "optimizer": "a keras.optimizers.Optimizer",
    "schedule": "an hvtrain.core.schedule.Schedule",
    "strategy": "an hvtrain.strategies.base.Strategy",
    "callbacks": "a keras.callbacks.Callback",
    "augment": "a keras.layers.Layer",
    "tracker": "an hvtrain.training.trackers.Tracker",
}
# get_object() logs the errors that it raises.
logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)
# Facts passed to a builder that takes **kwargs, or has no signature, and declares no fact by name.
DEFAULT_FACTS = ("image_shape", "num_classes")


def build(
    config: RunConfig,
    group: str,
    expected_type: type,
    facts: Settings | None = None,
    source_name: str = "",
    **values: Any,
) -> Any:
    """Calls a group's _target_ with the group's other settings, and returns the result.

    Args:
        config: The settings of the run.
        group: A configuration group, or callbacks.NAME, augment.NAME or tracker.NAME.
        expected_type: The type that the target must return.
        facts: Facts about the data set, such as num_classes, by name. The target gets those that it
            declares as arguments.
        source_name: The name of that data set, for messages.
        values: Further arguments, which take precedence over the settings.

    Raises:
        ConfigError: The target cannot be imported, refuses its arguments, fails in the user's own
            code or returns another type.
    """
    section, _, name = group.partition(".")
    settings = getattr(config, section)
    if name:
        settings = settings[name]
    builder = _target_of(settings)
    if group == "model":
        settings = _builder_settings(settings, builder)
    if not name:
        choices: list[Any] = [
            OmegaConf.to_container(OmegaConf.load(file)) for file in choice_files(group)
        ]
        # A target of hvtrain's own must refuse the arguments of another choice, so these are kept;
        # only arguments of nested groups may be dropped.
        if settings["_target_"] in [choice.get("_target_") for choice in choices]:
            choices = [
                {name: value for name, value in choice.items() if isinstance(value, dict)}
                for choice in choices
            ]
        settings = _drop_unaccepted_defaults(settings, choices)
    _check_settings(config, group, settings)

    target = f"{group}._target_={settings['_target_']}"
    if facts is not None and builder is not None:
        values |= select_facts(builder, settings, facts, target, source_name)
    built = _call(config, group, target, settings | values)
    if not isinstance(built, expected_type):
        returned = "None" if built is None else f"a {type(built).__name__}"
        raise ConfigError(f"{target} returned {returned}; it must return {RETURN_TYPES[section]}")
    return built


def _target_of(settings: Settings) -> Any:
    """Returns the object that _target_ names; None if it is missing or cannot be imported, which _call() reports."""
    with suppress(Exception):
        return get_object(settings["_target_"])
    return None


def select_facts(
    builder: Callable[..., Any],
    settings: Collection[str],
    facts: Settings,
    name: str,
    source_name: str,
) -> Settings:
    """Selects the facts that a builder declares as arguments.

    Args:
        builder: A class or function.
        settings: Names of the arguments that the configuration sets already.
        facts: Facts about the data set and the task, by name.
        name: The builder's name, for messages.
        source_name: The name of the data set, for messages.

    Raises:
        ConfigError: A required argument has neither a setting nor a fact.
    """
    parameters = _parameters(builder)
    selected = {}
    for parameter in parameters or ():
        if parameter.name in settings:
            continue
        if parameter.name in facts:
            selected[parameter.name] = facts[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            raise ConfigError(
                f"{name} needs {parameter.name}, which is not set and which the data set {source_name} does not give "
                f"(it gives {', '.join(facts) or 'nothing'}); set it, or choose another data set"
            )
    if not selected and _takes_any_keyword(parameters):
        return {
            name: facts[name] for name in DEFAULT_FACTS if name in facts and name not in settings
        }
    return selected


def _parameters(function: Any) -> list[inspect.Parameter] | None:
    """Returns a callable's parameters; None if it has no signature (some built-in functions) or is None."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return None


def _takes_any_keyword(parameters: list[inspect.Parameter] | None) -> bool:
    return parameters is None or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    )


def _builder_settings(group: Settings, builder: Any) -> Settings:
    """Returns the settings of the group `model` without ModelOptions, which builders never get.

    Raises ConfigError if the builder has an argument of the same name.
    """
    arguments = {parameter.name for parameter in _parameters(builder) or ()}
    clashes = arguments.intersection(MODEL_OPTIONS)
    if clashes:
        name = min(clashes)
        raise ConfigError(
            f"model._target_={group['_target_']} has an argument {name}, but model.{name} is a setting of every "
            "model, which builders do not get; rename the argument"
        )
    return {name: value for name, value in group.items() if name not in MODEL_OPTIONS}


def _drop_unaccepted_defaults(settings: Settings, choices: Sequence[Any]) -> Settings:
    """Drops a choice's default arguments if the user's own class does not take them.

    With `task.loss._target_=package.Loss` the settings still hold from_logits, a default meant for
    the task's own loss. The user's class gets it only if it declares it. Arguments that the user has
    set are kept, so that a misspelt one is refused.

    Args:
        settings: The settings of a group, or of a group nested in it.
        choices: The corresponding settings in each choice of the group.
    """
    target = _target_of(settings)
    accepted = {}
    for name, value in settings.items():
        defaults = [choice[name] for choice in choices if name in choice]
        if isinstance(value, dict):
            accepted[name] = _drop_unaccepted_defaults(
                value, [default for default in defaults if isinstance(default, dict)]
            )
            continue
        # A default that refers to another setting, such as ${task.ignored_label}, has been resolved
        # to a value that cannot be compared with it.
        is_default = any(default == value or str(default).startswith("${") for default in defaults)
        if not is_default or target is None or name.startswith("_") or _declares(target, name):
            accepted[name] = value
    return accepted


def _declares(target: Callable[..., Any], argument: str) -> bool:
    """True if a callable accepts this argument, possibly by passing **kwargs on to a base class."""
    functions = [target]
    if inspect.isclass(target):
        functions = [vars(base)["__init__"] for base in target.__mro__ if "__init__" in vars(base)]

    for function in functions:
        parameters = _parameters(function)
        if argument in [parameter.name for parameter in parameters or ()]:
            return True
        if not _takes_any_keyword(parameters):
            return False
    return True


def _check_settings(config: RunConfig, group: str, settings: Settings) -> None:
    """Raises ConfigError for a secret redacted in a run's records, or for ${run.dir} before the folder is known."""
    for name, value in flatten({group: settings}).items():
        if HIDDEN in str(value):
            raise ConfigError(
                f"{name} holds a secret, which a run's records leave out; give {name}=VALUE again"
            )
    if config.run.dir is None and "${run.dir}" in str(settings):
        raise ConfigError(
            f"{group} names ${{run.dir}} but is built before the run folder is known; give run.dir=PATH"
        )


def _call(config: RunConfig, group: str, target: str, arguments: Settings):
    """Instantiates the arguments' _target_, and turns errors that the user can fix into one line."""
    tree = OmegaConf.create(
        {"run": {"dir": config.run.dir}, "called": arguments}, flags={"allow_objects": True}
    )
    try:
        return instantiate(tree.called, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from None  # hvtrain's own errors are in one line already.
        # If a name cannot be imported, Hydra chains the error under one of its own.
        innermost = cause
        while not location_of(innermost) and innermost.__cause__:
            innermost = innermost.__cause__
        location = location_of(innermost)
        if location:
            raise ConfigError(
                f"{target} failed: {in_one_line(innermost)} ({location}); tracebacks=true shows its traceback"
            ) from innermost
        if isinstance(cause, InstantiationException | ImportError | TypeError | ValueError):
            # Hydra names the nested group, such as the loss of a task.
            nested = re.search(r"full_key: called\.(\S+)", str(error))
            if nested:
                target = f"{group}.{nested[1]}"
            raise ConfigError(
                f"{target} cannot be used: {' '.join(str(innermost).split())}; fix the settings of {group}, or see "
                "--help"
            ) from error
        raise cause from None  # A bug: show its traceback without Hydra's frames.
