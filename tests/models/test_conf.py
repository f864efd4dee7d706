"""Every file of conf/model and conf/optimizer: a one-line comment first, and Hydra can build what it names."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest
import tensorflow as tf
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from hvtrain.config.instantiate import select_facts

CONF = Path(__file__).parents[2] / "conf"
VIT = {"patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
IDS = {
    "dlrm": {"numbers": tf.TensorSpec((3,)), "categories": tf.TensorSpec((2,), tf.int32)},
    "two_tower": {"query": tf.TensorSpec((1,), tf.int32), "item": tf.TensorSpec((2,), tf.int32)},
}
MODELS = sorted((CONF / "model").glob("*.yaml"))
OPTIMIZERS = sorted((CONF / "optimizer").glob("*.yaml"))


@pytest.mark.parametrize("path", MODELS + OPTIMIZERS, ids=lambda path: path.stem)
def test_the_first_line_says_what_it_is(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 15


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_model_file_builds(path):
    config = OmegaConf.load(path)
    if OmegaConf.is_missing(config, "name"):
        config.name = "MobileNet"
    facts = {"image_shape": (32, 32, 3), "input_shape": (32, 32, 3), "num_outputs": 10}
    facts |= {"input_spec": tf.TensorSpec((6,), tf.int32), "vocabulary_size": 10}
    if path.stem in IDS:
        facts |= {
            "input_spec": IDS[path.stem],
            "category_sizes": (4, 3),
            "query_sizes": (5,),
            "item_sizes": (4, 3),
        }
        config.width = 10  # Of two towers it is what they give.
    if path.stem == "keras_hub":
        pytest.importorskip(
            "keras_hub", reason="keras-hub is not installed; ./scripts/run pytest does it"
        )
        config.name, config.backbone = "ViTBackbone", VIT
        del config.weights  # A setting of all models, which builders do not get.
        facts |= {"input_spec": tf.TensorSpec((32, 32, 3)), "output_shape": (10,)}
    # Hydra makes configurations of arguments that are dicts.
    builder = instantiate(config, _partial_=True)
    target = get_object(config._target_)
    model = builder(**select_facts(target, config, facts, path.stem, "a data set"))
    assert isinstance(model, keras.Model)
    assert (model.output.shape[0], model.output.shape[-1]) == (None, 10)


@pytest.mark.parametrize("path", OPTIMIZERS, ids=lambda path: path.stem)
def test_an_optimizer_file_builds(path):
    config = OmegaConf.load(path)
    assert isinstance(config.learning_rate, float)
    optimizer = instantiate(config)
    assert isinstance(optimizer, keras.optimizers.Optimizer)
    held = optimizer.get_config()
    for name, value in config.items():
        if name != "_target_":
            assert held[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_the_optimizers_offered_are_these():
    names = "sgd, momentum, rmsprop, adam, adamw, lamb, lion, lazy_adam, rowwise_adagrad"
    assert {path.stem for path in OPTIMIZERS} == set(names.split(", "))
