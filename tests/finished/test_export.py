"""Exported models give what the run's model gives, in programs that know nothing of hvtrain."""

import importlib.util
import json
import sys

import numpy as np
import pytest

import hvtrain
from hvtrain.data.sources.digits import digits
from hvtrain.errors import ConfigError
from hvtrain.finished import commands, exported
from launching import without_hvtrain
from tiers import mostly_nightly

DIGITS = ["model=mlp", "model.hidden=[16]", "dataset=digits", "dataset.num_test=60", "dataset.standardize=per_pixel"]
ONE = [*DIGITS, "strategy=single", "train.steps=6", "train.precision=mixed_bfloat16"]
NUMBERS = "np.save('outputs.npy', np.asarray(outputs))"
SCRIPTS = {
    "keras": ("model.keras", f"""
import numpy as np, keras
outputs = keras.models.load_model("model.keras")(np.load("raw.npy"))
{NUMBERS}"""),
    "savedmodel": ("saved", f"""
import numpy as np, tensorflow as tf
model = tf.saved_model.load("saved")
outputs = model.serve(tf.constant(np.load("raw.npy")))
{NUMBERS}"""),
    "onnx": ("model.onnx", f"""
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession("model.onnx")
outputs, = session.run(None, {{session.get_inputs()[0].name: np.load("raw.npy")}})
{NUMBERS}"""),
    "tflite": ("model.tflite", f"""
import logging, os, warnings
warnings.simplefilter("ignore")
import numpy as np, tensorflow as tf
runner = tf.lite.Interpreter("model.tflite").get_signature_runner()
outputs, = runner(**{{list(runner.get_input_details())[0]: np.load("raw.npy")}}).values()
{NUMBERS}"""),
}  # fmt: skip
HAS_ONNX = all(importlib.util.find_spec(name) for name in exported.ONNX_PACKAGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    hvtrain.train(hvtrain.compose([*ONE, f"run.dir={root / 'run'}"]))
    np.save(root / "raw.npy", digits(60).parts()["test"].elements[0][:5, ..., 0].astype(np.float32))
    return root


def export_words(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["export", *map(str, arguments)])
    assert commands.export() == 0


@pytest.mark.parametrize("chosen", mostly_nightly(SCRIPTS, "onnx"))
def test_another_program_gets_the_same_outputs(chosen, folder, monkeypatch, capsys):
    if chosen == "onnx" and not HAS_ONNX:
        pytest.skip("tf2onnx and onnxruntime (scripts/lock/export.txt) are missing")
    name, script = SCRIPTS[chosen]
    export_words(monkeypatch, f"run={folder / 'run'}", f"format={chosen}", "--output", folder / name)
    printed = capsys.readouterr().out
    assert "largest difference of its outputs on 8 examples" in printed
    without_hvtrain(script, cwd=folder)
    outputs = np.load(folder / "outputs.npy")
    run = hvtrain.load(folder / "run")
    expected = run.model(next(run.source.evaluation("test", run.strategy.topology, 5).as_numpy_iterator())[0])
    assert outputs.dtype == np.float32 and outputs.shape == (5, 10)
    assert outputs == pytest.approx(np.asarray(expected), abs=0.1), "bfloat16 rounds, float32 does not"
    description = json.loads((folder / name).with_suffix(".json").read_text())
    assert description["class_names"] == list("0123456789")
    with pytest.raises(ConfigError, match="exists already; choose another path"):
        export_words(monkeypatch, f"run={folder / 'run'}", f"format={chosen}", "--output", folder / name)


def test_a_description_of_another_export_is_not_replaced(folder, monkeypatch):
    (folder / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"would replace .*other.json, which is another model's; choose"):
        export_words(monkeypatch, f"run={folder / 'run'}", "format=onnx", "--output", folder / "other.onnx")
    assert (folder / "other.json").read_text() == "{}"


def test_files_beside_are_named_after_the_model_and_never_those_of_another(tmp_path):
    """A run folder may be called lr0.1, and the next one lr0.2; two texts have two tokenizers."""
    assets = {"tokenizer.model": b"one"}
    files = exported.files_beside(tmp_path / "lr0.1", "savedmodel", "{}", assets)
    assert files == {tmp_path / "lr0.1.json": b"{}", tmp_path / "tokenizer.model": b"one"}
    assert [*exported.files_beside(tmp_path / "lr0.1.onnx", "onnx", "{}", {})] == [tmp_path / "lr0.1.json"]
    (tmp_path / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(ConfigError, match=r"would replace .*tokenizer.model, which is another model's; choose"):
        exported.files_beside(tmp_path / "lr0.1", "savedmodel", "{}", assets)


def test_a_model_that_differs_is_not_exported(folder, monkeypatch):
    def damaged(model, path):
        model.layers[-1].set_weights([weight + 0.1 for weight in model.layers[-1].get_weights()])
        model.save(path)

    monkeypatch.setitem(exported.FORMATS, "keras", (damaged, exported.FORMATS["keras"][1]))
    with pytest.raises(ConfigError, match=r"format=keras gives outputs that differ by .*; choose another format"):
        export_words(monkeypatch, f"run={folder / 'run'}", "format=keras", "--output", folder / "damaged.keras")
    assert not [path for path in folder.iterdir() if "damaged" in path.name]


def test_a_model_that_gives_no_number_is_not_exported(folder, monkeypatch):
    def broken(model, path):
        model.layers[-1].set_weights([weight * np.nan for weight in model.layers[-1].get_weights()])
        model.save(path)

    monkeypatch.setitem(exported.FORMATS, "keras", (broken, exported.FORMATS["keras"][1]))
    with pytest.raises(ConfigError, match=r"the model in format=keras gives nan; choose another format"):
        export_words(monkeypatch, f"run={folder / 'run'}", "format=keras", "--output", folder / "broken.keras")


def test_missing_packages_are_named(folder, monkeypatch):
    monkeypatch.setattr(exported, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"format=onnx needs tf2onnx and onnxruntime, .* --no-deps -r scripts/lock/export.txt"
    ):
        export_words(monkeypatch, f"run={folder / 'run'}", "format=onnx", "--output", folder / "none.onnx")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "format= is missing; give one of keras, savedmodel, onnx, tflite"),
        (["format=torch"], "format=torch is not one of keras"),
        (["format=onnx", "--output", "model.keras"], "--output model.keras does not fit format=onnx; give PATH.onnx"),
        (["format=savedmodel", "--output", "a.b"], "--output a.b does not fit format=savedmodel; give a folder"),
        (["format=onnx", "--output", "no/m.onnx"], "--output no/m.onnx is in a folder that does not exist"),
    ],
)
def test_wrong_words_are_refused_in_one_line(folder, monkeypatch, arguments, message):
    with pytest.raises(ConfigError) as refused:
        export_words(monkeypatch, f"run={folder / 'run'}", *arguments)
    assert message in str(refused.value)


def test_an_export_takes_one_process(folder, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(ConfigError, match="export takes one process"):
        export_words(monkeypatch, f"run={folder / 'run'}", "format=keras")
