"""Metrics that are exact over ranks: those whose state is a sum over examples."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.errors import ConfigError, in_one_line

NUM_CHECKED = 32


def check_adds_up(metric: keras.metrics.Metric, name: str, targets: Any, outputs: Any, task: str) -> None:
    """Raises ConfigError for a metric that cannot take these examples, or cannot be exact over ranks."""
    quarter = NUM_CHECKED // 4
    parts = slice(0), slice(quarter), slice(quarter, None), slice(None)
    try:
        found = [_state(fresh(metric, "checked"), targets[part], outputs[part]) for part in parts]
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise ConfigError(
            f"task.metrics.{name} cannot take targets of shape {targets.shape} and outputs of {outputs.shape}, "
            f"as {task} has them: {in_one_line(error)}"
        ) from error
    if not all(np.allclose(first + rest - begin, whole, rtol=1e-4) for begin, first, rest, whole in zip(*found)):
        raise ConfigError(
            f"task.metrics.{name} cannot be exact over ranks: the state of {type(metric).__name__} is no sum "
            "over examples; choose a metric that counts or averages, or compute it from the saved model"
        )


def fresh(metric: keras.metrics.Metric, name: str) -> keras.metrics.Metric:
    """The metric without state, under that name."""
    return type(metric).from_config({**metric.get_config(), "name": name})


def _state(metric: keras.metrics.Metric, targets: np.ndarray, outputs: np.ndarray) -> list[np.ndarray]:
    """The metric's variables after these examples."""
    if len(targets):
        metric.update_state(targets, outputs)
    elif not metric.variables:
        metric.build(targets.shape, outputs.shape)
    return [np.asarray(variable.numpy(), np.float64) for variable in metric.variables]
