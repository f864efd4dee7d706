"""The check that metrics are exact over ranks, and the examples that they are tried with."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.errors import ConfigError, in_one_line

NUM_CHECKED = 32
"""Examples that each metric is tried with before a run."""


def draw(rng: np.random.Generator, shape: Sequence[int | None], dtype: str) -> np.ndarray:
    """Draws NUM_CHECKED examples: 0 or 1, or fractions, by the type. Open axes get a size of 4."""
    size = [NUM_CHECKED, *(side or 4 for side in shape)]
    if dtype.startswith(("int", "uint", "bool")):
        return rng.integers(2, size=size).astype(dtype)
    return rng.random(size).astype(np.float32)


def draw_classes(shape: tuple[int, ...], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws class indices of that shape, and a logit for each class of each of them."""
    rng = np.random.default_rng(0)
    targets = rng.integers(classes, size=(NUM_CHECKED, *shape), dtype=np.int32)
    return targets, rng.normal(size=(*targets.shape, classes)).astype(np.float32)


def check_adds_up(metric: keras.metrics.Metric, name: str, targets: Any, outputs: Any, task: str) -> None:
    """Checks that a metric's state is a sum over examples, by updating it with parts and with all.

    An evaluation sums the ranks' states. Only a state that is a sum is then the one of a single
    process on all examples.

    Raises:
        ConfigError: The metric cannot take these examples, or its state is not a sum.
    """
    quarter = NUM_CHECKED // 4
    parts = (slice(0), slice(quarter), slice(quarter, None), slice(None))
    checked = fresh(metric, "checked")
    try:
        checked.update_state(targets, outputs)  # Some, such as F1Score, make their variables here.
        states = [_state(checked, targets[part], outputs[part]) for part in parts]
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise ConfigError(
            f"task.metrics.{name} cannot take targets of shape {targets.shape} and outputs of "
            f"{outputs.shape}, as {task} has them: {in_one_line(error)}"
        ) from error

    for initial, first, rest, whole in zip(*states):
        # Both parts begin with the initial state, which the sum holds twice. The tolerance is for
        # float32 numbers that are summed in another order.
        if not np.allclose(first + rest - initial, whole, rtol=1e-4):
            raise ConfigError(
                f"task.metrics.{name} cannot be exact over ranks: the state of "
                f"{type(metric).__name__} is not a sum over examples; choose a metric that counts "
                "or averages, or compute it from the saved model"
            )


def fresh(metric: keras.metrics.Metric, name: str) -> keras.metrics.Metric:
    """Copies a metric without its state, under another name."""
    return type(metric).from_config({**metric.get_config(), "name": name})


def _state(metric: keras.metrics.Metric, targets: np.ndarray, outputs: np.ndarray) -> list[np.ndarray]:
    """Begins the metric anew, updates it with these examples, and returns its variables."""
    metric.reset_state()
    if len(targets):
        metric.update_state(targets, outputs)
    return [np.asarray(variable.numpy(), np.float64) for variable in metric.variables]
