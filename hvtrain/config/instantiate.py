"""Builds the object that a group of the configuration names, with errors that a user can act on."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from hvtrain.config.facts import declared
from hvtrain.config.model_options import of_builder
from hvtrain.config.schema import RunConfig
from hvtrain.config.validate import flatten
from hvtrain.errors import ConfigError, UserError, in_one_line, place_of
from hvtrain.system.secrets import HIDDEN

NEEDED = {
    "model": "a keras.Model",
    "dataset": "an hvtrain.data.Source; hvtrain.data.from_arrays(images, labels) makes one",
    "task": "an hvtrain.tasks.Task",
    "optimizer": "a keras.optimizers.Optimizer",
    "schedule": "an hvtrain.core.schedule.Schedule",
    "strategy": "an hvtrain.strategies.base.Strategy",
    "callbacks": "a keras.callbacks.Callback",
    "augment": "a keras.layers.Layer",
    "tracker": "an hvtrain.trackers.tracker.Tracker",
}
"""What the target of each group returns."""


def build(
    config: RunConfig, group: str, kind: type, facts: Mapping[str, Any] | None = None, giver: str = "", **values: Any
) -> Any:
    """Calls the group's _target_ with its other settings, with `values`, which take precedence, and with those facts of
    the giver, a data set, that it declares as arguments.

    group: a group of the configuration, or callbacks.NAME, augment.NAME or tracker.NAME. Raises ConfigError if the
    target cannot be imported, refuses its arguments, fails in the user's own code or returns no `kind`.
    """
    section, _, name = group.partition(".")
    settings = getattr(config, section)[name] if name else getattr(config, section)
    if group == "model":
        settings = of_builder(settings, get_object)
    target, builder = f"{group}._target_={settings['_target_']}", None
    if hidden := [key for key, value in flatten({group: settings}).items() if HIDDEN in str(value)]:
        raise ConfigError(
            f"{hidden[0]} holds a secret, which a run's records leave out; give {hidden[0]}=VALUE once more"
        )
    if config.run.dir is None and "${run.dir}" in str(settings):
        raise ConfigError(f"{group} names ${{run.dir}} but is built before the run folder is known; give run.dir=PATH")
    if facts is not None:
        with suppress(Exception):  # What cannot be imported is refused below.
            builder = get_object(settings["_target_"])
        values |= declared(builder, settings, facts, target, giver) if builder else {}
    tree = {"run": {"dir": config.run.dir}, "called": {**settings, **values}}
    try:
        built = instantiate(OmegaConf.create(tree, flags={"allow_objects": True}).called, _convert_="all")
    except InstantiationException as error:
        cause = own = error.__cause__ or error
        while not place_of(own) and own.__cause__:
            own = own.__cause__  # Hydra's error about a module has that of the user's import within.
        if not isinstance(cause, UserError):
            if place := place_of(own):
                said = f"{in_one_line(own)} ({place}); tracebacks=true shows its traceback"
                raise ConfigError(f"{target} failed: {said}") from own
            if isinstance(cause, InstantiationException | ImportError | TypeError | ValueError):
                reason = " ".join(str(cause).split())
                advice = f"fix the settings of {group}, or see --help"
                raise ConfigError(f"{target} cannot be used: {reason}; {advice}") from error
        # A defect, or a refusal of hvtrain's own: show its traceback without Hydra's around it.
        raise cause from None
    if not isinstance(built, kind):
        came = "None" if built is None else f"a {type(built).__name__}"
        raise ConfigError(f"{target} returned {came}; it must return {NEEDED[section]}")
    return built
