"""The task of predicting tokens, and the generation of text with a causal model, token by token."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import Model

from hvtrain.core.figures import Figure, Texts
from hvtrain.core.topology import Topology
from hvtrain.data.source import Source
from hvtrain.tasks.examples import ReviewedExamples
from hvtrain.tasks.task import ClassTask, Losses

# Above this cross-entropy the perplexity, exp(50), is meaningless; at 710 it would overflow.
MAX_CROSS_ENTROPY = 50.0
# In samples, the length of the prompt, and of the continuation that the model writes.
PROMPT_TOKENS = 16
WRITTEN_TOKENS = 32
# The number of tokens that the report shows of a text with hidden tokens.
SHOWN_TOKENS = 64


class Language(ClassTask):
    """Predicting a token at each position: the next one (causal) or a hidden one (masked), depending on the data set.

    The model outputs a logit for each token of the vocabulary at each position. Positions with weight
    0 do not count. The perplexity is exp(loss) over all tokens that count.

    Args:
        loss: Default: cross-entropy of the logits, as a mean over the tokens that count.
        metrics: Default: accuracy.

    Example:

    >>> Language().results({"loss": 0.0, "accuracy": 1.0})
    {'loss': 0.0, 'accuracy': 1.0, 'perplexity': 1.0}
    """

    name = "language"
    target = "a row of tokens as whole numbers"
    output = "logits of the token at each position; keras.ops.softmax makes them probabilities"
    best = "perplexity"
    target_rank = 1
    num_classes_fact = "vocabulary_size"
    num_reviewed = 3
    has_lengths = False
    """True if batches are padded to different lengths. prepare() sets it."""

    def prepare(self, source: Source) -> None:
        super().prepare(source)
        self.has_lengths = source.lengths("train") is not None

    def bind(self, model: Model, parts: Sequence[Any]) -> None:
        if not self.has_lengths:
            return
        compute_metrics = model.compute_metrics

        # Keras's metrics first take the mean over an example's positions, so a token
        # would count less in a batch that is padded to a greater length. Here each
        # position counts as one example.
        def count_tokens(x, y, y_pred, sample_weight=None):
            logits = tf.reshape(y_pred, [-1, y_pred.shape[-1]])
            return compute_metrics(x, tf.reshape(y, [-1]), logits, tf.reshape(sample_weight, [-1]))

        model.compute_metrics = count_tokens

    def default_loss(self) -> Losses:
        # Divides by the sum of weights; Keras's default would divide by the number of all tokens.
        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )

    def unit(self, source: Source) -> tuple[str, int] | None:
        (length,) = source.element_spec[1].shape
        lengths = source.lengths("train")
        if lengths is not None:
            length = round(float(lengths.mean()))
        return ("tokens", length) if length else None

    def sample(self, model: Model, source: Source, topology: Topology) -> str | None:
        """Returns the beginning of a text from the test split (or else the training split) and its continuation.

        Returns None if the targets are not the next tokens, or if the source has no tokenizer.
        """
        # Prefers a text on which the model was not trained.
        split = "test" if source.num_examples("test") else "train"
        batch = next(source.evaluation(split, topology, 1).as_numpy_iterator(), None)
        if batch is None:
            return None

        inputs, targets = batch[:2]
        if not isinstance(inputs, np.ndarray) or not _is_causal(inputs, targets):
            return None

        prompt = self._prompt(inputs[0], source)
        text = source.text_of(prompt)
        # Without a tokenizer there would be only numbers to show.
        if text is None:
            return None

        written = self._continue(model, prompt, inputs, source)
        return f"{text!r} -> {source.text_of(written)!r}"

    def _prompt(self, row: np.ndarray, source: Source) -> list[int]:
        """Returns the tokens that begin a text: not its end, nor the padding behind that."""
        tokens = row.tolist()
        if not self.has_lengths or source.end_token not in tokens:
            return tokens[:PROMPT_TOKENS]
        # Something of a short text is left to the model.
        num_tokens = tokens.index(source.end_token)
        return tokens[: min(PROMPT_TOKENS, max(1, num_tokens // 2))]

    def _continue(
        self, model: Any, prompt: Sequence[int], inputs: np.ndarray, source: Source
    ) -> list[int]:
        """Returns the model's continuation of a prompt, up to the end of the text if texts have one each."""
        length = source.facts().get("length") or inputs.shape[1]
        end = source.end_token if self.has_lengths else None
        return continuation(model, prompt, WRITTEN_TOKENS, length, end=end)

    def review(self, reviewed: ReviewedExamples, model: Model, source: Source) -> list[Figure]:
        """Returns texts that the model has continued, or whose hidden tokens it has filled in."""
        inputs, targets = reviewed.inputs, reviewed.targets
        # Only token arrays of a source with a tokenizer can be shown as text.
        is_text = isinstance(inputs, np.ndarray) and inputs.shape == targets.shape
        if not is_text or source.text_of(inputs[0]) is None:
            return []

        def text(tokens):
            # Keeps single line breaks, but drops the white space around them.
            return re.sub(r"\s*\n\s*", "\n", source.text_of(tokens) or "")

        # The targets show whether the model has learned to predict next or hidden tokens.
        is_causal = _is_causal(inputs, targets)
        if is_causal:
            # All calls share one graph, since calling the model eagerly
            # for each token would be slow.
            model_graph: Any = tf.function(model)
            shown: Any = [self._prompt(row, source) for row in inputs]
            written: Any = [self._continue(model_graph, prompt, inputs, source) for prompt in shown]
            note = f"Beginnings of {reviewed.description}, and the model's continuations (temperature 0.7)."
        else:
            shown = inputs[:, :SHOWN_TOKENS]
            filled = np.where(inputs == targets, inputs, self.decode(reviewed.outputs))
            written = filled[:, :SHOWN_TOKENS]
            note = f"Texts with hidden tokens, from {reviewed.description}, and the tokens that the model fills in."
        pairs = [(text(before), text(after)) for before, after in zip(shown, written)]
        return [Texts("Samples", note, pairs, is_causal)]

    def results(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {**metrics, "perplexity": float(np.exp(min(metrics["loss"], MAX_CROSS_ENTROPY)))}


def _is_causal(inputs: np.ndarray, targets: np.ndarray) -> bool:
    """True if the targets [examples, length] are the tokens that follow the inputs at each position."""
    return inputs.shape == targets.shape and bool((inputs[:, 1:] == targets[:, :-1]).all())


def continuation(
    model: Model,
    prompt: Sequence[int],
    max_tokens: int,
    length: int,
    temperature: float = 0.7,
    seed: int = 0,
    end: int | None = None,
) -> list[int]:
    """Generates tokens after a prompt, one by one, and returns them. The same seed gives the same tokens.

    Args:
        model: Maps tokens [batch, length] to logits [batch, length, vocabulary], where the logits at a
            position do not depend on later tokens.
        prompt: Tokens to continue, at least one.
        max_tokens: The maximum number of tokens to generate.
        length: The model's context: how many of the latest tokens it sees.
        temperature: 0 always takes the likeliest token; 1 samples from the model's distribution.
        seed: The seed for sampling.
        end: The token that ends a text early; it is not returned.
    """
    rng = np.random.default_rng(seed)
    tokens = list(prompt)
    for _ in range(max_tokens):
        context = tokens[-length:]
        # The row always has the full length, so that a graph is traced only once. Padding comes
        # after the context, where it cannot change the logits at the context's last position.
        row = np.zeros((1, length), np.int32)
        row[0, : len(context)] = context
        outputs = keras.ops.convert_to_numpy(model(row, training=False))
        logits = outputs[0, len(context) - 1].astype(np.float64)

        # The Gumbel-max trick: the index of the largest sum is a sample from
        # softmax(logits / temperature).
        noise = rng.gumbel(size=len(logits))
        token = int(np.argmax(logits + temperature * noise))

        if token == end:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
