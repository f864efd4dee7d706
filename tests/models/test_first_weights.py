"""model.weights: from each kind of source the same weights, a new head is left out, another model is refused."""

import logging
import shutil

import keras
import numpy as np
import pytest
from keras import layers

from hvtrain.checkpoint import model_state, writer
from hvtrain.errors import ConfigError
from hvtrain.models.deeplab import deeplabv3plus
from hvtrain.models.first_weights import begin_with
from hvtrain.models.parts import add_lora, parts


def network(seed=1, classes=3, width=4, head="logits", deep=False, name="net"):
    keras.utils.set_random_seed(seed)
    stem = keras.Sequential(
        [layers.Dense(5, name="d"), layers.BatchNormalization(name="bn")], name="stem"
    )
    image = keras.Input((6,))
    x = layers.Dense(width, name="middle")(stem(image))
    x = layers.Dense(width, name="deep")(x) if deep else x
    return keras.Model(image, layers.Dense(classes, name=head)(x), name=name)


def checkpoint(model, folder, step=3):
    model.compile(keras.optimizers.SGD())
    model.optimizer.build(model.trainable_variables)
    writer.write(folder / "checkpoints", step, model_state.snapshot(model, [], {}, {}), {})


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same weights in all kinds of sources."""
    folder, model = tmp_path_factory.mktemp("sources"), network()
    for variable in model.weights:
        variable.assign(np.random.default_rng(len(variable.path)).normal(size=variable.shape))
    raw = keras.Input((6,))
    whole = keras.Model(raw, model(layers.Rescaling(0.5)(raw)), name="net_from_raw")
    whole.save(folder / "whole.keras")
    model.save(folder / "plain.keras")
    checkpoint(model, folder / "checkpointed")
    # With the optimizer, since the model is compiled by now.
    model.save_weights(folder / "plain.weights.h5")
    checkpoint(network(7), folder / "run")
    whole.save(folder / "run/model.keras")
    damaged = folder / "damaged"
    shutil.copytree(folder / "checkpointed", damaged)
    checkpoint(network(7), damaged, 9)
    (damaged / "checkpoints/step-00000009/meta.json").write_text("{}")
    return folder, model


KINDS = ["whole.keras", "plain.keras", "plain.weights.h5", "checkpointed", "run", "damaged"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_the_same_weights(sources, kind, caplog):
    folder, expected = sources
    model = network(2)
    with caplog.at_level(logging.INFO):
        begin_with(model, str(folder / kind))
    for ours, other in zip(model.get_weights(), expected.get_weights()):
        np.testing.assert_array_equal(ours, other)
    assert (
        f"weights        {expected.count_params()} parameters from {folder / kind}" in caplog.text
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "head", [{"classes": 7}, {"head": "another"}, {"head": "another", "classes": 7}]
)
def test_a_head_of_another_size_or_name_is_left_out_and_named(sources, kind, head, caplog):
    folder, expected = sources
    model = network(2, **head)
    fresh = model.get_weights()
    with caplog.at_level(logging.INFO):
        begin_with(model, str(folder / kind))
    body = len(fresh) - 2
    for ours, other in zip(model.get_weights(), [*expected.get_weights()[:body], *fresh[body:]]):
        np.testing.assert_array_equal(ours, other)
    assert (
        f"; new: {head.get('head', 'logits')}/kernel (4, {head.get('classes', 3)})" in caplog.text
    )


def test_the_matrices_of_lora_are_added_and_left_out(tmp_path):
    tuned = network(3)
    add_lora(tuned, 2)
    for variable in tuned.trainable_variables:
        variable.assign(np.random.default_rng(len(variable.path)).normal(size=variable.shape))
    checkpoint(tuned, tmp_path)
    tuned.save(tmp_path / "tuned.keras")
    x = np.random.default_rng(0).normal(size=(9, 6))
    for source in (tmp_path / "tuned.keras", tmp_path):
        plain, again = network(4), network(4)
        add_lora(again, 3)
        for model in (plain, again):
            begin_with(model, str(source))
            np.testing.assert_allclose(model(x), tuned(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"width": 8},
            r"it has shape \(5, 4\) where middle/kernel of this model has shape \(5, 8\); choose the model",
        ),
        (
            {"deep": True},
            r"it has nothing where deep/kernel of this model has shape \(4, 4\); choose the model",
        ),
    ],
)
def test_another_model_is_refused_in_one_line_by_its_first_difference(
    sources, kind, other, message
):
    folder, _ = sources
    model = network(2, **other)
    before = model.get_weights()
    with pytest.raises(
        ConfigError, match=rf"^model.weights={folder / kind} belongs to another model: {message}.*$"
    ):
        begin_with(model, str(folder / kind))
    assert all(np.array_equal(old, new) for old, new in zip(before, model.get_weights())), (
        "none is half loaded"
    )


def test_a_deeper_source_is_refused(tmp_path):
    network(deep=True).save(tmp_path / "deep.keras")
    with pytest.raises(
        ConfigError, match=r"it has shape \(4, 4\) where deep/0 of this model has nothing;"
    ):
        begin_with(network(), str(tmp_path / "deep.keras"))
    with pytest.raises(ConfigError, match=r"deep/0 of this model has nothing;"):
        begin_with(network(classes=7), str(tmp_path / "deep.keras"))


@pytest.mark.parametrize(
    "ending", [".keras", pytest.param(".weights.h5", marks=pytest.mark.nightly)]
)
def test_a_backbone_alone_begins_a_model_around_it(tmp_path, ending, caplog):
    """As keras.applications saves it, with a last convolution that DeepLabv3+ leaves out."""
    sides = {"alpha": 0.35, "input_shape": (32, 32, 3)}
    source = keras.applications.MobileNetV2(include_top=False, weights=None, **sides)
    path = tmp_path / f"backbone{ending}"
    (source.save if ending == ".keras" else source.save_weights)(path)
    model = deeplabv3plus((64, 64, 3), 3, "MobileNetV2", alpha=0.35, filters=8)
    before = {part.path: [variable.numpy() for variable in part.variables] for part in parts(model)}
    with pytest.raises(ConfigError, match=r"model.weights_except"):
        begin_with(model, str(path))
    with pytest.raises(
        ConfigError, match=r"model.weights_except names asp\*x, which matches nothing"
    ):
        begin_with(model, str(path), ["asp*x"])
    with caplog.at_level(logging.INFO):
        begin_with(model, str(path), ["aspp*", "decoder*"])
    assert "not used: Conv_1, Conv_1_bn" in caplog.text
    for part in parts(model):
        new = part.path.startswith(("aspp", "decoder", "logits"))
        expected = (
            before[part.path]
            if new
            else [v.numpy() for v in parts_by_path(source)[part.path].variables]
        )
        pairs = zip(expected, part.variables, strict=True)
        assert all(np.array_equal(array, variable.numpy()) for array, variable in pairs)


def parts_by_path(model):
    return {part.path: part for part in parts(model)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nothing",
            "does not exist; choose a .keras file, a .weights.h5 file, a run folder or a preset of keras-hub",
        ),
        (
            "model.txt",
            "is not a source of weights; choose a .keras file, a .weights.h5 file, a run folder or a preset",
        ),
        ("empty", "is a folder without a model or an intact checkpoint; choose a .keras file"),
        ("broken.keras", "cannot be read: ValueError: "),
        ("broken.weights.h5", "cannot be read: OSError: "),
    ],
)
def test_what_is_no_source_is_refused_in_one_line(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    for file in ("model.txt", "broken.keras", "broken.weights.h5"):
        (tmp_path / file).write_text("rubbish")
    with pytest.raises(ConfigError) as caught:
        begin_with(network(), str(tmp_path / name))
    assert str(caught.value).startswith(f"model.weights={tmp_path / name} {message}")
    assert "\n" not in str(caught.value)


def test_the_slots_that_copy_the_weights_follow(tmp_path):
    checkpoint(network(seed=1), tmp_path)
    model = network(seed=2)
    model.compile(keras.optimizers.ScheduleFreeAdamW(1e-6))
    model.optimizer.build(model.trainable_variables)
    begin_with(model, str(tmp_path))
    expected = [variable.numpy() for variable in model.trainable_variables]
    model.optimizer.apply([np.ones(value.shape, np.float32) for value in expected])
    for variable, value in zip(model.trainable_variables, expected):
        np.testing.assert_allclose(variable.numpy(), value, atol=1e-4)
