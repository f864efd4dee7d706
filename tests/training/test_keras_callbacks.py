"""Each of Keras's own callbacks does its work in a run, or is refused in one line that says what to do instead."""

from importlib.util import find_spec

import pytest

from launching import many_runs, without_hvtrain
from tiers import with_nightly

# Settings of each.
WORK = {
    "ModelCheckpoint": ["filepath='${run.dir}/{epoch:d}.keras'"],
    "ModelCheckpoint weights": ["filepath=${run.dir}/newest.weights.h5", "save_weights_only=true"],
    "ModelCheckpoint steps": ["filepath='${run.dir}/{batch:d}.weights.h5'", "save_weights_only=true", "save_freq=3"],
    "CSVLogger": ["filename=${run.dir}/log.csv"],
    "EarlyStopping": ["monitor=loss", "patience=0", "min_delta=100"],
    "ReduceLROnPlateau": ["monitor=loss", "patience=0", "min_delta=100"],
    "LearningRateScheduler": ["schedule={_target_: leaves.halved, _partial_: true}"],
    "LambdaCallback": ["on_train_batch_end={_target_: leaves.told, _partial_: true}"],
    "TerminateOnNaN": [],
    "ProgbarLogger": [],
    "History": [],
}
REFUSED = {
    "BackupAndRestore": (["backup_dir=${run.dir}/backup"], "leave it out, since a run saves and resumes by itself"),
    "SwapEMAWeights": ([], "leave it out and set train.ema=0.999, whose averages are validated and saved"),
    "OrbaxCheckpoint": (["directory=${run.dir}/orbax"], "use keras.callbacks.ModelCheckpoint"),
    "TensorBoard": ([], "needs the package tensorboard, which is missing; pip install tensorboard"),
    "ModelCheckpoint best": (["filepath=${run.dir}/best.keras", "save_best_only=true"], "++callbacks.own.monitor=loss"),
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
    settings = {**WORK, **{name: words for name, (words, _) in REFUSED.items()}}
    if with_nightly(request):
        settings |= dict.fromkeys(SAVED, checkpoint)
    runs = {}
    for name, own in settings.items():
        kind = "ModelCheckpoint" if name in SAVED else name.partition(" ")[0]
        words = [f"_target_=keras.callbacks.{kind}", *own]
        runs[name] = [*(f"+callbacks.own.{word}" for word in words), "train.epochs=3", *SAVED.get(name, [])]
    found, output = many_runs(None, 1, runs, folder)
    return found[0], output


def test_each_works(ran, folder):
    found, output = ran
    assert [found[name]["error"] for name in WORK if "error" in found[name]] == []
    steps = {name: found[name]["record"]["num_steps"] for name in WORK}
    assert steps.pop("EarlyStopping") == 24
    assert set(steps.values()) == {36}
    assert output.count("told of batch") == 36
    written = {path.name for name in WORK for pattern in ("?.keras", "*.h5") for path in (folder / name).glob(pattern)}
    assert written == {*(f"{epoch}.keras" for epoch in (1, 2, 3)), "newest.weights.h5", "3.weights.h5", "6.weights.h5",
                       "9.weights.h5", "12.weights.h5"}  # fmt: skip
    assert len((folder / "CSVLogger" / "log.csv").read_text().splitlines()) == 4
    for name, factors in [("LearningRateScheduler", (1 / 2, 1 / 4, 1 / 8)), ("ReduceLROnPlateau", (1, 1, 1 / 10))]:
        history = (folder / name / "history.csv").read_text().splitlines()
        assert [float(row.split(",")[2]) for row in history[1:]] == pytest.approx([0.001 * f for f in factors])


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
    told = without_hvtrain(LOAD, cwd=folder).splitlines()
    steps = {"unlike": 39}  # With the batches that are not full.
    assert told == [f"{name} 0.001 {steps.get(name, 36)} True" for name in [*SAVED, "ModelCheckpoint"]]
