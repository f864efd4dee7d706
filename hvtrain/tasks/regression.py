"""Numbers."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.data.source import Source
from hvtrain.tasks.task import Losses, Metrics, Task, refuse_targets


class Regression(Task):
    """One number or several for each example, which the model gives as they are.

    Args:
        loss: default: the mean squared error.
        metrics: default: the mean absolute error.
    """

    output = "numbers in the units of the targets"
    best = "mean_absolute_error"

    def __init__(self, loss: Losses = None, metrics: Metrics | None = None, best: str | None = None) -> None:
        super().__init__(
            keras.losses.MeanSquaredError() if loss is None else loss,
            {"mean_absolute_error": keras.metrics.MeanAbsoluteError()} if metrics is None else metrics,
            best,
        )

    def output_shape(self, source: Source) -> tuple[Any, ...]:
        return tuple(source.element_spec[1].shape) or (1,)

    def check_targets(self, source: Source) -> None:
        target = source.element_spec[1]
        if not hasattr(target, "dtype") or not target.dtype.is_floating:
            raise refuse_targets("regression", "one number or an array of them, as floats", source)

    def softener(self, source: Source) -> Callable[[Any], tf.Tensor]:
        return lambda targets: tf.cast(targets, tf.float32)

    def examples(self, number: int, source: Source) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        targets = rng.normal(size=(number, *source.element_spec[1].shape)).astype(np.float32)
        return targets, rng.normal(size=(number, *self.output_shape(source))).astype(np.float32)
