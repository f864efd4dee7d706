"""A token for each place in a text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.figures import Figure, Texts
from hvtrain.core.topology import Topology
from hvtrain.data.source import Source
from hvtrain.tasks.reviewed import Reviewed
from hvtrain.tasks.task import Losses, Metrics, Task, refuse_targets

MAX_CROSS_ENTROPY = 50.0  # Above it the perplexity means nothing, and would overflow in the end.
PROMPT_TOKENS, WRITTEN_TOKENS = 16, 32  # Of the sample at the end of a run.
SHOWN_TOKENS = 64  # Of a text with hidden tokens, in the report.


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
    num_reviewed = 3

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

    def unit(self, source: Source) -> tuple[str, int] | None:
        (length,) = source.element_spec[1].shape
        return ("tokens", length) if length else None

    def sample(self, model: keras.Model, source: Source, topology: Topology) -> str | None:
        """The beginning of a text of the test part (or the training part), and how the model goes on.

        None if the targets are not the next tokens, or if the source has no tokenizer.
        """
        split = "test" if source.num_examples("test") else "train"
        first = next(source.evaluation(split, topology, 1).as_numpy_iterator(), None)
        if first is None or not isinstance(first[0], np.ndarray) or first[0].shape != first[1].shape:
            return None
        tokens, targets = first[0][0], first[1][0]
        prompt = tokens[: min(PROMPT_TOKENS, len(tokens))]
        if (tokens[1:] != targets[:-1]).any() or (text := source.text_of(prompt)) is None:
            return None
        written = continuation(model, prompt.tolist(), WRITTEN_TOKENS, len(tokens))
        return f"{text!r} -> {source.text_of(written)!r}"

    def review(self, reviewed: Reviewed, model: keras.Model, source: Source) -> list[Figure]:
        """Texts that the model continued, or whose hidden tokens it filled in."""
        inputs, targets = reviewed.inputs, reviewed.targets
        if not isinstance(inputs, np.ndarray) or inputs.shape != targets.shape or source.text_of(inputs[0]) is None:
            return []

        def text(tokens: Any) -> str:
            return re.sub(r"\s*\n\s*", "\n", source.text_of(tokens) or "")

        is_next = bool((inputs[:, 1:] == targets[:, :-1]).all())
        if is_next:
            written: Any = tf.function(lambda row, training: model(row, training=training), reduce_retracing=True)
            length, prompts = inputs.shape[1], [row[:PROMPT_TOKENS].tolist() for row in inputs]
            pairs = [(text(one), text(continuation(written, one, WRITTEN_TOKENS, length))) for one in prompts]
            note = f"Beginnings of {reviewed.which}, and the model's continuations (temperature 0.7)."
        else:
            filled = np.where(inputs == targets, inputs, self.decode(reviewed.outputs))
            pairs = [(text(one[:SHOWN_TOKENS]), text(two[:SHOWN_TOKENS])) for one, two in zip(inputs, filled)]
            note = f"Texts with hidden tokens, from {reviewed.which}, and the tokens that the model fills in."
        return [Texts("Samples", note, pairs, is_next)]

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.argmax(axis=-1)

    def results(self, metrics: Mapping[str, float]) -> dict[str, float]:
        perplexity = float(np.exp(min(metrics["loss"], MAX_CROSS_ENTROPY)))
        return {**metrics, "perplexity": perplexity}


def continuation(
    model: keras.Model,
    prompt: Sequence[int],
    number: int,
    length: int,
    temperature: float = 0.7,
    seed: int = 0,
    end: int | None = None,
) -> list[int]:
    """The tokens that a model writes after a prompt of at least one; the same for the same seed.

    Args:
        model: from tokens [batch, length] to logits [batch, length, vocabulary]; those at a place do not depend on
            later tokens.
        number: of tokens; fewer if it writes `end`, which is not returned.
        length: of the model. It sees that many of the newest tokens.
        temperature: 0 takes the likeliest token each time; 1 draws them as likely as the model says.
    """
    random, tokens = np.random.default_rng(seed), list(prompt)
    for _ in range(number):
        seen = tokens[-length:]
        row = np.zeros((1, length), np.int32)
        row[0, : len(seen)] = seen
        logits = keras.ops.convert_to_numpy(model(row, training=False))[0, len(seen) - 1].astype(np.float64)
        # The largest sum with Gumbel noise is a draw from softmax(logits / temperature).
        token = int(np.argmax(logits + temperature * random.gumbel(size=len(logits))))
        if token == end:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
