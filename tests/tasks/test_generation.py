"""What a causal model writes."""

import keras
import numpy as np

from hvtrain.core.topology import Topology
from hvtrain.data import from_arrays
from hvtrain.tasks import Classification, Language
from hvtrain.tasks.language import continuation

SIZE, LENGTH = 9, 6


class Successor(keras.Model):
    """Gives the next number after each token a logit of 3, others 0."""

    def __init__(self, sharpness=3.0):
        super().__init__()
        self.sharpness = sharpness

    def call(self, tokens):
        return self.sharpness * keras.ops.one_hot((tokens + 1) % SIZE, SIZE)


def test_the_likeliest_token_each_time():
    assert continuation(Successor(), [2], 5, LENGTH, temperature=0) == [3, 4, 5, 6, 7]
    assert continuation(Successor(), [2, 5, 1], 7, LENGTH, temperature=0) == [
        2,
        3,
        4,
        5,
        6,
        7,
        8,
    ], "past its length"
    assert continuation(Successor(), [2], 5, LENGTH, temperature=0, end=5) == [3, 4]


def test_tokens_are_drawn_as_likely_as_the_model_says():
    drawn = [
        continuation(Successor(), [2], 1, LENGTH, temperature=1, seed=seed)[0]
        for seed in range(400)
    ]
    expected = np.exp(3) / (np.exp(3) + SIZE - 1)
    assert abs(np.mean(np.array(drawn) == 3) - expected) < 0.07
    assert drawn[0] == continuation(Successor(), [2], 1, LENGTH, temperature=1, seed=0)[0]


def test_a_sample_of_a_padded_text_ends_with_the_text():
    """Neither its end nor the padding is shown to the model, which was not trained behind them."""
    text = [2, 3, 4, 5, 6, 7, 8, 0]
    rows = np.array([text + [0] * 4], np.int32)
    inputs, targets = rows[:, :-1], rows[:, 1:]
    task = Language()
    source = from_arrays(inputs, targets, inputs, targets, facts={"vocabulary_size": SIZE})
    source.text_of = lambda tokens: "".join(map(str, tokens))
    source.end_token = 8
    task.has_lengths = True
    model = Successor(sharpness=1e3)
    assert task.sample(model, source, Topology()) == "'234' -> '567'"
    assert task._prompt(np.array([8, 0, 0]), source) == [8], "a text of nothing but its end"


def test_a_sample_needs_next_tokens_and_a_tokenizer():
    rows = np.random.default_rng(0).integers(SIZE, size=(10, LENGTH + 1)).astype(np.int32)
    task = Language()

    def source(targets, with_text=True):
        made = from_arrays(
            rows[:, :-1], targets, rows[:, :-1], targets, facts={"vocabulary_size": SIZE}
        )
        made.text_of = (lambda tokens: "".join(map(str, tokens))) if with_text else made.text_of
        return made

    inputs_only = source(rows[:, 1:])
    prompt, written = task.sample(Successor(), inputs_only, Topology()).split(" -> ")
    assert prompt == repr("".join(map(str, rows[0, :-1]))) and len(written) == 32 + 2
    assert task.sample(Successor(), source(rows[:, :-1]), Topology()) is None, "masked"
    assert task.sample(Successor(), source(rows[:, 1:], with_text=False), Topology()) is None
    assert (
        task.unit(inputs_only) == ("tokens", LENGTH) and Classification().unit(inputs_only) is None
    )
