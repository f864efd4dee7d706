"""The settings of a run that only tries something out: find_lr and find_batch share them. Pure."""

from dataclasses import replace
from typing import Any

from hvtrain.config.accumulation import whole
from hvtrain.config.schema import RunConfig


def as_trial(config: RunConfig, num_steps: int, **changes: Any) -> RunConfig:
    """The run with so many steps and these changes, without checkpoints, notices and whatever acts on its losses.

    run.dir stays as it is: a folder named by the clock could differ between ranks, so the chief makes the name.
    """
    times = config.train.accumulate
    train = replace(config.train, steps=whole(num_steps, times), steps_per_execution=times, ema=None)
    return replace(
        config,
        train=replace(train, divide_steps_by_size=False, max_time=None, validate_every_steps=None),
        callbacks={},
        notify=[],
        checkpoint=replace(config.checkpoint, every_epochs=None, every_steps=None, every_minutes=None),
        resume="never",
        **changes,
    )
