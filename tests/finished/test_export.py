"""Exported models give what the run's model gives, in programs that know nothing of hvtrain."""

import importlib.util
import json
import re
import shutil
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

import hvtrain
from hvtrain.data.sources.built_in import digits
from hvtrain.errors import ConfigError
from hvtrain.finished import commands, exported, hugging_face
from launching import without_hvtrain
from tiers import mostly_nightly

DIGITS = [
    "model=mlp",
    "model.hidden=[16]",
    "dataset=digits",
    "dataset.num_test=60",
    "dataset.standardize=per_pixel",
]
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
    "hf": ("digits-keras", f"""
import numpy as np, keras
outputs = keras.saving.load_model("digits-keras")(np.load("raw.npy"))
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
    export_words(
        monkeypatch, f"run={folder / 'run'}", f"format={chosen}", "--output", folder / name
    )
    printed = capsys.readouterr().out
    assert "its outputs on 8 examples differ by at most" in printed
    without_hvtrain(script, cwd=folder)
    outputs = np.load(folder / "outputs.npy")
    run = hvtrain.load(folder / "run")
    expected = run.model(
        next(run.source.evaluation("test", run.strategy.topology, 5).as_numpy_iterator())[0]
    )
    assert outputs.dtype == np.float32 and outputs.shape == (5, 10)
    assert outputs == pytest.approx(np.asarray(expected), abs=0.1), (
        "bfloat16 rounds, float32 does not"
    )
    beside = folder / name / name if chosen == "hf" else folder / name
    description = json.loads(beside.with_suffix(".json").read_text())
    assert description["class_names"] == list("0123456789")
    with pytest.raises(ConfigError, match="exists already; choose another path"):
        export_words(
            monkeypatch, f"run={folder / 'run'}", f"format={chosen}", "--output", folder / name
        )


class Hub:
    """Stands in for the client of huggingface_hub: a folder has the repositories."""

    root: Path
    error: Exception | None = None

    def __init__(self, **library):
        assert library == {"library_name": "keras"}

    def whoami(self):
        if self.error:
            raise self.error

    def create_repo(self, name, exist_ok):
        assert exist_ok
        (self.root / name).mkdir(parents=True)

    def upload_folder(self, repo_id, folder_path, commit_message):
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    module = types.ModuleType("huggingface_hub")
    module.HfApi = Hub
    module.snapshot_download = lambda repo_id, **_: str(tmp_path / "hub" / repo_id)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setattr(Hub, "root", tmp_path / "hub", raising=False)
    # Keras has looked for the package when it was imported.
    monkeypatch.setattr("keras.src.saving.saving_lib.huggingface_hub", module)
    return tmp_path / "hub"


def test_a_model_on_the_hub_is_loaded_by_the_code_of_its_card(
    hub, folder, monkeypatch, capsys, tmp_path
):
    """Keras's own hf:// reads what was uploaded; the card's YAML is what the hub understands."""
    export_words(
        monkeypatch,
        f"run={folder / 'run'}",
        "format=hf",
        "repo=hf://me/digits",
        "--output",
        tmp_path / "exported",
    )
    assert 'uploaded; keras.saving.load_model("hf://me/digits") loads it' in capsys.readouterr().out
    card = (hub / "me" / "digits" / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    facts = yaml.safe_load(head)
    result = json.loads((folder / "run" / "result.json").read_text())
    assert (facts["library_name"], facts["metrics"]) == ("keras", ["loss", "accuracy"])
    (measured,) = facts["model-index"][0]["results"]
    assert measured["dataset"] == {"name": "digits", "type": "digits"}
    assert (
        measured["task"] == {"type": "image-classification"}
        and facts["pipeline_tag"] == "image-classification"
    )
    assert {metric["name"]: metric["value"] for metric in measured["metrics"]} == result["metrics"]
    assert "Classes, in output order: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9." in text
    variables: dict = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], variables)
    assert variables["outputs"].shape == (1, 10) and variables["inputs"].shape == (1, 8, 8)


def test_who_is_not_logged_in_is_told_before_the_export(hub, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(Hub, "error", OSError("Token is required, but no token found.\nMore of it"))
    with pytest.raises(
        ConfigError,
        match=r"repo=hf://me/digits cannot be used: .*no token found.*; if you are not logged in, ",
    ):
        export_words(
            monkeypatch,
            f"run={folder / 'run'}",
            "format=hf",
            "repo=hf://me/digits",
            "--output",
            tmp_path / "exported",
        )
    assert not (tmp_path / "exported").exists()


def test_an_upload_that_fails_leaves_the_export(hub, folder, monkeypatch, tmp_path):
    (hub / "me" / "digits").mkdir(parents=True)
    with pytest.raises(
        ConfigError,
        match=r"exported was written, but not uploaded to hf://me/digits: .*File exists",
    ):
        export_words(
            monkeypatch,
            f"run={folder / 'run'}",
            "format=hf",
            "repo=hf://me/digits",
            "--output",
            tmp_path / "exported",
        )
    assert (tmp_path / "exported" / "README.md").exists()


def test_a_card_shows_the_metrics_of_its_checkpoint_alone():
    best = {"step": 20, "metric": "val_accuracy", "value": 0.9, "metrics": {"test_accuracy": 0.8}}
    result = {"num_steps": 30, "metrics": {"test_accuracy": 0.7}, "best": best}
    for step, metrics in ((20, {"test_accuracy": 0.8}), (30, {"test_accuracy": 0.7}), (10, {})):
        assert hugging_face.checkpoint_metrics(result, f"step-{step:08d}") == metrics
    table = {
        "input": {
            "age": {"shape": [1], "dtype": "float32"},
            "town": {"shape": [1], "dtype": "string"},
        },
        "output": {"values": "logits"},
        "class_names": None,
        "dataset": "people",
        "checkpoint": "step-00000010",
    }
    card = hugging_face.model_card(table, result, "classification", False, "people")
    assert (
        'inputs = {"age": tf.zeros([1, 1], "float32"), "town": tf.zeros([1, 1], "string")}' in card
    )
    assert "This checkpoint was not evaluated on test data." in card and "pipeline_tag" not in card
    several = {**table, "input": [table["input"], {"shape": [None, 3], "dtype": "int32"}]}
    card = hugging_face.model_card(several, result, "regression", False, "people")
    assert (
        '"string")}, tf.zeros([1, 64, 3], "int32")]' in card
        and "Inputs: as in the example." in card
    )
    short = hugging_face.model_card({**several, "length": 32}, result, "language", False, "people")
    assert 'tf.zeros([1, 32, 3], "int32")' in short, "a model of short texts takes no more"


def test_a_description_of_another_export_is_not_replaced(folder, monkeypatch):
    (folder / "other.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"would replace .*other.json, which belongs to another model; choose"
    ):
        export_words(
            monkeypatch, f"run={folder / 'run'}", "format=keras", "--output", folder / "other.keras"
        )
    assert (folder / "other.json").read_text() == "{}"


def test_files_beside_are_named_after_the_model_and_never_those_of_another(tmp_path):
    """A run folder may be called lr0.1, and the next one lr0.2; two texts have two tokenizers."""
    assets = {"tokenizer.model": b"one"}
    files = exported.companion_files(tmp_path / "lr0.1", "savedmodel", "{}", assets)
    assert files == {tmp_path / "lr0.1.json": b"{}", tmp_path / "tokenizer.model": b"one"}
    assert [*exported.companion_files(tmp_path / "lr0.1.onnx", "onnx", "{}", {})] == [
        tmp_path / "lr0.1.json"
    ]
    (tmp_path / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(
        ConfigError, match=r"would replace .*tokenizer.model, which belongs to another model; "
    ):
        exported.companion_files(tmp_path / "lr0.1", "savedmodel", "{}", assets)


def test_a_model_that_differs_is_not_exported(folder, monkeypatch):
    def damaged(model, path):
        model.layers[-1].set_weights([weight + 0.1 for weight in model.layers[-1].get_weights()])
        model.save(path)

    monkeypatch.setitem(exported.FORMATS, "keras", (damaged, exported.FORMATS["keras"][1]))
    with pytest.raises(
        ConfigError,
        match=r"format=keras gives outputs that differ from the run's by .*; choose another format",
    ):
        export_words(
            monkeypatch,
            f"run={folder / 'run'}",
            "format=keras",
            "--output",
            folder / "damaged.keras",
        )
    assert not [path for path in folder.iterdir() if "damaged" in path.name]


def test_a_model_that_gives_no_number_is_not_exported(folder, monkeypatch):
    def broken(model, path):
        model.layers[-1].set_weights([weight * np.nan for weight in model.layers[-1].get_weights()])
        model.save(path)

    monkeypatch.setitem(exported.FORMATS, "keras", (broken, exported.FORMATS["keras"][1]))
    with pytest.raises(
        ConfigError,
        match=r"format=keras gives outputs that differ from the run's by nan, .*; choose another",
    ):
        export_words(
            monkeypatch,
            f"run={folder / 'run'}",
            "format=keras",
            "--output",
            folder / "broken.keras",
        )


def test_missing_packages_are_named(folder, monkeypatch):
    monkeypatch.setattr(exported, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"format=onnx needs tf2onnx and onnxruntime; .* --no-deps -r scripts/lock/export.txt",
    ):
        export_words(
            monkeypatch, f"run={folder / 'run'}", "format=onnx", "--output", folder / "none.onnx"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "format= needs a value; give one of keras, savedmodel, onnx, tflite, hf"),
        (["format=torch"], "format=torch is not one of keras"),
        (
            ["format=onnx", "--output", "model.keras"],
            "--output model.keras does not fit format=onnx; give PATH.onnx",
        ),
        (
            ["format=savedmodel", "--output", "a.b"],
            "--output a.b does not fit format=savedmodel; give a folder",
        ),
        (["format=hf", "repo=digits"], "repo=digits is not a Hub address; give hf://USER/NAME"),
        (
            ["format=hf", "repo=hf://me/digits"],
            "repo=hf://me/digits needs the package huggingface_hub (",
        ),
        (
            ["format=keras", "repo=hf://me/digits"],
            "repo=hf://me/digits needs format=hf; add format=hf, or leave repo out",
        ),
        (
            ["format=onnx", "--output", "no/m.onnx"],
            "--output no/m.onnx: there is no folder no",
        ),
    ],
)
def test_wrong_words_are_refused_in_one_line(folder, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError) as refused:
        export_words(monkeypatch, f"run={folder / 'run'}", *arguments)
    assert message in str(refused.value)


def test_an_export_takes_one_process(folder, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="export runs in one process"):
        export_words(monkeypatch, f"run={folder / 'run'}", "format=keras")


def test_many_outputs_keep_their_order(tmp_path):
    inputs = keras.Input((1,))
    model = keras.Model(inputs, [inputs * number for number in range(11)])
    write, open_exported = exported.FORMATS["tflite"]
    write(model, tmp_path / "m.tflite")
    outputs = open_exported(tmp_path / "m.tflite")(np.ones((1, 1), np.float32))
    assert np.ravel(outputs).tolist() == list(range(11))


def test_the_columns_of_a_table_may_have_any_names_in_a_saved_model(tmp_path):
    """TensorFlow refuses them in a signature; the numbers of columns go where they belong."""
    names = ["sepal length (cm)", "größe", "_size", "plain"]
    inputs = {name: keras.Input((1,), name=name) for name in names}
    model = keras.Model(inputs, keras.ops.concatenate([inputs[name] for name in names], axis=1))
    write, open_exported = exported.FORMATS["savedmodel"]
    write(model, tmp_path / "saved")
    batch = {name: tf.constant([[float(index)]]) for index, name in enumerate(names)}
    (outputs,) = open_exported(tmp_path / "saved")(batch)
    assert outputs.tolist() == [[0, 1, 2, 3]]
    signature = tf.saved_model.load(tmp_path / "saved").signatures["serve"]
    assert {*signature.structured_input_signature[1]} == {
        "sepal_length__cm_",
        "gr__e",
        "arg__size",
        "plain",
    }
