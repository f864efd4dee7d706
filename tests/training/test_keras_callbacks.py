"""Each of Keras's own callbacks does its work in a run, or is refused in one line that says what to do instead."""

import json
from importlib.util import find_spec

import pytest
from keras.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint

from hvtrain.errors import ConfigError
from hvtrain.training.callbacks.make_callbacks import check_logged, monitored_names
from launching import many_runs, without_hvtrain
from tiers import with_nightly

# Settings of each.
WORK = {
    "ModelCheckpoint": ["filepath='${run.dir}/{epoch:d}.keras'"],
    "ModelCheckpoint steps": [
        "filepath='${run.dir}/{batch:d}.weights.h5'",
        "save_weights_only=true",
        "save_freq=3",
    ],
    "CSVLogger": ["filename=${run.dir}/log.csv"],
    "EarlyStopping": ["monitor=loss", "patience=0", "min_delta=100"],
    "EarlyStopping validation": ["monitor=val_loss", "patience=0", "min_delta=100"],
    "ReduceLROnPlateau": ["monitor=loss", "patience=0", "min_delta=100"],
    "LambdaCallback": ["on_train_batch_end={_target_: leaves.told, _partial_: true}"],
}
NIGHTLY_WORK = {
    "ModelCheckpoint weights": ["filepath=${run.dir}/newest.weights.h5", "save_weights_only=true"],
    "LearningRateScheduler": ["schedule={_target_: leaves.halved, _partial_: true}"],
    "TerminateOnNaN": [],
    "ProgbarLogger": [],
    "History": [],
}
REFUSED = {
    "BackupAndRestore": (
        ["backup_dir=${run.dir}/backup"],
        "leave it out, since hvtrain saves and resumes runs itself",
    ),
    "SwapEMAWeights": (
        [],
        "leave it out and set train.ema=0.999, whose averages are validated and saved",
    ),
    "OrbaxCheckpoint": (["directory=${run.dir}/orbax"], "use keras.callbacks.ModelCheckpoint"),
    "TensorBoard": ([], "needs the package tensorboard, which is missing; pip install tensorboard"),
    "ModelCheckpoint best": (
        ["filepath=${run.dir}/best.keras", "save_best_only=true"],
        "++callbacks.own.monitor=loss",
    ),
}
# Whatever changes what Keras saves of a model: weights of unlike batches, a loss scale, a distributed optimizer.
SAVED = {
    "unlike": ["data.uneven=pad"],
    "half": ["train.precision=mixed_float16"],
    "half alone": ["train.precision=mixed_float16", "strategy=single"],
}

LOAD = """
import keras, numpy as np, sys
for path in ["unlike/3.keras", "half/3.keras", "half alone/3.keras", "ModelCheckpoint/3.keras"]:
    model = keras.models.load_model(path)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    slots = sum(float(np.abs(variable.numpy()).sum()) for variable in optimizer.variables[1:])
    print(path.partition("/")[0], f"{float(optimizer.learning_rate):g} {int(optimizer.iterations)} {slots > 0}")
    model.fit(np.zeros([4, 6, 6, 1]), np.zeros(4, int), verbose=0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("callbacks")


@pytest.fixture(scope="module")
def ran(request, folder):
    """(what came of each run, all output), in one process."""
    checkpoint = WORK["ModelCheckpoint"]
    settings = {**WORK, **{name: arguments for name, (arguments, _) in REFUSED.items()}}
    if with_nightly(request):
        settings |= {**NIGHTLY_WORK, **dict.fromkeys(SAVED, checkpoint)}
    runs = {}
    for name, own in settings.items():
        kind = "ModelCheckpoint" if name in SAVED else name.partition(" ")[0]
        arguments = [f"_target_=keras.callbacks.{kind}", *own]
        runs[name] = [
            *(f"+callbacks.own.{setting}" for setting in arguments),
            "train.epochs=3",
            *SAVED.get(name, []),
        ]
    runs["EarlyStopping validation"] += [
        "train.epochs=9",
        "dataset.num_validation=16",
        "train.validate_every_epochs=2",
    ]
    runs["stopped"] = [
        "+callbacks.own={_target_: leaves.Stops, rank: 0, batch: 4}",
        "dataset.num_validation=16",
        "train.validate_every_steps=5",
    ]
    runs["interrupted"] = [
        "+callbacks.own={_target_: leaves.Terminates, rank: 0, epoch: 1, batch: 0}",
        "optimizer.learning_rate=0.03",
        "checkpoint.best=loss",
        "train.epochs=3",
    ]
    results, output = many_runs(None, 1, runs, folder)
    return results[0], output


def steps_of(results, names):
    assert [results[name]["error"] for name in names if "error" in results[name]] == []
    return {name: results[name]["record"]["num_steps"] for name in names}


def rates(run):
    """The learning rate of each epoch, of which that of the configuration is 0.001."""
    return [float(row.split(",")[2]) for row in (run / "history.csv").read_text().splitlines()[1:]]


def test_each_works(ran, folder):
    results, output = ran
    steps = steps_of(results, WORK)
    assert steps.pop("EarlyStopping") == 24
    assert steps.pop("EarlyStopping validation") == 48, (
        "after the second validation, and not after the first one again"
    )
    assert set(steps.values()) == {36}
    assert output.count("told of batch") == 36
    assert {path.name for path in (folder / "ModelCheckpoint").glob("?.keras")} == {
        "1.keras",
        "2.keras",
        "3.keras",
    }
    weights = {path.name for path in (folder / "ModelCheckpoint steps").glob("*.h5")}
    assert weights == {f"{step}.weights.h5" for step in (3, 6, 9, 12)}
    assert len((folder / "CSVLogger" / "log.csv").read_text().splitlines()) == 4
    assert rates(folder / "ReduceLROnPlateau") == pytest.approx([0.001, 0.001, 0.0001])


def test_the_best_of_a_run_that_ends_within_an_epoch(ran, folder):
    """By a validation after its last step, and not by the first steps of an epoch that was interrupted."""
    results, _ = ran
    assert results["stopped"]["record"]["best"]["step"] == 5
    assert results["interrupted"] == {"stopped": 75}
    best = json.loads((folder / "interrupted" / "checkpoints" / "best.json").read_text())
    assert best["step"] == 12


def test_a_monitor_that_the_logs_lack_is_refused():
    """At the first epoch whose logs would have it, unless a callback of the user's may add it later."""
    callbacks = {
        "stop": EarlyStopping("val_acuracy"),
        "save": ModelCheckpoint("x.keras", monitor="unused"),
    }
    monitored = monitored_names(callbacks, "accuracy")
    training = {"loss": 1.0, "accuracy": 0.5}
    logs = training | {"val_loss": 1.0, "val_accuracy": 0.5}
    check_logged(monitored, training)
    with pytest.raises(
        ConfigError,
        match=r"callbacks.stop.monitor=val_acuracy is not a metric .*; did you mean 'val_accuracy'\?",
    ):
        check_logged(monitored, logs)
    with pytest.raises(ConfigError, match=r"checkpoint.best=loss is not a metric of this run"):
        check_logged(monitored_names({}, "loss"), {"own_loss": 1.0})
    assert monitored_names(callbacks | {"own": LambdaCallback()}, "other") == {}


@pytest.mark.nightly
def test_so_do_more_of_them(ran, folder):
    assert set(steps_of(ran[0], NIGHTLY_WORK).values()) == {36}
    assert (folder / "ModelCheckpoint weights" / "newest.weights.h5").exists()
    assert rates(folder / "LearningRateScheduler") == pytest.approx(
        [0.001 / 2, 0.001 / 4, 0.001 / 8]
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_harm_is_refused(ran, name):
    if name == "TensorBoard" and find_spec("tensorboard"):
        pytest.skip("tensorboard is installed")
    message = ran[0][name]["error"]
    assert message.startswith("ConfigError: callbacks.own") and "\n" not in message
    assert REFUSED[name][1] in message


@pytest.mark.nightly
def test_a_model_that_a_callback_saves_trains_on_in_plain_keras(ran, folder):
    """With its slots and the rate of that moment, and without a warning."""
    output = without_hvtrain(LOAD, cwd=folder).splitlines()
    steps = {"unlike": 39}  # With the batches that are not full.
    assert output == [
        f"{name} 0.001 {steps.get(name, 36)} True" for name in [*SAVED, "ModelCheckpoint"]
    ]
