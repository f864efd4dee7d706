"""model=keras_hub: tasks and backbones by name, what a data set and a task need of them, and refusals in one line."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvtrain.errors import ConfigError
from hvtrain.models.hub_models import hub_model
from launching import without_hvtrain

hub = pytest.importorskip(
    "keras_hub", reason="keras-hub is not installed; ./scripts/run pytest does it"
)

TEXT, IMAGE = {"input_spec": tf.TensorSpec((16,), tf.int32), "vocabulary_size": 100}, (32, 32, 3)
PICTURE = {"input_spec": tf.TensorSpec(IMAGE, tf.float32), "image_shape": IMAGE}
SMALL = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
VIT = {"patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
RESNET = {
    "input_conv_filters": [64], "input_conv_kernel_sizes": [3], "stackwise_num_filters": [64, 64],
    "stackwise_num_blocks": [1, 1], "stackwise_num_strides": [1, 2], "block_type": "basic_block",
}  # fmt: skip
PAIR = dict.fromkeys(("encoder_token_ids", "decoder_token_ids"), TEXT["input_spec"])
TOKENS = np.random.default_rng(0).integers(1, 100, (3, 16)).astype("int32")


def build(name, shape, backbone=SMALL, **options):
    facts = {"output_shape": shape, "num_outputs": shape[-1] if shape else None}
    return hub_model(name=name, backbone=backbone, **{**TEXT, **facts, **options})


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("BertTextClassifier", (3,), {}),
        ("RobertaTextClassifier", (1,), {}),
        ("BertMaskedLM", (16, 100), {}),
        ("GPT2CausalLM", (16, 100), {}),
        ("BertBackbone", (3,), {"dropout": 0.1}),
        ("BertBackbone", (16, 100), {}),
        ("GPT2Backbone", (2,), {"padding_token": 0}),
        ("BartSeq2SeqLM", (16, 100), {"input_spec": PAIR}),
        ("ViTImageClassifier", (3,), {**PICTURE, "vocabulary_size": None, "backbone": VIT}),
        ("ViTBackbone", (3,), {**PICTURE, "backbone": VIT}),
        ("ResNetImageClassifier", (3,), {**PICTURE, "backbone": RESNET}),
        ("ResNetBackbone", (*IMAGE[:2], 4), {**PICTURE, "backbone": RESNET}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_outputs_are_logits_of_the_shape_that_the_task_needs(name, shape, options, policy):
    if (name, policy) == ("BertMaskedLM", "mixed_bfloat16"):
        pytest.skip(
            "keras-hub's MaskedLMHead adds a bias in float32 to what is in bfloat16 under mixed precision"
        )
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = build(name, shape, **options)
    finally:
        keras.config.set_dtype_policy(before)
    assert model.output.shape == (None, *shape) and model.output.dtype == "float32"
    assert type(model).fit is keras.Model.fit, "a run's own fit, and not that of keras-hub"
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    rng = np.random.default_rng(1)
    inputs = keras.tree.map_structure(
        lambda spec: rng.integers(0, 100, (2, *spec.shape[1:])), model.input
    )
    outputs = keras.ops.convert_to_numpy(model(inputs))
    assert np.isfinite(outputs).all() and outputs.std() > 0


def test_segmentation_with_an_encoder_that_is_a_model_by_itself():
    encoder = hub.models.ResNetBackbone(**RESNET, image_shape=IMAGE)
    options = {
        "image_encoder": encoder,
        "spatial_pyramid_pooling_key": "P3",
        "dilation_rates": [2, 4],
    }
    options |= {"upsampling_size": 2, "projection_filters": 8}
    model = build("DeepLabV3ImageSegmenter", (*IMAGE[:2], 3), options, **PICTURE)
    assert model.output.shape == (None, *IMAGE[:2], 3)


def test_a_custom_task_gets_what_the_model_gives():
    assert set(build("BertBackbone", None).output) == {"sequence_output", "pooled_output"}


def test_a_model_by_name_is_that_of_keras_hub():
    model = build("BertTextClassifier", (3,), padding_token=0)
    plain = hub.models.BertTextClassifier(
        hub.models.BertBackbone(vocabulary_size=100, max_sequence_length=16, **SMALL), num_classes=3
    )
    plain.set_weights(model.get_weights())
    tokens = TOKENS * (np.arange(16) < 11)
    named_inputs = {
        "token_ids": tokens,
        "padding_mask": (tokens != 0).astype("int32"),
        "segment_ids": 0 * tokens,
    }
    np.testing.assert_allclose(model(tokens), plain(named_inputs), rtol=1e-5, atol=1e-6)
    by_name = build(
        "BertTextClassifier", (3,), input_spec=dict.fromkeys(named_inputs, TEXT["input_spec"])
    )
    by_name.set_weights(model.get_weights())
    np.testing.assert_array_equal(by_name(named_inputs), model(tokens))
    assert (
        np.abs(plain({**named_inputs, "padding_mask": np.ones_like(tokens)}) - model(tokens)).max()
        > 1e-6
    )


def test_padding_does_not_count_in_the_mean_of_a_backbone():
    model = build("GPT2Backbone", (2,), padding_token=0)
    short = TOKENS * (np.arange(16) < 5)
    features = model.get_layer("backbone")(
        {"token_ids": short, "padding_mask": (short != 0).astype("int32")}
    )
    expected = model.get_layer("logits")(np.asarray(features)[:, :5].mean(axis=1))
    np.testing.assert_allclose(model(short), expected, rtol=1e-4, atol=1e-6)


def test_a_masked_model_predicts_each_place():
    model = build("BertMaskedLM", (16, 100))
    task = model.get_layer("task")
    named_inputs = {
        "token_ids": TOKENS,
        "padding_mask": np.ones_like(TOKENS),
        "segment_ids": 0 * TOKENS,
    }
    places = np.tile(np.array([[3, 7]]), (3, 1))
    np.testing.assert_allclose(
        np.asarray(model(TOKENS))[:, [3, 7]],
        task({**named_inputs, "mask_positions": places}),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "shape"), [("BertTextClassifier", (3,)), ("GPT2CausalLM", (16, 100))]
)
def test_a_saved_model_loads_without_hvtrain_and_without_warnings(name, shape, tmp_path):
    model = build(name, shape, padding_token=0)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", TOKENS)
    without_hvtrain(
        "import keras, numpy as np; model = keras.models.load_model('model.keras'); "
        "np.save('y.npy', model(np.load('x.npy')))",
        cwd=tmp_path,
    )
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), model(TOKENS), rtol=1e-5, atol=1e-6)
    before, after = model, keras.models.load_model(tmp_path / "model.keras")
    assert len(before.weights) == len(after.weights), "shared embeddings are shared again"


def test_a_second_build_has_the_same_names():
    first, second = (build("RobertaTextClassifier", (3,)) for _ in range(2))
    assert [weight.path for weight in first.weights] == [weight.path for weight in second.weights]
    assert len({weight.path for weight in first.weights}) == len(first.weights)


def refused(message, name="BertTextClassifier", shape=(3,), **options):
    with pytest.raises(ConfigError, match=message) as caught:
        build(name, shape, **options)
    assert "\n" not in str(caught.value)


def test_names_that_keras_hub_lacks_are_refused_with_near_ones():
    refused(
        "no backbone or task 'BertTextClasifier'; choose one such as BertTextClassifier,",
        "BertTextClasifier",
    )
    refused("no backbone or task 'zzz'; choose one such as BertBackbone, GPT2CausalLM", "zzz")
    refused(
        "TextClassifier is a base class; choose a subclass, such as AlbertTextClassifier, .* model.preset",
        "TextClassifier",
    )
    refused("Backbone is a base class; choose a subclass, such as AlbertBackbone", "Backbone")
    refused("RetinaNetObjectDetector has its own loss", "RetinaNetObjectDetector")


def test_impossible_options_are_refused():
    refused("cannot be built: .* missing .* 'num_layers', .*; change model.backbone", backbone={})
    refused(
        r"does not take model.backbone.depth; its options in model.backbone: vocabulary_size, num_layers",
        backbone={**SMALL, "depth": 3},
    )
    refused("take model.pooling; its options in model: num_classes, dropout", pooling="max")
    refused("take model.pooling; its options in model: dropout", "BertBackbone", pooling="max")
    refused("between 0 and 1. Received: rate=2; change", "BertBackbone", dropout=2)
    refused("cannot be built: .*; change model.backbone", backbone={**SMALL, "hidden_dim": -1})


def test_data_that_the_model_cannot_take_are_refused():
    image, two = tf.TensorSpec(IMAGE, tf.float32), tf.TensorSpec((16,), tf.int32)
    refused(
        r"takes token_ids \(None, None\), .* gives token_ids \(None, 32, 32, 3\)", input_spec=image
    )
    refused(
        r"takes .*padding_mask \(None, None\), .* gives tokens \(None, 16\)",
        input_spec={"tokens": two},
    )
    refused("gives token_ids .*, weights", input_spec={"token_ids": two, "weights": two})
    refused(
        r"ViTBackbone takes image .*gives image \(None, 16\)",
        "ViTBackbone",
        image_shape=IMAGE,
        backbone=VIT,
    )
    refused(
        "cannot be built: .* missing .* 'vocabulary_size'; change model.backbone",
        vocabulary_size=None,
    )
    refused(
        "has vocabulary_size=50, and the data set needs 100 tokens",
        backbone={**SMALL, "vocabulary_size": 50},
    )
    refused(
        "has max_sequence_length=8, and the data set needs 16",
        backbone={**SMALL, "max_sequence_length": 8},
    )


def test_a_preset_that_is_not_on_disk_is_refused_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(
        "model.preset=bert_base_en_uncased is not a folder with config.json; .* nothing is downloaded",
        preset="bert_base_en_uncased",
    )
    (tmp_path / "bert_base_en_uncased").mkdir()
    refused("bert_base_en_uncased is not a folder with config.json", preset="bert_base_en_uncased")
    (tmp_path / "bert_base_en_uncased/config.json").write_text("{}")
    refused("cannot be built: ValueError: Unrecognized format", preset="bert_base_en_uncased")


def test_keras_hub_that_is_missing_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    refused(
        "model=keras_hub needs keras-hub .*; install it: .*uv pip install --no-deps -r scripts/lock/keras-hub.txt"
    )


@pytest.mark.nightly
def test_keras_hub_imports_without_tensorflow_text_and_a_second_tensorflow():
    code = """
import sys, importlib.metadata as metadata, keras_hub
names = {one.metadata["Name"].lower().replace("_", "-") for one in metadata.distributions()}
print(sorted(name for name in names if name in ("tensorflow", "tensorflow-cpu", "tensorflow-text")))
print("tensorflow_text" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    installed, is_imported = done.stdout.splitlines()
    assert installed in ("['tensorflow-cpu']", "['tensorflow']") and is_imported == "False"
