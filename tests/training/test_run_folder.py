"""The files that describe a run's folder, and folders of runs that never began."""

import sys

import keras
import pytest

from hvtrain.config.compose import compose
from hvtrain.config.instantiate import build
from hvtrain.config.schema import default_run_dir, from_dict
from hvtrain.data.kinds import KINDS_FILE
from hvtrain.errors import ConfigError
from hvtrain.runner import run_to_end
from hvtrain.strategies.base import Strategy
from hvtrain.system.run_files import remove_if_empty
from hvtrain.system.run_lock import RunLock
from hvtrain.training import run_folder
from hvtrain.training.run import RunState
from hvtrain.training.run_folder import open_run_folder


@pytest.fixture(autouse=True)
def command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hvtrain"])


def opened(folder, *overrides):
    config = from_dict(compose(list(overrides)))
    config.run.dir = str(folder)
    with RunLock() as lock:
        open_run_folder(config, RunState(0.0, lock=lock))
    return config


def test_the_configuration_in_the_folder_repeats_the_run(tmp_path):
    overrides = [
        "model=mlp",
        "model.hidden=[7]",
        "optimizer=momentum",
        "callbacks=early_stopping",
        "train.steps=70",
    ]
    config = opened(tmp_path / "run", *overrides)
    again = compose(["--config-dir", str(tmp_path / "run"), "train.batch_size=5"])
    expected = config.record
    expected["run"]["dir"], expected["train"]["batch_size"] = None, 5
    assert from_dict(again).record == expected
    assert f"run.dir={tmp_path / 'run'}" in (tmp_path / "run" / "README.md").read_text()
    opened(tmp_path / "run", "seed=4")  # It may still be refused.
    assert "seed: 1\n" in (tmp_path / "run/config.yaml").read_text()


def test_settings_may_name_the_run_folder(tmp_path, capsys):
    """Also where it is not yet known, and, repeated from its config.yaml, the new one."""
    log = "+callbacks.log={_target_: keras.callbacks.CSVLogger, filename: '${run.dir}/log.csv'}"
    with pytest.raises(SystemExit, match=r"^0$"):
        compose([log, "--cfg", "job"])
    assert "filename: ${run.dir}/log.csv" in capsys.readouterr().out
    config = opened(tmp_path / "run", log)
    assert (
        build(config, "callbacks.log", keras.callbacks.Callback).filename
        == f"{tmp_path}/run/log.csv"
    )
    again = from_dict(compose(["--config-dir", str(tmp_path / "run"), f"run.dir={tmp_path}/new"]))
    assert (
        build(again, "callbacks.log", keras.callbacks.Callback).filename
        == f"{tmp_path}/new/log.csv"
    )
    again.run.dir = None
    with pytest.raises(
        ConfigError,
        match=r"callbacks\.log names \$\{run\.dir\} but is built before the run folder is",
    ):
        build(again, "callbacks.log", keras.callbacks.Callback)


def test_a_folder_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert compose(["run.dir='~/runs/1'"])["run"]["dir"] == "/home/me/runs/1"


def test_the_default_name_is_what_was_chosen():
    for overrides, name in (
        (["model=resnet50", "dataset=image_folder", "dataset.dir=data"], "-resnet50-image_folder"),
        (["run.name=baseline"], "-baseline"),
    ):
        assert default_run_dir(from_dict(compose(overrides))).endswith(name)


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "default_run_dir", lambda config, parent: f"{parent}/now")
    folders = []
    for _ in range(3):
        with RunLock() as lock:
            folders.append(open_run_folder(from_dict(compose([])), RunState(0.0, lock=lock)).name)
    assert folders == ["now", "now-2", "now-3"]


@pytest.mark.parametrize("name", ["README.md", "config.yaml", "history.csv", "model.keras"])
def test_files_of_others_are_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(
        ConfigError, match=f"is not a run folder, and a run would replace its {name}; choose"
    ):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name] and (
        tmp_path / name
    ).read_text() == "mine"


def test_a_folder_with_other_files_may_become_that_of_a_run_and_a_run_may_begin_there_again(
    tmp_path,
):
    (tmp_path / "slurm-12.out").touch()
    for _ in range(2):
        opened(tmp_path)


def test_a_configuration_that_is_not_a_runs_is_not_passed_over(tmp_path):
    """Hydra would train hvtrain's default model without a word."""
    config = opened(tmp_path / "run", "model=mlp", "train.steps=70")
    (tmp_path / "alone").mkdir()
    text = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "alone/config.yaml").write_text(text)
    again = compose(["--config-dir", str(tmp_path / "alone")])
    assert again["train"]["steps"] == 70 and again["model"] == config.model
    for content, message in (
        (text + "{", "cannot be read"),
        ("train: {steps: 7}", "does not have all settings of a run"),
    ):
        (tmp_path / "alone/config.yaml").write_text(content)
        with pytest.raises(ConfigError, match=message):
            compose(["--config-dir", str(tmp_path / "alone")])
    (tmp_path / "run/config.yaml").unlink()
    with pytest.raises(
        ConfigError,
        match=r"is a run folder without its config\.yaml; restore that, or give another folder",
    ):
        compose(["--config-dir", str(tmp_path / "run")])


def test_a_refused_run_leaves_no_folder_of_its_own(tmp_path):
    def refused(config, strategy, state):
        state.folder = open_run_folder(config, state)
        raise ConfigError("no such thing")

    config = from_dict(compose([f"run.dir={tmp_path / 'run'}"]))
    for was_there in (False, True):
        if was_there:
            (tmp_path / "run").mkdir()
        with pytest.raises(ConfigError, match="no such thing"):
            run_to_end(config, Strategy(), refused, RunState(0.0))
        assert (tmp_path / "run").exists() == was_there


def test_a_folder_without_anything_to_keep_is_removed(tmp_path):
    for keeps in (False, True):
        opened(tmp_path / "run")
        (tmp_path / "run" / "logs").mkdir()
        (tmp_path / "run" / "logs" / "rank-0000.log").touch()
        (tmp_path / "run" / KINDS_FILE).touch()  # Written before the first batches are compared.
        if keeps:
            (tmp_path / "run" / "comm.json").touch()
        remove_if_empty(tmp_path / "run")
        assert (tmp_path / "run").exists() == keeps
