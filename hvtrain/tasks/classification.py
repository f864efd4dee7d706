"""One of several classes."""

from collections.abc import Mapping

import keras
import numpy as np

from hvtrain.data.source import Source
from hvtrain.tasks.task import Task


class Classification(Task):
    """One class for each example: the model gives a logit for each class, targets are class indices.

    Args:
        loss: default: cross-entropy of the logits.
        metrics: default: accuracy.
    """

    output = "logits; keras.ops.softmax makes them probabilities"

    def __init__(
        self, loss: keras.losses.Loss | None = None, metrics: Mapping[str, keras.metrics.Metric] | None = None
    ) -> None:
        super().__init__(
            keras.losses.SparseCategoricalCrossentropy(from_logits=True) if loss is None else loss,
            {"accuracy": keras.metrics.SparseCategoricalAccuracy()} if metrics is None else metrics,
        )

    def output_shape(self, source: Source) -> tuple[int, ...]:
        return (source.num_classes,)

    def examples(self, number: int, source: Source) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        targets = rng.integers(source.num_classes, size=number, dtype=np.int32)
        return targets, rng.normal(size=(number, source.num_classes)).astype(np.float32)
