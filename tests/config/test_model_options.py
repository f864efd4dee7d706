"""Settings of any model: they need no plus for any builder, and the builder never gets them."""

from dataclasses import replace

import keras
import pytest

from hvtrain.config.choices import run_settings
from hvtrain.config.compose import compose
from hvtrain.config.instantiate import build, select_facts
from hvtrain.config.schema import from_dict
from hvtrain.errors import ConfigError
from hvtrain.training.resume import changed_settings

SHAPE = {"image_shape": (8, 8, 1), "num_classes": 3}


def composed(*arguments):
    return from_dict(compose(list(arguments)))


def own(image_shape, num_classes, freeze=True):
    raise AssertionError("it is not called")


def takes_all(image_shape, num_classes, **options):
    assert options == {"width": 5}
    return keras.Sequential(
        [keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    )


@pytest.mark.parametrize(
    "arguments", [[], ["model=mlp"], ["model=application", "model.name=MobileNet"]]
)
def test_every_model_takes_them_without_a_plus(arguments):
    config = composed(
        *arguments, "model.weights=runs/1", "model.freeze=[conv*,*/bias]", "model.lora_rank=4"
    )
    options = config.model_options
    assert (options.weights, options.freeze, options.lora_rank) == (
        "runs/1",
        ["conv*", "*/bias"],
        4,
    )
    assert composed(*arguments, "model.freeze=conv?").model_options.freeze == ["conv?"]
    assert composed(
        *arguments, "model.shard_embeddings=1000000"
    ).model_options.shard_embeddings == ["1000000"]
    options = composed(*arguments, "model.shard_embeddings=[user*,50]").model_options
    assert options.shard_embeddings == ["user*", "50"]
    assert replace(config, model={"_target_": "a.b"}).model_options.freeze is None, (
        "a run of an earlier version"
    )


def test_the_builder_never_gets_them():
    arguments = [
        "model.freeze=[a]",
        "model.lora_rank=2",
        "model.weights=x",
        f"model._target_={__name__}.takes_all",
    ]
    config = composed(
        "model=mlp",
        *arguments,
        "~model.hidden",
        "~model.activation",
        "~model.dropout",
        "+model.width=5",
    )
    assert build(config, "model", keras.Model, **SHAPE).count_params() == 64 * 3 + 3


def test_a_setting_takes_precedence_over_a_fact():
    given = select_facts(lambda **options: None, ["num_classes"], SHAPE, "model", "toys")
    assert given == {"image_shape": (8, 8, 1)}


@pytest.mark.parametrize("arguments", [[], ["model.freeze=[a]"]])
def test_a_builder_with_an_argument_of_that_name_is_refused(arguments):
    config = composed(f"model._target_={__name__}.own", *arguments)
    with pytest.raises(ConfigError) as caught:
        build(config, "model", keras.Model, **SHAPE)
    assert str(caught.value) == (
        f"model._target_={__name__}.own has an argument freeze, but model.freeze is a setting of every model, which "
        "builders do not get; rename the argument"
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model.freeze=3", None),
        ("model.freeze={a:1}", "model.freeze={'a': 1} is not a string or null"),
        ("model.freeze=[[a]]", "model.freeze=['a'] is not a string"),
        ("model.lora_rank=0", "model.lora_rank=0 is out of range; it must be at least 1"),
        ("model.lora_rank=a", "model.lora_rank=a is not a whole number or null"),
        ("model.weights=[a]", "model.weights=['a'] is not a string or null"),
        (
            "model.weights_except=a*",
            "model.weights_except needs model.weights, which is not set; set it to the source of the other weights",
        ),
        ("train.ema=1", "train.ema=1.0 is out of range; it must be between 0 and 1, such as 0.999"),
        ("train.ema=0", "train.ema=0.0 is out of range; it must be between 0 and 1, such as 0.999"),
        (
            "train.rates={a*:0}",
            "train.rates.a*=0 is not a finite number above 0; to freeze these variables, use model.freeze=[a*]",
        ),
        (
            "train.rates={a*:x}",
            "train.rates.a*=x is not a finite number above 0; to freeze these variables, use model.freeze=[a*]",
        ),
        ("train.rates=2", "train.rates=2 is not a group of settings or null"),
    ],
)
def test_what_is_no_value_is_refused_in_one_line(argument, message):
    if message is None:
        assert composed(argument).model_options.freeze == ["3"], "as the name of a layer"
        return
    with pytest.raises(ConfigError) as caught:
        composed(argument)
    assert str(caught.value) == message


def test_rates_are_told_by_pattern():
    config = composed("train.rates={conv*:0.1,logits/bias:2}")
    assert config.train.rates == {"conv*": 0.1, "logits/bias": 2}


def test_first_weights_and_recomputation_may_change_on_resume():
    before = composed("model.weights=a").record
    assert changed_settings(before, composed("train.remat=true")) == {}
    assert changed_settings(before, composed("model.freeze=[a]")) == {"model.freeze": [None, ["a"]]}
    older = {**before, "model": {"_target_": "hvtrain.models.cnn", "dropout": [0.25, 0.5]}}
    assert changed_settings(older, composed()) == {}


def test_help_has_them():
    text = run_settings([])
    for name in (
        "model.weights",
        "model.freeze",
        "model.lora_rank",
        "train.ema",
        "train.rates",
        "train.remat",
    ):
        assert f"  {name}=" in text
