"""From a group of the configuration to the object it names, with errors that a user can act on."""

from __future__ import annotations

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from hvtrain.errors import ConfigError, UserError


def build(group: str, settings: dict[str, Any], **values: Any) -> Any:
    """Calls settings["_target_"] with the other settings and the given values (which win).

    Raises ConfigError when the target cannot be imported or refuses its arguments.
    """
    try:
        return instantiate({**settings, **values}, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, InstantiationException | ImportError | TypeError | ValueError):
            reason = " ".join(str(cause).split())
            raise ConfigError(
                f"{group}._target_={settings['_target_']} cannot be used: {reason}; "
                f"mend the settings of {group}, or see --help"
            ) from error
        # A defect in the target's own code: its traceback, without Hydra's around it.
        raise cause from None
