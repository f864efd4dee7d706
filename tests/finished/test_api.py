"""hvtrain.compose, train and load, and what a language run writes: one small run in this process."""

import re
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest

import hvtrain
from hvtrain.checks.replay import replay
from hvtrain.data.formats.documents import python_documentation
from hvtrain.errors import CheckpointError, ConfigError, DataError
from hvtrain.finished import commands
from hvtrain.finished.arguments import foreign_code

TEXT = ["dataset=text", "dataset.vocabulary_size=500", "dataset.length=16", "task=language"]
MODEL = [
    "model=transformer",
    "model.width=16",
    "model.blocks=1",
    "model.heads=2",
    "strategy=single",
    "train.steps=20",
]


@pytest.fixture(scope="module")
def tales(tmp_path_factory):
    """A run, its record and its settings."""
    folder = tmp_path_factory.mktemp("tales")
    (folder / "tales").mkdir()
    for number, text in enumerate(python_documentation()[:12]):
        (folder / f"tales/{number}.txt").write_text(text)
    arguments = [
        *TEXT,
        f"dataset.file={folder / 'tales'}",
        *MODEL,
        "model.dropout=0",
        f"run.dir={folder / 'run'}",
    ]
    config = hvtrain.compose(arguments)
    return folder / "run", hvtrain.train(config), config


def test_a_script_composes_trains_and_loads(tales):
    folder, record, config = tales
    assert record.num_steps == 20 == config.train.steps
    run = hvtrain.load(folder, ["checkpoint=last"])
    loss = run.model.evaluate(run.source.evaluation("test", run.strategy.topology, 64), verbose=0)[
        0
    ]
    assert loss == pytest.approx(record.metrics["test_loss"], rel=1e-3)
    assert run.checkpoint == "step-00000020" and run.is_chief


def test_the_command_line_stays_as_it_was(monkeypatch):
    arguments = ["script.py", "an argument"]
    monkeypatch.setattr(sys, "argv", arguments[:])
    assert hvtrain.compose(["train.epochs=3"]).train.epochs == 3
    with pytest.raises(ConfigError, match=r"unknown setting 'trian.epochs'"):
        hvtrain.compose(["trian.epochs=3"])
    assert sys.argv == arguments


def test_loading_says_what_is_wrong(tales, tmp_path):
    with pytest.raises(ConfigError, match="run=nowhere is not the folder of a run"):
        hvtrain.load("nowhere")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_bytes((tales[0] / "config.yaml").read_bytes())
    with pytest.raises(CheckpointError, match="holds no checkpoint; train the run first"):
        hvtrain.load(tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint=best, but .* has none"):
        hvtrain.load(tmp_path, ["checkpoint=best"])
    with pytest.raises(ConfigError, match="checkpoint=first is not one of best, last"):
        hvtrain.load(tales[0], ["checkpoint=first"])
    with pytest.raises(CheckpointError, match="belongs to another model"):
        hvtrain.load(tales[0], ["model.width=8"])


def test_importing_hvtrain_is_cheap_and_typed():
    code = "import sys, hvtrain; sys.exit(str({'tensorflow', 'keras', 'hydra', 'numpy'} & set(sys.modules) or ''))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True
        ).stderr.strip()
        == b""
    )
    assert (files("hvtrain") / "py.typed").is_file()


def written(monkeypatch, capsys, folder, *arguments):
    monkeypatch.setattr(sys, "argv", ["generate", f"run={folder}", *arguments])
    assert commands.generate() == 0
    return capsys.readouterr().out


def test_a_text_goes_on(tales, monkeypatch, capsys):
    arguments = ["prompt=The statement", "--tokens", "12", "--temperature", "0.8"]
    text = written(monkeypatch, capsys, tales[0], *arguments)
    assert text.startswith("The statement") and len(text) > len("The statement\n")
    assert text == written(monkeypatch, capsys, tales[0], *arguments)
    assert text != written(monkeypatch, capsys, tales[0], *arguments, "--seed", "3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "prompt=TEXT is missing"),
        (["prompt=The", "--tokens", "0"], "0 is not a whole number of at least 1"),
        (
            ["prompt=The", "dataset=digits", "model.width=8"],
            "digits differs in kind from the run's training data: ",
        ),
        (
            ["prompt=The", "dataset=digits", "+dataset.flip=true"],
            "unexpected keyword argument 'flip'",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(tales, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["generate", f"run={tales[0]}", *arguments])
    with pytest.raises((ConfigError, DataError), match=re.escape(message)):
        commands.generate()


def test_predict_needs_examples(tales, monkeypatch, tmp_path):
    np.save(tmp_path / "none.npy", np.zeros((0, 16), np.int32))
    monkeypatch.setattr(
        sys, "argv", ["predict", f"run={tales[0]}", f"input={tmp_path / 'none.npy'}"]
    )
    with pytest.raises(DataError, match=r"none.npy holds no examples; give a file that has some"):
        commands.predict()


def test_predict_sends_those_with_text_to_generate(tales, monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["predict", f"run={tales[0]}", "--output", str(tmp_path / "text.csv")]
    )
    with pytest.raises(
        ConfigError,
        match=r"does not fit a row of a table; use hvtrain.load\(run\).model, or .*generate",
    ):
        commands.predict()
    assert not list(tmp_path.iterdir())


def test_a_run_whose_data_have_changed_is_used_as_it_was_trained(tmp_path, monkeypatch, capsys):
    """The columns' means, categories and classes are the run's; only what reads a part of the data is refused."""
    rows = [
        f"{number % 7},{'xyz'[number % 3]},{'yes' if number % 7 > 3 else 'no'}"
        for number in range(60)
    ]
    data, new = tmp_path / "data.csv", tmp_path / "new.csv"
    data.write_text("\n".join(["size,kind,target", *rows]) + "\n")
    new.write_text("size,kind,target\n3,x,no\n5,z,no\n-2,other,no\n")
    table = [
        "dataset=table",
        f"dataset.file={data}",
        "dataset.num_test=20",
        "model=mlp",
        "model.hidden=[4]",
    ]
    hvtrain.train(
        hvtrain.compose([*table, "strategy=single", "train.steps=3", f"run.dir={tmp_path / 'run'}"])
    )

    def predicted(*arguments):
        output = tmp_path / "predicted.csv"
        monkeypatch.setattr(
            sys, "argv", ["predict", f"run={tmp_path / 'run'}", *arguments, f"--output={output}"]
        )
        assert commands.predict() == 0
        return output.read_text()

    before, rows = predicted(f"input={new}"), data.read_text()
    data.write_text(rows + "900,x,yes\n" * 30)
    fitted = tmp_path / "run" / "preprocessing"
    fitted.rename(tmp_path / "away")
    with pytest.raises(DataError, match="is not the one that checkpoint"):
        predicted(f"input={new}")  # It would be preprocessed as the data are today.
    (tmp_path / "away").rename(fitted)
    data.write_text(rows + "900,w,yes\n" * 30)
    assert predicted(f"input={new}") == before
    with pytest.raises(
        DataError,
        match=r"is not the one that checkpoint .*train holds 70 examples, was 40; .*guard.data",
    ):
        predicted("split=test")
    assert predicted("guard.data=false").count("\n") == 21
    capsys.readouterr()
    assert predicted(f"dataset.test_file={new}").count("\n") == 4
    printed = "".join(capsys.readouterr())
    assert "test: 33% of the rows have a value of kind that training did not have" in printed
    data.write_text(data.read_text() + "1,x,perhaps\n")
    with pytest.raises(
        DataError, match=r"target holds perhaps, which is not one of the run's classes \(no, yes\)"
    ):
        predicted("guard.data=false")
    assert predicted(f"input={new}") == before
    data.unlink()
    assert predicted(f"input={new}") == before


def test_a_text_run_keeps_its_tokenizer(tales, monkeypatch, capsys):
    text = written(monkeypatch, capsys, tales[0], "prompt=The statement", "--tokens", "5")
    more = tales[0].parent / "tales/more.txt"
    more.write_text("zyx zyx zyx " * 5000)
    try:
        assert (
            written(monkeypatch, capsys, tales[0], "prompt=The statement", "--tokens", "5") == text
        )
        with pytest.raises(DataError, match="the data set is not the one that checkpoint"):
            hvtrain.load(tales[0])
    finally:
        more.unlink()


TARGETS = {
    "model": "model: {_target_: numpy.load, file: evil.npy, allow_pickle: true}",
    "of hvtrain": "dataset: {_target_: hvtrain.launch.notebook.read_object, path: evil}",
    "within": "task: {_target_: hvtrain.tasks.Custom, loss: {a: [{_target_: os.system, command: touch evil}]}}",
    "interpolated": "model: \"${oc.decode:'{_target_: os.system}'}\"",
    "Hydra": "hydra: {callbacks: {a: {_target_: os.system}}}",
}


@pytest.mark.parametrize("settings", TARGETS.values(), ids=TARGETS)
def test_code_that_a_run_folder_names_is_not_called_unless_it_is_trusted(
    settings, tmp_path, monkeypatch
):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text(f"{settings}\n")
    with pytest.raises(
        ConfigError, match=r"names code that is not hvtrain's or Keras's.*; add --trust"
    ):
        hvtrain.load(tmp_path)
    with pytest.raises(ConfigError, match=r"does not have all settings"):
        hvtrain.load(tmp_path, trust=True)
    monkeypatch.setattr(sys, "argv", ["predict", f"run={tmp_path}", "--trust"])
    with pytest.raises(ConfigError, match=r"does not have all settings"):
        commands.predict()


def test_commands_that_train_a_run_again_refuse_foreign_code_of_its_training(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("callbacks: {a: {_target_: os.system}}\n")
    assert foreign_code(tmp_path, []) == [], "opening a run calls no callback"
    monkeypatch.setattr(sys, "argv", ["replay", f"run={tmp_path}"])
    with pytest.raises(ConfigError, match=r"callbacks.a._target_=os.system; add --trust"):
        replay()


def test_a_target_that_the_user_gives_is_trusted(tales, monkeypatch):
    config = tales[0] / "config.yaml"
    monkeypatch.setattr("hvtrain.finished.arguments.CONFIG_FILE", "own.yaml")
    (tales[0] / "own.yaml").write_text(
        config.read_text().replace("hvtrain.models.transformer", "own.model")
    )
    assert foreign_code(tales[0], []) == ["model._target_=own.model"]
    assert (
        foreign_code(tales[0], ["model._target_=own.model"])
        == foreign_code(tales[0], ["model=cnn"])
        == []
    )
    # Braces merge into the run's part.
    assert foreign_code(tales[0], ["model={}"]) == ["model._target_=own.model"]


def test_a_choice_in_the_run_folder_is_foreign(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {}\n")
    (tmp_path / "model").mkdir()
    own = tmp_path / "model" / "cnn.yaml"
    own.write_text('"_target_" : os.system\n')
    assert foreign_code(tmp_path, ["model=cnn"]) == [str(own)]
