"""model.freeze and model.lora_rank: what trains, what does not, and what a saved model has of it."""

import keras
import numpy as np
import pytest
from keras import layers

from hvtrain.errors import ConfigError
from hvtrain.models import application
from hvtrain.models.parts import add_lora, describe_trainable, find_variables, freeze, parts

X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
Y = X[:, :2]


def network():
    """A nested Sequential, built late, batch normalization, attention, and a head."""
    keras.utils.set_random_seed(1)
    stem = keras.Sequential(
        [layers.Dense(4, name="dense"), layers.BatchNormalization(name="bn")], name="stem"
    )
    image = keras.Input((6,))
    x = layers.Reshape((4, 1))(stem(image))
    x = layers.Flatten()(layers.MultiHeadAttention(2, 3, name="attention")(x, x))
    x = layers.Dense(4, "tanh", name="middle")(x)
    return keras.Model(image, layers.Dense(2, name="logits")(x), name="network")


def trained(model):
    """Variables that a step changes."""
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    model.fit(X, Y, epochs=2, verbose=0)
    places = [
        f"{part.path}/{variable.name}" for part in parts(model) for variable in part.variables
    ]
    return {
        path
        for path, old, new in zip(places, before, model.get_weights())
        if not np.array_equal(old, new)
    }


def test_places_are_in_the_order_of_weights_and_the_same_in_a_loaded_model(tmp_path):
    model = network()
    assert [id(v) for part in parts(model) for v in part.variables] == [
        id(v) for v in model.weights
    ]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [part.path for part in parts(loaded)] == [part.path for part in parts(model)]
    assert parts(model)[0].path == "stem/dense" and parts(model)[-1].path == "logits"


@pytest.mark.parametrize(
    ("patterns", "changed"),
    [
        (["stem"], {"attention", "middle", "logits"}),
        (["stem/*", "atten*"], {"middle", "logits"}),
        (["bn"], {"stem/dense", "attention", "middle", "logits"}),
        (["*/query", "middle", "attention/[!q]*", "dense"], {"stem/bn", "logits"}),
    ],
)
def test_frozen_parts_keep_every_bit_and_their_moving_statistics(patterns, changed):
    model = network()
    freeze(model, patterns)
    changed_paths = trained(model)
    # Neither softmax nor the mean square see the keys' bias.
    assert {path for path in changed_paths if "key/bias" not in path} == {
        f"{part.path}/{variable.name}"
        for part in parts(network())
        for variable in part.variables
        if part.path.startswith(tuple(changed))
        and (part.path, variable.name) != ("attention/key", "bias")
    }
    assert len(model.optimizer._trainable_variables) == len(model.trainable_variables), (
        "nothing else is reduced"
    )


def test_single_variables_are_frozen_by_their_place():
    model = network()
    freeze(model, ["*/bias", "stem/bn/gamma"])
    changed_paths = trained(model)
    assert not [path for path in changed_paths if path.endswith(("bias", "gamma"))]
    assert {
        "stem/dense/kernel",
        "stem/bn/beta",
        "stem/bn/moving_mean",
        "logits/kernel",
    } <= changed_paths


def test_how_much_trains_is_said():
    model = network()
    assert describe_trainable(model) == ""
    freeze(model, ["stem", "attention"])
    middle, head = 4 * 4 + 4, 4 * 2 + 2
    assert (
        describe_trainable(model)
        == f"{middle + head} of {28 + 8 + 43 + middle + head} parameters, in 4 variables"
    )


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["midle"],
            "model.freeze names midle, which matches nothing trainable; names in this model include middle",
        ),
        (
            ["conv*"],
            "model.freeze names conv*, which matches nothing trainable; names in this model include ",
        ),
        (
            ["stem", "*"],
            "model.freeze=[stem,*] leaves nothing to train; leave out a layer, such as logits",
        ),
        (
            ["bn/moving_mean"],
            "model.freeze names bn/moving_mean, which matches nothing trainable; names in this model include stem",
        ),
        (["flatten"], "model.freeze names flatten, which matches nothing trainable"),
    ],
)
def test_patterns_that_freeze_nothing_or_all_are_refused(patterns, message):
    with pytest.raises(ConfigError) as caught:
        freeze(network(), patterns)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_networks_of_keras_are_frozen_by_block():
    model = application((32, 32, 3), 5, "MobileNetV3Small")
    freeze(model, ["expanded_conv_*", "conv*"])
    assert {v.path.split("/")[0] for v in model.trainable_variables} == {
        path
        for path in {v.path.split("/")[0] for v in model.weights}
        if not path.startswith(("expanded_conv_", "conv"))
    }
    assert find_variables(model, ["logits"], "x") == {
        id(v) for v in model.weights if v.path.startswith("logits/")
    }


def test_lora_trains_the_matrices_and_the_head_alone_and_is_saved_as_a_plain_model(tmp_path):
    model = network()
    first = model(X)
    add_lora(model, 2)
    np.testing.assert_array_equal(model(X), first, "the second matrix is zero")
    changed_paths = trained(model)
    adapted = [
        "stem/dense",
        *(f"attention/{name}" for name in ("query", "key", "value", "attention_output")),
        "middle",
    ]
    assert changed_paths == {
        *(f"{path}/lora_kernel_{which}" for path in adapted for which in "ab"), "logits/kernel", "logits/bias"
    }  # fmt: skip
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert loaded.count_params() == network().count_params()
    np.testing.assert_allclose(loaded(X), model(X), rtol=1e-5, atol=1e-6)
    assert np.abs(loaded(X) - first).max() > 0.01


def test_lora_takes_embeddings_and_can_be_frozen_in_part():
    tokens = keras.Input((5,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(7, 3, name="words")(tokens))
    model = keras.Model(tokens, layers.Dense(2, name="logits")(layers.Dense(3, name="middle")(x)))
    add_lora(model, 1)
    freeze(model, ["middle"])
    names = [variable.path for variable in model.trainable_variables]
    assert names == [
        "words/lora_embeddings_a",
        "words/lora_embeddings_b",
        "logits/kernel",
        "logits/bias",
    ]


def test_lora_without_a_layer_for_it_is_refused():
    model = keras.Sequential(
        [keras.Input((4, 4, 1)), layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(2)], name="c"
    )
    with pytest.raises(
        ConfigError,
        match=r"model.lora_rank=2, but c has no Dense, .* before its head .dense.*; freeze",
    ):
        add_lora(model, 2)
