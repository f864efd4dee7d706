"""The transformer: what each place sees, logits in float32, and a file that plain Keras loads."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvtrain.errors import ConfigError
from hvtrain.models import transformer
from hvtrain.models.memory import flops_per_example
from launching import without_hvtrain

LENGTH, VOCABULARY = 8, 20
SMALL = {"blocks": 2, "width": 16, "heads": 2}
TOKENS = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH)).astype(np.int32)


def build(**options):
    keras.utils.set_random_seed(0)
    model = transformer(tf.TensorSpec((LENGTH,), tf.int32), VOCABULARY, **{**SMALL, **options})
    model.set_weights(
        [weight + 0.1 * np.random.normal(size=weight.shape) for weight in model.get_weights()]
    )
    return model


def logits(model, tokens):
    return model(tokens, training=False).numpy()


def changed(model, position):
    """Whether the logits at each place change with the token of one."""
    other = TOKENS.copy()
    other[:, position] = (other[:, position] + 1) % VOCABULARY
    return np.abs(logits(model, TOKENS) - logits(model, other)).max(axis=(0, 2)) > 1e-6


def test_a_causal_model_sees_no_later_tokens():
    model = build()
    for position in (0, 3, LENGTH - 1):
        assert changed(model, position).tolist() == [at >= position for at in range(LENGTH)]


def test_another_one_sees_all():
    assert changed(build(causal=False), 3).all()


@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_not_seen(causal):
    """Places before the padding have the same logits whatever it holds."""
    padded = TOKENS.copy()
    padded[:, 5:] = 0
    seen, unseen = (build(causal=causal, mask_zero=mask_zero) for mask_zero in (False, True))
    seen.set_weights(unseen.get_weights())
    places = next(layer for layer in unseen.layers if layer.name == "place_embedding")
    before = logits(unseen, padded)[:, :5]
    places.embeddings.assign(np.concatenate([places.embeddings.numpy()[:5], np.full((3, 16), 9.0)]))
    np.testing.assert_allclose(logits(unseen, padded)[:, :5], before, atol=1e-6)
    if not causal:
        assert np.abs(logits(seen, padded)[:, :5] - before).max() > 1e-3


def test_embedding_and_head_are_one_matrix():
    model = build()
    assert [weight.path for weight in model.weights if VOCABULARY in weight.shape] == [
        "token_embedding/embeddings"
    ]
    defaults = transformer(tf.TensorSpec((128,), tf.int32), 2048)
    assert defaults.count_params() == 1_071_872


def test_logits_stay_float32_under_mixed_precision():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = build()
        assert model.output.dtype == "float32" and logits(model, TOKENS).dtype == np.float32
        assert model.get_layer("block1_mlp1").compute_dtype == "bfloat16"
    finally:
        keras.config.set_dtype_policy(before)


def test_a_second_build_has_the_same_names_and_other_numbers():
    first, second = build(), build()
    assert [layer.name for layer in first.layers] == [layer.name for layer in second.layers]
    paths = [weight.path for weight in first.weights]
    assert paths == [weight.path for weight in second.weights] and len(set(paths)) == len(paths)
    model = transformer(tf.TensorSpec((LENGTH,), tf.int32), VOCABULARY, **SMALL)
    kernels = [
        weight.numpy()
        for weight in model.weights
        if "/query/kernel" in weight.path or "/key/kernel" in weight.path
    ]
    assert len({kernel.tobytes() for kernel in kernels}) == 4


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "output_shape": (3,)},
        {"causal": False},
        {"causal": False, "output_shape": (3,)},
    ],
)
def test_what_fills_a_text_up_changes_nothing(options):
    """Logits at each position of a text, or of its class, are those of the text alone."""
    keras.utils.set_random_seed(0)
    spec = tf.TensorSpec((None,), tf.int32)
    model, blind = (
        transformer(spec, VOCABULARY, length=LENGTH, padded=padded, **SMALL, **options)
        for padded in (True, False)
    )
    blind.set_weights(model.get_weights())
    filled = np.pad(TOKENS[:, :5], [(0, 0), (0, 3)])
    alone = logits(model, TOKENS[:, :5])
    part = (slice(None),) if "output_shape" in options else (slice(None), slice(5))
    np.testing.assert_allclose(logits(model, filled)[part], alone, atol=1e-6)
    assert alone.shape == ((2, 3) if "output_shape" in options else (2, 5, VOCABULARY))
    assert np.isfinite(logits(model, np.zeros_like(TOKENS))).all(), "a text of padding alone"
    if options != {"causal": True}:
        assert np.abs(logits(blind, filled)[part] - alone).max() > 1e-4


@pytest.mark.parametrize("mask_zero", [False, True])
def test_the_file_loads_in_plain_keras(mask_zero, tmp_path):
    model = build(mask_zero=mask_zero)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "tokens.npy", TOKENS)
    script = """
import keras, numpy as np
np.save("logits.npy", keras.models.load_model("model.keras")(np.load("tokens.npy")))
"""
    without_hvtrain(script, tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), logits(model, TOKENS), atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (
            tf.TensorSpec((8, 8, 1), tf.float32),
            {},
            "it needs a row of integer tokens with a known maximum length",
        ),
        ({"a": tf.TensorSpec((8,), tf.int32)}, {}, "it needs a row of integer tokens"),
        (tf.TensorSpec((8,), tf.int32), {"blocks": 0}, "blocks=0; it needs at least 1"),
        (
            tf.TensorSpec((8,), tf.int32),
            {"heads": 3},
            "width=16 and heads=3; the heads must divide the width evenly",
        ),
        (tf.TensorSpec((8,), tf.int32), {"heads": 0}, "heads=0; it needs at least 1"),
    ],
)
def test_what_it_cannot_take_is_refused(spec, options, message):
    with pytest.raises(ConfigError, match=message):
        transformer(spec, VOCABULARY, **{**SMALL, **options})


def test_operations_are_counted_from_the_shapes():
    """Of 2 blocks: 12 width^2 a position for kernels, 2 length x width for attention; and the head, not the lookup."""
    width, positions = 16, LENGTH
    block = 12 * width**2 + 2 * LENGTH * width
    assert flops_per_example(build()) == 6 * positions * (2 * block + VOCABULARY * width)
    image = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, padding="same", use_bias=False)]
    )
    assert flops_per_example(image) == 6 * 8 * 8 * 4 * 3 * 9
    steps = keras.Sequential([keras.Input((7, 2)), keras.layers.SimpleRNN(5, use_bias=False)])
    assert flops_per_example(steps) == 6 * 7 * (2 * 5 + 5 * 5)
    wider = keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same", use_bias=False)
    assert flops_per_example(keras.Sequential([keras.Input((8, 8, 2)), wider])) == 6 * 64 * 72, (
        "once at each position of its input"
    )
    sizes = {"below": 4, "head": 3, "above": 2}
    dense = {name: keras.layers.Dense(size, use_bias=False) for name, size in sizes.items()}
    dense["below"].trainable = dense["above"].trainable = False
    partly_frozen = keras.Sequential([keras.Input((5,)), *dense.values()])
    assert flops_per_example(partly_frozen) == 2 * 20 + 6 * 12 + 4 * 6
    both = keras.layers.Bidirectional(keras.layers.SimpleRNN(5, use_bias=False))
    assert flops_per_example(keras.Sequential([keras.Input((7, 2)), both])) == 2 * 6 * 7 * 35
    assert (
        flops_per_example(keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(3)])) is None
    )
