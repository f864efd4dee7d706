"""What differs between the starts of a run is found, or refused."""

import pytest

from hvtrain import runner
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.errors import ConfigError
from hvtrain.strategies.base import Strategy
from hvtrain.training.resume import changed_since
from hvtrain.training.run import ResumePoint, RunState

TOP3 = "+task.metrics.top3._target_=keras.metrics.SparseTopKCategoricalAccuracy"


def config(*overrides):
    return from_dict(compose(list(overrides)))


@pytest.fixture(scope="module")
def meta():
    return {"config": config().record}


def test_what_may_change(meta):
    changed = changed_since(
        meta,
        config(
            "optimizer.learning_rate=0.5",
            "task.loss.from_logits=false",
            "strategy.compression=int8",
            "strategy.bucket_mib=4",
            "run.dir=x",
        ),
    )
    assert changed == {
        "optimizer.learning_rate": [0.001, 0.5],
        "task.loss.from_logits": [True, False],
        "strategy.compression": ["none", "int8"],
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=2", "seed=2, but the run in this folder began with 1, which cannot change"),
        (
            "optimizer=sgd",
            "optimizer._target_=keras.optimizers.SGD, but the run in this folder began with keras.optim",
        ),
        (
            TOP3,
            "task.metrics.top3._target_=keras.metrics.SparseTopKCategoricalAccuracy, but the run in this folder be",
        ),
    ],
)
def test_what_cannot_change(meta, override, message):
    with pytest.raises(ConfigError, match=message):
        changed_since(meta, config(override))


def test_auto_keeps_the_choice_of_the_checkpoint():
    before = config("data.uneven=pad").record
    assert changed_since({"config": before}, config("data.uneven=auto")) == {}
    assert changed_since({"config": before}, config("data.uneven=trim")) == {
        "data.uneven": ["pad", "trim"]
    }


def test_the_order_of_layers_of_augmentation():
    before = config("augment=[random_flip,mix_up]").record
    now = config("augment=[mix_up,random_flip]", "augment.mix_up.alpha=0.4")
    assert changed_since({"config": before}, now) == {
        "augment.mix_up.alpha": [0.2, 0.4],
        "augment": [["random_flip", "mix_up"], ["mix_up", "random_flip"]],
    }


@pytest.mark.parametrize(
    ("override", "outcome"),
    [
        ("dataset.dir=b", "kept"),
        ("seed=1", "kept"),
        ("dataset.validation_fraction=0.2", "fitted anew"),
    ],
)
def test_what_was_fitted_is_kept_on_other_files(monkeypatch, override, outcome):
    """With guard.data=false they may hold other data, whose categories would have other numbers."""

    def ends_with(message):
        def end(*_):
            raise ConfigError(message)

        return end

    monkeypatch.setattr(runner.fitted, "read", ends_with("kept"))
    monkeypatch.setattr(runner, "open_data", ends_with("fitted anew"))
    images = ["dataset=image_folder", "dataset.dir=a"]
    saved = ResumePoint("step-00000001", 1, {"config": config(*images).record})
    with pytest.raises(ConfigError, match=outcome):
        runner.open_inputs(config(*images, override), Strategy(), RunState(0.0), saved)
