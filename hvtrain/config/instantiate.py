"""Builds the object that a group of the configuration names, with errors that a user can act on."""

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from hvtrain.errors import ConfigError, UserError


def build(group: str, settings: dict[str, Any], **values: Any) -> Any:
    """Calls settings["_target_"] with the other settings and with `values`, which take precedence.

    Raises ConfigError if the target cannot be imported or refuses its arguments.
    """
    try:
        return instantiate({**settings, **values}, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        refused = isinstance(cause, InstantiationException | ImportError | TypeError | ValueError)
        if refused and not isinstance(cause, UserError):
            reason = " ".join(str(cause).split())
            raise ConfigError(
                f"{group}._target_={settings['_target_']} cannot be used: {reason}; "
                f"fix the settings of {group}, or see --help"
            ) from error
        # A bug in the target's own code: show its traceback without Hydra's around it.
        raise cause from None
