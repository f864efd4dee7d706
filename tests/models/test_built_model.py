"""train.remat and train.sync_batch_norm on a built model: equal results, what is recomputed, what is saved."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import hvtrain.keras as hvd
from hvtrain.config.schema import ModelOptions
from hvtrain.errors import ConfigError
from hvtrain.models import application, resnet20
from hvtrain.models.memory import divide, recompute
from hvtrain.models.parts import change_parts

X = np.random.default_rng(0).normal(size=(8, 8, 8, 2)).astype("float32")
Y = X[:, 0, 0, :2]


def config(remat=False, sync=False, **model):
    train = SimpleNamespace(remat=remat, sync_batch_norm=sync)
    return SimpleNamespace(model_options=ModelOptions(**model), train=train)


def network(depth=5, nested=False):
    """Convolutions with shortcuts, batch normalization and dropout; the same random numbers each time."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    x = image = keras.Input((8, 8, 2))
    for number in range(depth):
        y = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
        y = layers.Dropout(0.2)(
            layers.Activation("gelu")(layers.BatchNormalization(name=f"norm{number}")(y))
        )
        x = layers.Add()([x, y]) if number else y
    if nested:
        x = keras.Model(image, x, name="trunk")(image)
    return keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)), name="network")


def trained(model, jit_compile=False, steps=3):
    """All variables after some steps, and the number of convolutions in the graph of one, forward."""
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    step = tf.function(model.train_step, jit_compile=jit_compile)
    batch = tf.constant(X), tf.constant(Y)
    for _ in range(steps):
        step(batch)
    operations = step.get_concrete_function(batch).graph.get_operations()
    return [v.numpy() for v in model.variables], sum(
        operation.type == "Conv2D" for operation in operations
    )


@pytest.mark.parametrize(
    ("nested", "jit_compile"),
    [
        (False, False),
        pytest.param(True, True, marks=pytest.mark.nightly),
        pytest.param(True, False, marks=pytest.mark.release),
        pytest.param(False, True, marks=pytest.mark.release),
    ],
)
def test_recomputed_values_are_the_same_with_dropout_and_moving_statistics(nested, jit_compile):
    plain, number = trained(network(nested=nested), jit_compile)
    model = network(nested=nested)
    change_parts(model, config(remat=True), 1)
    again, more = trained(model, jit_compile)
    assert len(plain) == len(again) == len(model.variables) > 5 * 5 + 5, "the dropouts' seeds too"
    for expected, other in zip(plain, again):
        np.testing.assert_allclose(expected, other, rtol=1e-5, atol=2e-6)
    assert number == 5 and 8 <= more <= 9, "all but the last segment's are there twice"


def test_inference_and_the_saved_model_stay_as_they_are(tmp_path):
    model = network(nested=True)
    expected = model.predict(X, verbose=0)
    change_parts(model, config(remat=True), 1)
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    model(keras.Input((8, 8, 2)))
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        keras.models.load_model(tmp_path / "model.keras").predict(X, verbose=0), expected
    )


def test_masks_pass_the_ends_of_segments():
    def model_with(remat):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        tokens = keras.Input((4,), dtype="int32")
        x = layers.Embedding(9, 4, mask_zero=True)(tokens)
        for _ in range(3):
            # Keras makes the mask an input of the call.
            x = layers.SimpleRNN(4, return_sequences=True, unroll=True)(x)
        for _ in range(10):
            # Given two tensors, the call finds the mask on them alone. The loss finds it on the output.
            x = layers.MultiHeadAttention(1, 4)(x, x)
        model = keras.Model(tokens, layers.Dense(2)(x))
        if remat:
            assert len(divide(model)) > 3, "more than one is recomputed"
            recompute(model)
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
        texts = np.array([[1, 2, 3, 0], [4, 5, 0, 0]])
        model.fit(texts, np.ones((2, 4, 2)), epochs=3, verbose=0)
        return model.get_weights()

    for expected, other in zip(model_with(False), model_with(True)):
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(expected, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "number"),
    [
        (lambda: resnet20((16, 16, 3), 4), 8),
        pytest.param(
            lambda: application((32, 32, 3), 4, "ResNet50"), 13, marks=pytest.mark.nightly
        ),
    ],
)
def test_segments_end_where_little_is_in_use(model, number):
    segments = divide(model())
    assert abs(len(segments) - number) <= 1, "the root of the number of layers"
    ends = [len(segment.outputs) for segment in segments]
    assert ends.count(1) >= 0.7 * len(ends) and max(ends) <= 2, (
        "between the blocks of a residual network"
    )
    assert sum(len(segment.nodes) for segment in segments) == len(model().layers) - 1


def test_what_cannot_be_recomputed_is_refused():
    class Own(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

    with pytest.raises(
        ConfigError,
        match=r"^train.remat=true needs a Functional or Sequential model, and own is of type Own",
    ):
        change_parts(Own(name="own"), config(remat=True), 1)
    inputs = [
        keras.Input((8, 8, 2)),
        layers.Flatten(),
        layers.Dense(128, activity_regularizer="l2", name="heavy"),
    ]
    model = keras.Sequential([*inputs, layers.Dense(128), layers.Dense(2)])
    change_parts(model, config(remat=True), 1)
    model.compile("sgd", "mse", jit_compile=False, run_eagerly=True)
    with pytest.raises(
        ConfigError, match=r"train.remat=true and a loss on activations of the layer heavy"
    ):
        model.train_on_batch(X, Y)


def test_every_batch_normalization_is_synchronized_in_place_and_saved_as_the_plain_layer(tmp_path):
    hvd.init()
    model = network(nested=True)
    weights, expected = [id(v) for v in model.weights], model.predict(X, verbose=0)
    change_parts(model, config(sync=True), 2)
    norms = [
        layer for layer in model._flatten_layers() if isinstance(layer, layers.BatchNormalization)
    ]
    assert len(norms) == 5
    for layer in norms:
        assert type(layer).__name__ == "BatchNormalization" and not layer.supports_jit
        assert type(layer)._moments is hvd.SyncBatchNormalization._moments
    assert [id(v) for v in model.weights] == weights
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert {type(layer) for layer in loaded._flatten_layers() if hasattr(layer, "moving_mean")} == {
        layers.BatchNormalization
    }
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), expected)


def test_networks_of_keras_are_synchronized_and_one_rank_needs_nothing():
    model = application((32, 32, 3), 4, "MobileNetV3Small")
    change_parts(model, config(sync=True), 1)
    assert {type(layer) for layer in model.layers if hasattr(layer, "moving_mean")} == {
        layers.BatchNormalization
    }
    change_parts(model, config(sync=True), 2)
    changed = {type(layer)._moments for layer in model.layers if hasattr(layer, "moving_mean")}
    assert changed == {hvd.SyncBatchNormalization._moments}


def test_batch_normalization_that_is_not_there_or_not_kerass_own_is_refused():
    class Own(layers.BatchNormalization):
        pass

    plain = keras.Sequential([keras.Input((4,)), layers.Dense(2)], name="plain")
    with pytest.raises(
        ConfigError,
        match=r"^train.sync_batch_norm=true, but plain has no BatchNormalization; leave",
    ):
        change_parts(plain, config(sync=True), 1)
    other = keras.Sequential([keras.Input((4,)), Own(name="odd"), layers.Dense(2)])
    with pytest.raises(
        ConfigError, match=r"^train.sync_batch_norm=true, but the layer odd, of type Own, may norm"
    ):
        change_parts(other, config(sync=True), 2)
    ours = keras.Sequential([keras.Input((4,)), hvd.SyncBatchNormalization(), layers.Dense(2)])
    change_parts(ours, config(sync=True), 2)
