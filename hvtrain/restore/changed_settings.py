"""Settings that differ between the starts of a run: they are recorded, or refused where they cannot change."""

from typing import Any

from hvtrain.config.schema import GROUPS, RunConfig, to_dict
from hvtrain.config.validate import flatten
from hvtrain.errors import ConfigError

# A seed sets the order of the rest of the epoch. Another optimizer would take the slots for its own.
FIXED = ("seed", "optimizer._target_")
# They do not change what is learned.
_IRRELEVANT = (
    *("run.", "resume", "verbose", "debug", "checkpoint.", "guard.", "watchdog.", "profile.", "comm.", "strategy."),
    *("train.max_time", "train.evaluation_batch_size", "train.steps_per_execution"),
)


def with_changes(meta: dict[str, Any] | None, step: int, config: RunConfig) -> list[dict[str, Any]]:
    """The changes of a run's settings so far: {"step": where, "changed": {name: [before, now]}} for each that had any.

    meta is that of the checkpoint of `step` to resume, if any. Raises ConfigError where a setting cannot change.
    """
    before, earlier = (meta or {}).get("config"), (meta or {}).get("changes")
    changes = list(earlier) if isinstance(earlier, list) else []
    changed = changed_settings(before, to_dict(config)) if isinstance(before, dict) else {}
    for name in FIXED:
        if name in changed:
            then, now = changed[name]
            raise ConfigError(
                f"{name}={now}, but the run in this folder began with {then}, which cannot change; "
                "start with the same, or choose another run.dir"
            )
    return [*changes, {"step": step, "changed": changed}] if changed else changes


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """{name: [before, now]} of the settings that differ, without those that do not change what is learned.

    >>> changed_settings({"seed": 1, "train": {"epochs": 1}}, {"seed": 1, "train": {"epochs": 2, "new": 3}})
    {'train.epochs': [1, 2]}
    """
    old, new = flatten(before), flatten(now)
    # An earlier version may have had fewer typed settings.
    names = [name for name in {**old, **new} if name in old or name.startswith((*GROUPS, "callbacks"))]
    return {
        name: [old.get(name), new.get(name)]
        for name in names
        if old.get(name) != new.get(name) and not name.startswith(_IRRELEVANT)
    }
