"""The written model: what is in the file, and that Keras loads it without a warning, whatever the precision."""

import json
import warnings

import keras
import numpy as np
import pytest

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, from_arrays
from hvtrain.tasks import Classification, Regression
from hvtrain.training.saved_model import DESCRIPTION_FILE, MODEL_FILE, export
from launching import without_hvtrain


@pytest.fixture(params=["float32", "mixed_bfloat16", "mixed_float16"])
def precision(request):
    keras.config.set_dtype_policy(request.param)
    yield
    keras.config.set_dtype_policy("float32")


def test_a_loaded_model_evaluates_raw_examples_as_the_run_did(precision, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (60, 5, 5), "uint8"), rng.integers(0, 3, 60)
    source = from_arrays(x, y, x, y)
    layers = [
        keras.Input((5, 5, 1)),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    Classification().compile(model, keras.optimizers.Adam(0.01))
    model.fit(
        source.training(StreamRequest(Topology(), 20, 0, 0, 3)),
        steps_per_epoch=9,
        shuffle=False,
        verbose=0,
    )
    reported = model.evaluate(
        source.evaluation("test", Topology(), 20), verbose=0, return_dict=True
    )
    export(model, source, Classification(), Topology(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [DESCRIPTION_FILE, MODEL_FILE]
    assert json.loads((tmp_path / DESCRIPTION_FILE).read_text())["input"]["shape"] == [5, 5]
    keras.config.set_dtype_policy("float32")  # That of whoever loads it.
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = keras.models.load_model(tmp_path / MODEL_FILE)
    assert loaded.evaluate(x, y, batch_size=20, verbose=0, return_dict=True) == reported
    slots = [
        variable.path for variable in loaded.optimizer.variables if "momentum" in variable.path
    ]
    assert slots == []


class SumLoss(keras.losses.Loss):
    """A loss of the user's own."""

    def call(self, targets, outputs):
        return keras.ops.sum(
            keras.ops.square(outputs - keras.ops.expand_dims(targets, -1)), axis=-1
        )


class MeanGap(keras.metrics.Mean):
    """A metric of the user's own."""

    def update_state(self, targets, outputs, sample_weight=None):
        super().update_state(keras.ops.abs(outputs[:, 0] - targets), sample_weight)


def test_a_model_with_a_loss_and_a_metric_of_ones_own_loads_in_plain_keras(tmp_path, caplog):
    rng = np.random.default_rng(0)
    source = from_arrays(rng.normal(size=(40, 5)), rng.normal(size=40))
    task = Regression(loss=SumLoss(), metrics={"gap": MeanGap(name="gap")})
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    task.compile(model, keras.optimizers.Adam())
    with caplog.at_level("INFO"):
        export(model, source, task, Topology(), tmp_path)
    assert (
        "the saved model is not compiled: a program that loads it may not have your MeanGap, SumLoss"
        in caplog.text
    )
    load = "import keras, numpy as np; model = keras.models.load_model('model.keras')"
    assert (
        without_hvtrain(f"{load}; print(model.predict(np.ones((1, 5)), verbose=0).shape)", tmp_path)
        == "(1, 1)\n"
    )
