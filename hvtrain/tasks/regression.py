"""The task of predicting numbers."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.figures import Figure, Scatter, Table
from hvtrain.data.source import Source
from hvtrain.tasks.examples import ReviewedExamples
from hvtrain.tasks.task import Losses, Metrics, Task

NUM_WORST = 12


class Regression(Task):
    """Predicting one or several numbers per example, which the model outputs directly.

    Args:
        loss: Default: the mean squared error.
        metrics: Default: the mean absolute error.

    Example:

    >>> task = Regression()
    >>> task.metric_names
    ['loss', 'mean_absolute_error']
    >>> task.sign("val_mean_absolute_error")
    -1
    """

    name = "regression"
    target = "one number or an array of them, as floats"
    output = "numbers in the units of the targets"
    best = "mean_absolute_error"
    num_reviewed = 1000

    def default_loss(self) -> Losses:
        return keras.losses.MeanSquaredError()

    def default_metrics(self) -> Metrics:
        return {"mean_absolute_error": keras.metrics.MeanAbsoluteError()}

    def takes(self, target: Any) -> bool:
        return hasattr(target, "dtype") and target.dtype.is_floating

    def softener(self, source: Source) -> Callable[[Any], tf.Tensor]:
        # MixUp can mix the numbers themselves, once they are floats.
        return lambda targets: tf.cast(targets, tf.float32)

    def review(
        self, reviewed: ReviewedExamples, model: keras.Model, source: Source
    ) -> list[Figure]:
        """Returns plots of predictions and residuals, and a table of the worst examples.

        Only the first number of each example counts.
        """
        targets = _first_numbers(reviewed.targets)
        predictions = _first_numbers(reviewed.outputs)

        # Positive where the prediction is too high.
        residuals = predictions - targets

        # A scatter plot can show only one number per example.
        has_more_targets = reviewed.targets.size > reviewed.num_examples
        suffix = " Only the first target is shown." if has_more_targets else ""

        # Half of the residuals lie between these quartiles.
        low, high = np.quantile(residuals, (0.25, 0.75))

        figures: list[Figure] = [
            Scatter(
                "Targets and predictions",
                f"On {reviewed.description}.{suffix}",
                "target",
                "prediction",
                list(zip(targets.tolist(), predictions.tolist())),
                "diagonal",
            ),
            Scatter(
                "Residuals",
                f"On {reviewed.description}: half of them within {low:+.4g} ... {high:+.4g}.{suffix}",
                "prediction",
                "prediction - target",
                list(zip(predictions.tolist(), residuals.tolist())),
                "zero",
            ),
        ]

        worst = np.argsort(-abs(residuals), kind="stable")[:NUM_WORST].tolist()
        examples = [row * reviewed.step for row in worst]
        cells = source.cells(reviewed.split, examples)
        # Numbers alone, without the examples' own values, would say less than the plots.
        if cells:
            numbers = [
                [f"{value:.5g}" for value in values[worst]] for values in (targets, predictions)
            ]
            rows = [list(row) for row in zip(examples, *numbers, *cells.values())]
            columns = ["example", "target", "prediction", *cells]
            note = f"The largest residuals, on {reviewed.description}.{suffix}"
            figures.append(Table("Worst examples", note, columns, rows))
        return figures


def _first_numbers(values: np.ndarray) -> np.ndarray:
    """Returns the first number of each example, whatever the examples' shape."""
    return values.reshape(len(values), -1)[:, 0].astype(float)
