"""A token for each place in a text."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvtrain.data.source import Source
from hvtrain.tasks.task import Losses, Metrics, Task, refuse_targets

MAX_CROSS_ENTROPY = 50.0  # Above it the perplexity means nothing, and would overflow in the end.


class Language(Task):
    """A token for each place: the next one (causal) or the one that is hidden (masked), as the data set has them.

    The model gives a logit for each token of the vocabulary at each place. Places of weight 0 do not count. The
    perplexity is exp(loss) over all tokens that count.

    Args:
        loss: default: cross-entropy of the logits, the mean over the tokens that count.
        metrics: default: accuracy.
    """

    output = "logits of the token at each place; keras.ops.softmax makes them probabilities"
    best = "perplexity"

    def __init__(self, loss: Losses = None, metrics: Metrics | None = None, best: str | None = None) -> None:
        reduction = "mean_with_sample_weight"
        super().__init__(
            keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction) if loss is None else loss,
            {"accuracy": keras.metrics.SparseCategoricalAccuracy()} if metrics is None else metrics,
            best,
        )

    def output_shape(self, source: Source) -> tuple[Any, ...]:
        return *source.element_spec[1].shape, source.fact("vocabulary_size", "task=language")

    def check_targets(self, source: Source) -> None:
        target = source.element_spec[1]
        if not (hasattr(target, "dtype") and target.dtype.is_integer and target.shape.rank == 1):
            raise refuse_targets("language", "a row of tokens as whole numbers", source)

    def fault(self, targets: np.ndarray, source: Source) -> tuple[int, str] | None:
        size = source.facts()["vocabulary_size"]
        wrong = ((targets < 0) | (targets >= size)).any(axis=1)
        return (int(np.argmax(wrong)), f"holds a token outside 0 ... {size - 1}") if wrong.any() else None

    def examples(self, number: int, source: Source) -> tuple[np.ndarray, np.ndarray]:
        rng, size = np.random.default_rng(0), 8
        targets = rng.integers(size, size=(number, 4), dtype=np.int32)
        return targets, rng.normal(size=(number, 4, size)).astype(np.float32)

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.argmax(axis=-1)

    def results(self, metrics: Mapping[str, float]) -> dict[str, float]:
        perplexity = float(np.exp(min(metrics["loss"], MAX_CROSS_ENTROPY)))
        return {**metrics, "perplexity": perplexity}
