"""The check that metrics are exact over ranks, and the examples that they are tried with."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

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
    """Checks that a metric gives one number from a state that is a sum over examples.

    An evaluation sums the ranks' states. Only a state that is a sum is then the one of a single
    process on all examples. It is updated with parts of the examples and with all of them.

    Raises:
        ConfigError: The metric cannot take these examples, gives several numbers, or its state is
            not a sum.
    """
    quarter = NUM_CHECKED // 4
    parts = (slice(0), slice(quarter), slice(quarter, None), slice(None))
    examples = f"targets of shape {targets.shape} and outputs of {outputs.shape}, as {task} has them"
    checked = fresh(metric, "checked")
    try:
        # Some, such as F1Score, make their variables here. Keras passes sample_weight to all.
        checked.update_state(targets, outputs, sample_weight=None)
        states = [_state(checked, targets[part], outputs[part]) for part in parts]
        result = checked.result()
    except Exception as error:  # A metric of the user's own may raise anything.
        raise ConfigError(f"task.metrics.{name} cannot take {examples}: {in_one_line(error)}") from error

    if isinstance(result, Mapping) or np.ndim(result):
        raise ConfigError(
            f"task.metrics.{name} gives several numbers, and a run logs one for each metric; let it average "
            "them (task.metrics.NAME.average=macro for F1Score and FBetaScore), or choose another metric"
        )
    for initial, first, rest, whole in zip(*states):
        # Both parts begin with the initial state, which the sum holds twice. The tolerance is for
        # float32 numbers that are summed in another order.
        if not np.allclose(first + rest - initial, whole, rtol=1e-4):
            raise ConfigError(
                f"task.metrics.{name} cannot be exact over ranks: the state of {type(metric).__name__} is not a "
                f"finite sum over examples, from {examples}; choose a metric that counts or averages, or "
                "compute it from the saved model"
            )


def fresh(metric: keras.metrics.Metric, name: str) -> keras.metrics.Metric:
    """Copies a metric without its state, under another name."""
    return type(metric).from_config({**metric.get_config(), "name": name})


def _state(metric: keras.metrics.Metric, targets: np.ndarray, outputs: np.ndarray) -> list[np.ndarray]:
    """Begins the metric anew, updates it with these examples, and returns its variables."""
    metric.reset_state()
    if len(targets):
        metric.update_state(targets, outputs, sample_weight=None)
    return [np.asarray(variable.numpy(), np.float64) for variable in metric.variables]
