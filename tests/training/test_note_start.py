"""The starts of a run, noted in its folder."""

from types import SimpleNamespace

import pytest

from hvtrain.system import console
from hvtrain.system.run_files import last_step_at, note_step, read_starts
from hvtrain.training import run_folder


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "checkout", lambda folder: {"commit": "c", "diff": "a change"})
    monkeypatch.setattr(
        "sys.argv", ["/x/hvtrain/__main__.py", "model=mlp", "+dataset.password=hunter2"]
    )
    plan = SimpleNamespace(size=2, num_steps=40, run_steps=40, steps_per_epoch=10)
    task, strategy = SimpleNamespace(sign=lambda name: -1), SimpleNamespace(num_computing=2)
    meta = {"versions": {"hvtrain": "0.1.0"}}
    return SimpleNamespace(
        folder=tmp_path, plan=plan, best="val_loss", task=task, strategy=strategy, meta=meta
    )


def test_a_start_has_its_command_and_the_newest_one_the_diff(run, monkeypatch):
    monkeypatch.setattr(run_folder, "MAX_STARTS", 3)
    for step in range(5):
        run_folder.note_start(run, ["s1", "s1"], {"model": "mlp"}, step)
    starts = read_starts(run.folder)
    assert [start["first_step"] for start in starts] == [2, 3, 4]
    assert [start["git"]["diff"] for start in starts] == ["", "", "a change"]
    monkeypatch.setenv(console.BY_HAND, "python -m hvtrain launch --job-name worker")
    assert run_folder.command([], ["s1", "s2"]) == "python -m hvtrain launch --job-name worker"
    newest = starts[-1]
    assert (
        newest["command"] == "horovodrun -np 2 python -m hvtrain model=mlp '+dataset.password=***'"
    )
    assert (newest["hosts"], newest["best"], newest["sign"]) == ({"s1": 2}, "val_loss", -1)
    assert newest["described"] == {"model": "mlp"}


def test_an_address_among_a_scripts_arguments_has_no_secret():
    """One with an equals sign was taken for a setting, whose name was shown."""
    argv = ["train.py", "https://me:hunter2@host/data?v=2", "https://host/data?sig=hunter2"]
    shown = "python train.py 'https://***@host/data?v=2' 'https://host/data?sig=***'"
    assert run_folder.command(argv, ["s1"]) == shown


def test_a_run_does_not_fail_for_a_start_that_cannot_be_noted(run, caplog):
    run.folder = run.folder / "gone"
    run_folder.note_start(run, ["s1"], {}, 0)
    (message,) = caplog.messages
    assert message.startswith("starts.json is not written: StorageError: ") and "\n" not in message


def test_a_start_without_a_step_leaves_the_time_of_the_last_one(run):
    run_folder.note_start(run, ["s1"], {}, 0)
    note_step(run.folder, 1000.5)
    run_folder.note_start(run, ["s1"], {}, 7)
    assert last_step_at(run.folder) == 1000.5
    note_step(run.folder)
    assert last_step_at(run.folder) > 1000.5


def test_a_damaged_file_is_begun_anew(run):
    (run.folder / "starts.json").write_text('[{"first_step": 0}, 3')
    run_folder.note_start(run, ["s1"], {}, 7)
    assert [start["first_step"] for start in read_starts(run.folder)] == [7]
