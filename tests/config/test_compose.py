"""Every choice of every group composes into a run that the schema takes, and what it names can be built."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from hvtrain.config.choices import CONFIGS
from hvtrain.config.compose import schema
from hvtrain.config.instantiate import build
from hvtrain.config.schema import BUNDLES, GROUPS, SEVERAL, from_dict
from hvtrain.core.schedule import Schedule

CHOICES = {
    group: sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    for group in (*GROUPS, *SEVERAL, *BUNDLES)
}
# What a choice leaves to the user to say.
REQUIRED = {
    "application": ["model.name=MobileNetV2"],
    "keras_hub": ["model.name=BertBackbone"],
    "image_folder": ["dataset.dir=/data"],
    "segmentation_folder": [
        "dataset.dir=/data",
        "dataset.image_shape=[32,32,3]",
        "dataset.num_classes=3",
    ],
    "imagenet_resnet50": ["dataset.dir=/data"],
    "imagenet_resnet50_fast": ["dataset.dir=/data"],
    "parquet": ["dataset.dir=/data", "dataset.image_shape=[32,32,3]", "dataset.num_classes=10"],
    "huggingface": ["dataset.dir=/data"],
    "tfds": ["dataset.dataset=mnist"],
    "tfrecord": ["dataset.dir=/data", "dataset.image_shape=[32,32,3]", "dataset.num_classes=10"],
    "webdataset": ["dataset.dir=/data", "dataset.image_shape=[32,32,3]", "dataset.num_classes=10"],
}


def composed(*arguments):
    ConfigStore.instance().store("hvtrain_schema", schema())
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        return from_dict(
            OmegaConf.to_container(compose("config", overrides=list(arguments)), resolve=True)
        )


@pytest.mark.parametrize(
    "argument", [f"{group}='{name}'" for group, names in CHOICES.items() for name in names]
)
def test_every_choice_composes(argument):
    assert composed(argument, *REQUIRED.get(argument.partition("=")[2].strip("'"), []))


@pytest.mark.parametrize("name", CHOICES["schedule"])
def test_every_schedule_is_built(name):
    run = {"base": 0.1, "peak": 0.2, "steps_per_epoch": 10, "num_steps": 120}
    schedule = build(composed(f"schedule={name}"), "schedule", Schedule, **run)
    assert schedule(0) == pytest.approx(0.1), "a warm-up from the rate of one rank is the default"
    assert schedule(10) == pytest.approx(0.2)


@pytest.mark.parametrize("name", CHOICES["strategy"])
def test_every_strategy_is_built(name):
    from hvtrain.strategies.base import Strategy

    assert build(composed(f"strategy={name}"), "strategy", Strategy)


def test_diloco_compresses_from_its_first_synchronization():
    from hvtrain.strategies.base import Strategy

    config = composed("strategy=diloco", "strategy.compression=powersgd")
    assert repr(build(config, "strategy", Strategy).compression) == (
        "powersgd(rank=4, whole_steps=0)"
    )


@pytest.mark.parametrize("name", CHOICES["experiment"])
def test_an_experiment_says_how_it_is_run(name):
    text = (CONFIGS / "experiment" / f"{name}.yaml").read_text()
    assert f"python -m hvtrain experiment={name}" in text.partition("defaults:")[0]


def test_choices_have_a_description():
    for group, names in CHOICES.items():
        for name in names:
            lines = (Path(CONFIGS) / group / f"{name}.yaml").read_text().splitlines()
            assert any(line.startswith("# ") and "@package" not in line for line in lines[:2]), (
                f"{group}/{name}"
            )
