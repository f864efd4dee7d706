"""Networks: sizes to the parameter, logits in float32, names that a second build repeats, arguments refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from hvtrain import models
from hvtrain.config.compose import compose
from hvtrain.config.instantiate import build
from hvtrain.config.schema import from_dict
from hvtrain.errors import ConfigError

SMALL_MOBILENET = {"name": "MobileNetV3Small"}


def count(variables: list[keras.Variable]) -> int:
    return sum(int(np.prod(variable.shape)) for variable in variables)


@pytest.fixture
def mixed_bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


def test_known_sizes_are_met_to_the_parameter():
    assert models.cnn((28, 28, 1), 10).count_params() == 1_199_882
    assert models.separable_cnn((28, 28, 1), 10).count_params() == 2_887_306
    assert models.mlp((28, 28, 1), 10, hidden=[]).count_params() == 784 * 10 + 10
    resnet = models.resnet20((32, 32, 3), 10)
    assert count(resnet.trainable_variables) == 272_474
    # A moving mean and variance for each of 784 channels.
    assert resnet.count_params() == 272_474 + 2 * 784


def test_resnet50_of_imagenet_is_the_published_one():
    resnet = models.resnet50_v1_5((64, 64, 3), 1000)
    # Of torchvision's resnet50, which is the paper's.
    assert count(resnet.trainable_variables) == 25_557_032
    sizes = [
        resnet.get_layer(f"conv3_block1_{number}_conv").output.shape[1] for number in (1, 2, 3)
    ]
    assert sizes == [16, 8, 8], "the 3x3 convolution halves the image"
    # Blocks begin as their shortcuts: all that the last batch normalization gives is its beta of 0.
    block = keras.Model(resnet.input, resnet.get_layer("conv4_block2_3_bn").output)
    images = np.random.default_rng(0).random((2, 64, 64, 3), dtype=np.float32)
    assert not np.any(block(images, training=True))
    colors = keras.Model(resnet.input, resnet.get_layer("colors").output)
    np.testing.assert_allclose(colors(np.full((1, 64, 64, 3), 0.485))[0, 0, 0, 0], 0, atol=1e-6)
    first, second = (resnet.get_layer(f"conv2_block{number}_2_conv").kernel for number in (1, 2))
    assert not np.array_equal(first, second), "each layer draws its own numbers"


def test_resnet_depth_follows_its_blocks():
    resnet = models.resnet20((32, 32, 3), 10, blocks_per_stage=9)
    assert resnet.name == "resnet56"
    assert count(resnet.trainable_variables) == 855_770  # "0.85M" in the paper's table 6


@pytest.mark.parametrize("network", ["mlp", "cnn", "separable_cnn", "resnet20"])
@pytest.mark.parametrize("image_shape", [(8, 8, 1), (28, 28, 1), (33, 40, 3)])
def test_any_image_shape_gives_one_logit_per_class(network, image_shape):
    model = getattr(models, network)(image_shape, num_outputs=7)
    images = np.random.default_rng(0).standard_normal((2, *image_shape), dtype=np.float32)
    logits = np.asarray(model(images))
    assert logits.shape == (2, 7)
    assert model.layers[-1].activation is keras.activations.linear, "probabilities, not logits"
    assert not getattr(model, "compiled", False)


@pytest.mark.parametrize("network", ["mlp", "cnn", "separable_cnn", "resnet20"])
def test_logits_stay_float32_under_mixed_precision(network, mixed_bfloat16):
    model = getattr(models, network)((16, 16, 1), num_outputs=10)
    assert model.output.dtype == "float32"
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    assert model.layers[-2].compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("network", "options"),
    [
        ("mlp", {"dropout": 0.5}),
        ("cnn", {}),
        ("separable_cnn", {}),
        ("resnet20", {}),
        ("application", SMALL_MOBILENET),
    ],
)
def test_a_second_build_has_the_same_names(network, options):
    first, second = (getattr(models, network)((32, 32, 3), 10, **options) for _ in range(2))
    assert [layer.name for layer in first.layers] == [layer.name for layer in second.layers]
    paths = [weight.path for weight in first.weights]
    assert paths == [weight.path for weight in second.weights]
    assert len(set(paths)) == len(paths)


def test_an_application_takes_normalized_images_and_its_own_options():
    model = models.application((32, 32, 3), 10, **SMALL_MOBILENET, alpha=0.5, dropout=0.2)
    plain = keras.applications.MobileNetV3Small(
        weights=None, include_top=False, input_shape=(32, 32, 3)
    )
    assert "Rescaling" in {type(layer).__name__ for layer in plain.layers}
    assert not {"Rescaling", "Normalization"} & {type(layer).__name__ for layer in model.layers}
    assert [layer.name for layer in model.layers[-2:]] == ["dropout", "logits"]
    assert model.count_params() < plain.count_params()


def refuse(message: str, network: str, image_shape=(28, 28, 1), num_outputs=10, **options) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(models, network)(image_shape, num_outputs, **options)


def test_impossible_images_and_classes_are_refused():
    refuse("7x28; it needs 8x8 or more", "separable_cnn", image_shape=(7, 28, 1))
    refuse("5x5; it needs 6x6 or more", "cnn", image_shape=(5, 5, 1))
    refuse("expected a positive integer. Received: units=0", "mlp", num_outputs=0)
    refuse(r"at least 32x32; Received: input_shape=\(28, 28, 1\)", "application", name="ResNet50")


def test_impossible_options_are_refused():
    refuse("expected a positive integer. Received: units=0", "mlp", hidden=[128, 0])
    refuse("activation function identifier: rellu", "mlp", activation="rellu")
    refuse("between 0 and 1. Received: rate=2", "mlp", dropout=2)
    refuse("it needs two fractions", "cnn", dropout=[0.5])
    refuse("between 0 and 1. Received: rate=-0.1", "cnn", dropout=[0.5, -0.1])
    refuse("blocks_per_stage=0; it needs at least 1", "resnet20", blocks_per_stage=0)
    refuse("initializer identifier: lecun", "separable_cnn", depthwise_initializer="lecun")
    refuse("initializer identifier: unit_gain", "separable_cnn", initializer="unit_gain")


def test_a_run_shows_what_keras_refuses_in_one_line():
    config = from_dict(compose(["model=mlp", "model.activation=rellu", "dataset=digits"]))
    with pytest.raises(ConfigError) as caught:
        build(config, "model", keras.Model, input_shape=(8, 8, 1), num_outputs=10)
    assert str(caught.value) == (
        "model._target_=hvtrain.models.mlp cannot be used: Could not interpret activation function identifier: "
        "rellu; fix the settings of model, or see --help"
    )


def test_a_function_that_hides_the_module_of_its_name_is_the_target(tmp_path, monkeypatch):
    package = tmp_path / "hiding"
    package.mkdir()
    (package / "__init__.py").write_text("from hiding.net import net\n")
    (package / "net.py").write_text(
        "import keras\n\ndef net(num_outputs, hidden=()):\n"
        "    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(num_outputs)])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = from_dict(
        compose(
            [
                "model=mlp",
                "~model.activation",
                "~model.dropout",
                "model._target_=hiding.net",
                "dataset=digits",
            ]
        )
    )
    model = build(config, "model", keras.Model, facts={"num_outputs": 3})
    assert model.output_shape == (None, 3)


@pytest.mark.parametrize(
    ("word", "group", "line"),
    [
        (
            "model._target_=no_such.net",
            "model",
            "model._target_=no_such.net cannot be used: No module named 'no_such'; fix the settings of model",
        ),
        (
            "task.loss._target_=no_such.Loss",
            "task",
            "task.loss cannot be used: No module named 'no_such'; fix the settings of task",
        ),
    ],
)
def test_what_cannot_be_imported_is_named_in_one_line(word, group, line, caplog):
    config = from_dict(compose(["model=mlp", word, "dataset=digits"]))
    with pytest.raises(ConfigError) as caught:
        build(config, group, object)
    assert str(caught.value) == f"{line}, or see --help"
    assert not caplog.records


def test_an_unknown_application_names_the_nearest():
    refuse(r"no network 'resnet-50'; did you mean 'ResNet50'\?", "application", name="resnet-50")
    refuse("no network 'zzz'; known: .*VGG16", "application", name="zzz")
    refuse("unexpected keyword argument 'depth'", "application", name="MobileNetV2", depth=3)
    refuse(
        "multiple values for keyword argument 'weights'",
        "application",
        name="ResNet50",
        weights="imagenet",
    )
