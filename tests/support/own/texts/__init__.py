"""Rows of tokens, padded with 0: the next token as the target, or whether the first one is large."""

import numpy as np

from hvtrain.data import from_arrays
from hvtrain.models import transformer as plain_transformer
from hvtrain.models.hub_models import hub_model

NUM_TRAIN, NUM_TEST, LENGTH, VOCABULARY = 61, 23, 16, 100


def data(language=False, **_):
    rng, count = np.random.default_rng(5), NUM_TRAIN + NUM_TEST
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, (count, 1))
    x = rng.integers(1, VOCABULARY, (count, LENGTH)) * (np.arange(LENGTH) < lengths)
    facts = (
        {"vocabulary_size": VOCABULARY}
        if language
        else {"vocabulary_size": VOCABULARY, "num_classes": 2}
    )
    y = np.roll(x, -1, axis=1) if language else (x[:, 0] > VOCABULARY // 2).astype(int)
    w = (np.arange(LENGTH) < lengths - 1).astype(float) if language else None
    weights = {} if w is None else {"w_train": w[:NUM_TRAIN], "w_test": w[NUM_TRAIN:]}
    parts = x[:NUM_TRAIN], y[:NUM_TRAIN], x[NUM_TRAIN:], y[NUM_TRAIN:]
    return from_arrays(*parts, **weights, name="texts", images=False, facts=facts)


def model(input_spec, num_outputs, output_shape, vocabulary_size, **options):
    """A model of keras-hub without zeros."""
    facts = {
        "num_outputs": num_outputs,
        "output_shape": output_shape,
        "vocabulary_size": vocabulary_size,
    }
    return without_zeros(hub_model(input_spec, **facts, **options))


def transformer(input_spec, vocabulary_size, causal, length, padded, output_shape, **options):
    """hvtrain's transformer without zeros."""
    facts = {"causal": causal, "length": length, "padded": padded, "output_shape": output_shape}
    return without_zeros(plain_transformer(input_spec, vocabulary_size, **facts, **options))


def without_zeros(built):
    """The gradient of a key's bias is 0 but for rounding, since attention does not depend on it.

    So where it began at 0, a difference relative to it would be one of rounding errors.
    """
    rng = np.random.default_rng(3)
    for variable in built.weights:
        if not np.any(variable):
            variable.assign(rng.normal(size=variable.shape, scale=0.1))
    return built
