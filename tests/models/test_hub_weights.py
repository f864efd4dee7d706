"""Presets and files as first weights of models of keras-hub, and which parts of these train. In one process."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from hub_presets import save_preset
from hvtrain.errors import ConfigError
from hvtrain.models.first_weights import begin_with
from hvtrain.models.hub_models import hub_model
from hvtrain.models.memory import recompute
from hvtrain.models.parts import add_lora, freeze, head_of

hub = pytest.importorskip(
    "keras_hub", reason="keras-hub is not installed; ./scripts/run pytest does it"
)

SIZE = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
TOKENS = np.random.default_rng(0).integers(1, 100, (3, 16)).astype("int32")


def build(name="BertTextClassifier", shape=(3,), backbone=SIZE, **options):
    facts = {"input_spec": tf.TensorSpec((16,), tf.int32), "vocabulary_size": 100}
    return hub_model(
        **facts, name=name, num_outputs=shape[-1], output_shape=shape, backbone=backbone, **options
    )


def inside(model):
    task = model.get_layer("task") if "task" in [layer.name for layer in model.layers] else model
    return task.get_layer("backbone")


def same(first, other):
    return all(
        np.array_equal(a, b) for a, b in zip(first.get_weights(), other.get_weights(), strict=True)
    )


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """(folder of a preset with three classes, its model)."""
    folder = tmp_path_factory.mktemp("presets") / "bert"
    backbone = hub.models.BertBackbone(vocabulary_size=100, max_sequence_length=16, **SIZE)
    task = hub.models.BertTextClassifier(backbone, num_classes=3, dropout=0.3)
    save_preset(task, folder)
    return str(folder), task


def test_a_preset_gives_its_architecture_and_its_weights(preset, caplog):
    folder, task = preset
    model = build("TextClassifier", backbone={}, preset=folder)
    assert model.name == "BertTextClassifier" and model.get_layer("task").dropout == 0.3
    assert not same(inside(model), task.backbone), "model.weights brings them"
    with caplog.at_level(logging.INFO):
        begin_with(model, folder)
    assert same(model, task)
    assert caplog.text.rstrip().endswith(f"{task.count_params():,} parameters from {folder}")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("BertTextClassifier", (2,)),
        ("BertBackbone", (2,)),
        ("BertMaskedLM", (16, 100)),
        ("BertBackbone", (16, 100)),
    ],
)
def test_a_head_that_is_another_is_new_and_named(preset, name, shape, caplog):
    folder, task = preset
    model = build(name, shape)
    with caplog.at_level(logging.INFO):
        begin_with(model, folder)
    assert same(inside(model), task.backbone)
    assert all(part.path in caplog.text for part in head_of(model)) and "; new: " in caplog.text


def test_a_saved_model_of_another_task_gives_its_backbone(tmp_path, caplog):
    masked = build("BertMaskedLM", (16, 100))
    masked.save(tmp_path / "masked.keras")
    for model in (build(), build("BertBackbone")):
        with caplog.at_level(logging.INFO):
            begin_with(model, str(tmp_path / "masked.keras"))
        assert same(inside(model), inside(masked))


@pytest.mark.parametrize(
    "size", [{"num_layers": 1}, {"num_layers": 3}, {"hidden_dim": 32}, {"max_sequence_length": 32}]
)
def test_another_backbone_is_refused_by_its_first_difference(preset, size):
    model = build(backbone={**SIZE, **size})
    before = model.get_weights()
    with pytest.raises(
        ConfigError, match=r"bert belongs to another model: it has .* where .* of this model has"
    ):
        begin_with(model, preset[0])
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights())), (
        "none is half loaded"
    )


def test_a_preset_for_another_class_is_refused(preset):
    with pytest.raises(
        ConfigError,
        match=r"GPT2CausalLM does not fit model.preset, .*BertBackbone; choose .*Bert",
    ):
        build("GPT2CausalLM", (16, 100), {}, preset=preset[0])
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="plain")
    with pytest.raises(
        ConfigError,
        match="is a preset of keras-hub, and plain has none of its backbones; choose model=",
    ):
        begin_with(plain, preset[0])


def test_a_folder_with_the_name_of_a_known_preset_is_read_and_not_downloaded(
    preset, tmp_path, monkeypatch
):
    (tmp_path / "bert_tiny_en_uncased").symlink_to(preset[0])
    monkeypatch.chdir(tmp_path)
    model = build("TextClassifier", backbone={}, preset="bert_tiny_en_uncased")
    begin_with(model, "bert_tiny_en_uncased")
    assert same(inside(model), preset[1].backbone)


@pytest.mark.parametrize(
    ("name", "shape"), [("BertTextClassifier", (3,)), ("GPT2CausalLM", (16, 100))]
)
def test_lora_trains_matrices_and_the_head_and_is_added_to_what_is_saved(name, shape, tmp_path):
    model = build(name, shape)
    before = model.count_params()
    add_lora(model, 2)
    head = {id(variable) for part in head_of(model) for variable in part.variables}
    assert all(
        "lora" in variable.name or id(variable) in head for variable in model.trainable_variables
    )
    for variable in model.trainable_variables:
        variable.assign(
            np.random.default_rng(len(variable.path)).normal(size=variable.shape, scale=0.1)
        )
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.count_params() == before
    np.testing.assert_allclose(loaded(TOKENS), model(TOKENS), rtol=1e-3, atol=1e-4)


def test_parts_are_frozen_by_name():
    model = build()
    freeze(model, ["backbone"])
    assert [variable.path for variable in model.trainable_variables] == [
        "logits/kernel",
        "logits/bias",
    ]


@pytest.mark.parametrize(
    ("name", "shape"), [("BertTextClassifier", (3,)), ("GPT2CausalLM", (16, 100))]
)
def test_recomputation_gives_the_same_gradients(name, shape):
    model = build(name, shape, {**SIZE, "dropout": 0.0}, padding_token=0)
    tokens = tf.constant(TOKENS * (np.arange(16) < 9))

    def gradients():
        @tf.function
        def run():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tokens, training=False) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        return [np.asarray(tf.convert_to_tensor(output)) for output in run() if output is not None]

    plain = gradients()
    recompute(model)
    again = gradients()
    assert len(plain) == len(again) > 10
    for a, b in zip(plain, again):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
