"""Intervals of steps that fit train.accumulate. Pure."""

from typing import TYPE_CHECKING

from hvtrain.errors import ConfigError

if TYPE_CHECKING:
    from hvtrain.config.schema import RunConfig


def align_with_accumulation(config: "RunConfig") -> None:
    """Aligns intervals with accumulations, within which ranks differ and must not stop, compare or save."""
    train, number = config.train, config.train.accumulate
    if config.optimizer.get("gradient_accumulation_steps"):
        raise ConfigError(f"train.accumulate={number} and optimizer.gradient_accumulation_steps exclude each other")
    if config.data.uneven == "pad":
        raise ConfigError(f"train.accumulate={number} and data.uneven=pad exclude each other; choose data.uneven=trim")
    given = {
        "train.steps": None if train.divide_steps_by_size else train.steps,
        "train.validate_every_steps": train.validate_every_steps,
        "checkpoint.every_steps": config.checkpoint.every_steps,
    }
    for name, steps in given.items():
        if steps and steps % number:
            near = f"{steps - steps % number} or " if steps > number else ""
            raise ConfigError(
                f"{name}={steps} is not a multiple of train.accumulate={number}; choose {near}{whole(steps, number)}"
            )
    config.guard.every = whole(config.guard.every, number)
    if "commit_steps" in config.strategy:
        config.strategy["commit_steps"] = whole(config.strategy["commit_steps"], number)


def whole(steps: int, accumulate: int) -> int:
    """Rounds steps up to whole accumulations.

    >>> whole(500, 1), whole(500, 3), whole(0, 3)
    (500, 501, 0)
    """
    return -(-steps // accumulate) * accumulate
