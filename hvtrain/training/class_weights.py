"""Weights of classes, for data sets in which some are rare."""

from collections.abc import Mapping

import numpy as np

from hvtrain.config.schema import RunConfig
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.tasks import Task

BALANCED = "balanced"


def class_weights(config: RunConfig, source: Source, task: Task) -> list[float]:
    """train.class_weights as a list by class; empty without.

    "balanced" is n / (classes x count) for a class with that count among n labels, as in scikit-learn: every class then
    has the same sum of weights, and the mean weight is 1. A class without examples has the weight 0.
    """
    chosen = config.train.class_weights
    if chosen is None:
        return []
    setting = f"train.class_weights={chosen}"
    if not task.has_classes:
        raise ConfigError(f"{setting} needs a task whose targets are classes; {type(task).__name__} has none")
    num_classes = source.facts().get("num_classes", 2)
    if chosen == BALANCED:
        counts = source.class_counts()
        if counts is None:
            raise ConfigError(
                f"{setting} needs counts, which {source.name} does not give; give a weight for each class"
            )
        weights = counts.sum() / (num_classes * np.maximum(counts, 1))
        return [float(weight) for weight in np.where(counts, weights, 0.0)]
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"{setting} is neither {BALANCED} nor a mapping such as {{0: 1.0, 1: 5.0}}")
    names = [str(name) for name in source.facts().get("class_names", ())]
    by_class = [1.0] * num_classes
    for name, weight in chosen.items():
        index = names.index(str(name)) if str(name) in names else int(name) if str(name).isdigit() else -1
        if not 0 <= index < num_classes:
            known = f"0 ... {num_classes - 1}" + (f" or {', '.join(names)}" if names else "")
            raise ConfigError(f"{setting} names the class {name}, and {source.name} has {known}")
        if not (isinstance(weight, int | float) and 0 <= weight < float("inf")):
            raise ConfigError(f"{setting} gives the class {name} the weight {weight}; give a number from 0")
        by_class[index] = float(weight)
    return by_class
