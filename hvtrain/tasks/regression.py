"""Numbers."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.figures import Figure, Scatter
from hvtrain.data.source import Source
from hvtrain.tasks.reviewed import Reviewed
from hvtrain.tasks.task import Losses, Metrics, Task, refuse_targets


class Regression(Task):
    """One number or several for each example, which the model gives as they are.

    Args:
        loss: default: the mean squared error.
        metrics: default: the mean absolute error.
    """

    output = "numbers in the units of the targets"
    best = "mean_absolute_error"
    num_reviewed = 1000

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

    def review(self, reviewed: Reviewed, model: keras.Model, source: Source) -> list[Figure]:
        """Predictions and residuals of the first number of each example."""
        true, found = (
            array.reshape(reviewed.number, -1)[:, 0].astype(float) for array in (reviewed.targets, reviewed.outputs)
        )
        only = " Of several targets, the first." if reviewed.targets.size > reviewed.number else ""
        residuals = found - true
        note = f"On {reviewed.which}: half of them within {_middle_half(residuals)}.{only}"
        pairs, errors = (list(zip(x.tolist(), y.tolist())) for x, y in ((true, found), (found, residuals)))
        return [
            Scatter(
                "Targets and predictions", f"On {reviewed.which}.{only}", "target", "prediction", pairs, "diagonal"
            ),
            Scatter("Residuals", note, "prediction", "prediction - target", errors, "zero"),
        ]


def _middle_half(residuals: np.ndarray) -> str:
    low, high = np.quantile(residuals, (0.25, 0.75))
    return f"{low:+.4g} ... {high:+.4g}"
