"""Settings that differ between the starts of a run: they are recorded, or refused where they cannot change."""

from typing import Any

from hvtrain.config.schema import GROUPS, SEVERAL, RunConfig, to_dict
from hvtrain.config.validate import flatten
from hvtrain.errors import ConfigError

# A seed sets the order of the rest of the epoch. Another optimizer would take the slots for its own, and other metrics
# the state of those before.
FIXED = ("seed", "optimizer._target_", "task._target_")
# They do not change what is learned.
_IRRELEVANT = (
    *(
        "run.",
        "resume",
        "verbose",
        "tracebacks",
        "checkpoint.",
        "guard.",
        "watchdog.",
        "profile.",
        "comm.",
        "strategy.",
    ),
    *("train.max_time", "train.evaluation_batch_size", "train.evaluation_steps", "train.steps_per_execution"),
    *("train.remat", "model.weights", "tracker.", "notify"),
)


def changed_since(meta: dict[str, Any], config: RunConfig) -> dict[str, list[Any]]:
    """{name: [before, now]} of the settings that differ from those in a checkpoint's meta, if any.

    Raises ConfigError where a setting cannot change.
    """
    before = meta.get("config")
    changed = changed_settings(before, to_dict(config)) if isinstance(before, dict) else {}
    for name, (then, now) in changed.items():
        if name in FIXED or name.startswith("task.metrics."):
            raise ConfigError(
                f"{name}={now}, but the run in this folder began with {then}, which cannot change; "
                "start with the same, or choose another run.dir"
            )
    return changed


def with_change(meta: dict[str, Any], step: int, changed: dict[str, list[Any]]) -> list[Any]:
    """The changes so far, in meta, and that of the start at this step, if any: {"step": ..., "changed": ...}."""
    earlier = meta.get("changes")
    return [*(earlier if isinstance(earlier, list) else []), *([{"step": step, "changed": changed}] if changed else [])]


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """{name: [before, now]} of the settings that differ, without those that do not change what is learned.

    >>> changed_settings({"seed": 1, "train": {"epochs": 1}}, {"seed": 1, "train": {"epochs": 2, "new": 3}})
    {'train.epochs': [1, 2]}
    """
    old, new = flatten(before), flatten(now)
    # An earlier version may have had fewer typed settings, or groups.
    groups = tuple(f"{group}." for group in (*GROUPS, *SEVERAL) if group in before)
    names = [name for name in {**old, **new} if name in old or name.startswith(groups)]
    changed = {
        name: [old.get(name), new.get(name)]
        for name in names
        if old.get(name) != new.get(name) and not name.startswith(_IRRELEVANT)
    }
    layers = [list(run.get("augment") or {}) for run in (before, now)]  # They act in this order.
    return (
        {**changed, "augment": layers} if layers[0] != layers[1] and sorted(layers[0]) == sorted(layers[1]) else changed
    )
