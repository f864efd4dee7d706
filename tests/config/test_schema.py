"""What the door takes and refuses, without TensorFlow."""

import pytest

from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig, TrainConfig, from_dict
from hvtrain.config.validate import nearest
from hvtrain.errors import ConfigError
from hvtrain.system.secrets import redacted

GROUPS = {
    "model": {"_target_": "hvtrain.models.cnn"},
    "dataset": {"_target_": "hvtrain.data.sources.built_in.digits"},
    "task": {"_target_": "hvtrain.tasks.Classification"},
    "optimizer": {"_target_": "keras.optimizers.SGD", "learning_rate": 0.1},
    "schedule": {"_target_": "hvtrain.core.schedule.Constant"},
    "strategy": {"_target_": "hvtrain.strategies.base.Strategy"},
}


def config(**changes):
    return from_dict({**GROUPS, **changes})


def test_defaults_are_the_schemas():
    made = config()
    assert made.train == TrainConfig()
    assert made.resume == "auto"


def test_to_dict_and_back():
    made = config(train={"epochs": 3, "steps": None}, seed=5)
    assert from_dict(made.record) == made
    assert made.flat["train.epochs"] == 3


def test_records_hold_no_secret():
    """A callback of one's own with a key to some service, and a data set behind a password."""
    own = {
        "_target_": "own.Notifies",
        "api_key": "hunter2",
        "urls": ["https://me:hunter2@host/"],
        "patience": 2,
    }
    made = config(callbacks={"own": own})
    assert made.callbacks["own"]["api_key"] == "hunter2"
    kept = made.record["callbacks"]["own"]
    assert kept == {
        "_target_": "own.Notifies",
        "api_key": "***",
        "urls": ["https://***@host/"],
        "patience": 2,
    }


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("api_key", 1234567890, "***"),
        ("password", 2026, "***"),
        (
            "url",
            "https://a.blob.core.windows.net/c/d.csv?sv=2&sig=Zm9v%3D&se=1",
            "...d.csv?sv=2&sig=***&se=1",
        ),
        (
            "url",
            "https://b.s3.aws.com/d?X-Amz-Credential=A%2F1&X-Amz-Signature=0a",
            "...tial=***&X-Amz-Signature=***",
        ),
        (
            "url",
            "https://ghp_0123456789abcdefABCD@github.com/me/data.git",
            "https://***@github.com/me/data.git",
        ),
        ("header", "Authorization: Bearer abc.def-123", "Authorization: Bearer ***"),
        ("authorization", "abcdef", "***"),
        ("note", "my token is hf_0123456789abcdefghij", "my token is ***"),
        ("target_key", "species", "species"),
        ("sort_key", "q8Zk3vP0xT", "***"),
        ("mask_token", "<mask>", "<mask>"),
        ("padding_token", 0, 0),
        ("backward_passes", 2, 2),
        ("url", "ssh://git@host/data", "ssh://git@host/data"),
        ("url", "smtp://me@here.org:p@ss@host/", "smtp://***@host/"),
        ("dir", "/data/keys/images", "/data/keys/images"),
    ],
)
def test_a_secret_is_known_by_its_name_or_its_looks(name, value, kept):
    """dataset.target_key became ***, and the run could never be evaluated; signed addresses stayed in clear."""
    result = redacted({name: value})[name]
    assert result == kept or (
        isinstance(kept, str) and kept.startswith("...") and result.endswith(kept[3:])
    )


def test_a_run_whose_secret_was_left_out_asks_for_it():
    made = config(dataset={"_target_": "own.data", "storage": {"api_key": "***"}})
    with pytest.raises(
        ConfigError,
        match=r"dataset.storage.api_key holds a secret.*give dataset.storage.api_key=VALUE",
    ):
        build(made, "dataset", object)


def test_whole_learning_rate_becomes_a_float():
    made = config(optimizer={"_target_": "keras.optimizers.SGD", "learning_rate": 1})
    assert isinstance(made.optimizer["learning_rate"], float), "Keras 3 refuses an integer rate"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"epoch": 3}}, "unknown setting 'train.epoch'; did you mean 'train.epochs'?"),
        ({"sed": 3}, "unknown setting 'sed'; did you mean 'seed'?"),
        ({"train": {"epochs": "three"}}, "train.epochs=three is not a whole number"),
        ({"train": {"epochs": 2.5}}, "train.epochs=2.5 is not a whole number"),
        ({"train": {"epochs": True}}, "train.epochs=True is not a whole number"),
        ({"train": {"epochs": None}}, "train.epochs=None is not a whole number"),
        ({"train": {"steps": "x"}}, "train.steps=x is not a whole number or null"),
        ({"train": {"epochs": 0}}, "train.epochs=0 is out of range; it must be at least 1"),
        ({"seed": 2**63}, "seed=9223372036854775808 is out of range"),
        ({"train": {"batch_size": -4}}, "train.batch_size=-4 is out of range"),
        ({"train": {"batch_size": [4, 0]}}, "train.batch_size=0 is out of range"),
        ({"train": {"batch_size": [4, "x"]}}, "train.batch_size=x is not a whole number"),
        (
            {"train": {"max_time": "soon"}},
            "train.max_time=soon is not a duration; write it as 11h50m, 45m or 90s",
        ),
        ({"data": {"uneven": "cut"}}, "data.uneven=cut is not one of auto, trim, pad, error"),
        (
            {"callbacks": {"stop": {"patience": 3}}},
            "callbacks.stop._target_=None names no class or function",
        ),
        ({"train": {"deterministic": 1}}, "train.deterministic=1 is not true or false"),
        (
            {"train": {"precision": "float8"}},
            "train.precision=float8 is not one of float32, mixed_bfloat16, mixed",
        ),
        ({"train": 3}, "train=3 is not a group of settings"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep=0 is out of range; it must be at least 1"),
        (
            {"checkpoint": {"keep_every_epochs": 0}},
            "checkpoint.keep_every_epochs=0 is out of range",
        ),
        ({"checkpoint": {"copies": 2}}, "checkpoint.copies=2 is out of range; it must be 0 or 1"),
        (
            {"checkpoint": {"every_minutes": float("nan")}},
            "checkpoint.every_minutes=nan is out of range",
        ),
        ({"resume": "perhaps"}, "resume=perhaps is not one of auto, available, never"),
        ({"model": {"units": 3}}, "model._target_=None names no class or function"),
        ({"optimizer": {"_target_": "a.b"}}, "optimizer.learning_rate=None is not a finite number"),
        (
            {"optimizer": {"_target_": "a.b", "learning_rate": 0}},
            "optimizer.learning_rate=0 is not a finite number above 0",
        ),
        (
            {"optimizer": {"_target_": "a.b", "learning_rate": float("inf")}},
            "learning_rate=inf is not a finite number above 0",
        ),
        (
            {
                "optimizer": {
                    "_target_": "a.b",
                    "learning_rate": 0.1,
                    "gradient_accumulation_steps": 2,
                }
            },
            "optimizer.gradient_accumulation_steps=2 is set by the run; give train.accumulate=2 instead",
        ),
        (
            {"train": {"accumulate": 2}, "data": {"uneven": "pad"}},
            "train.accumulate=2 and data.uneven=pad exclude each other; choose data.uneven=trim",
        ),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_group_is_named():
    with pytest.raises(ConfigError, match=r"no model was chosen; add model=NAME"):
        from_dict({name: group for name, group in GROUPS.items() if name != "model"})


def test_nearest():
    assert nearest("batchsize", ["batch_size", "epochs"]) == "did you mean 'batch_size'?"


def test_every_setting_has_a_description():
    from dataclasses import fields, is_dataclass

    for item in fields(RunConfig):
        section = getattr(config(), item.name)
        if not isinstance(section, dict):  # Groups are described by the files of their choices.
            for inner in fields(section) if is_dataclass(section) else [item]:
                assert inner.metadata["doc"], inner.name
