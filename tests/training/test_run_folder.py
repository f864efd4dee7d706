"""The files that describe a run's folder, and folders of runs that never began."""

import sys

import keras
import pytest

from hvtrain.config.compose import compose
from hvtrain.config.instantiate import build
from hvtrain.config.schema import default_run_dir, from_dict, to_dict
from hvtrain.errors import ConfigError
from hvtrain.system.run_lock import RunLock
from hvtrain.training.run_folder import open_run_folder, remove_if_empty


def opened(folder, *words):
    config = from_dict(compose(list(words))[0])
    config.run.dir = str(folder)
    with RunLock() as lock:
        open_run_folder(config, lock)
    return config


def test_the_configuration_in_the_folder_repeats_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hvtrain"])
    words = ["model=mlp", "model.hidden=[7]", "optimizer=momentum", "callbacks=early_stopping", "train.steps=70"]
    config = opened(tmp_path / "run", *words)
    (again,) = compose(["--config-dir", str(tmp_path / "run"), "train.batch_size=5"])
    expected = to_dict(config)
    expected["run"]["dir"], expected["train"]["batch_size"] = None, 5
    assert to_dict(from_dict(again)) == expected
    assert f"run.dir={tmp_path / 'run'}" in (tmp_path / "run" / "README.md").read_text()


def test_settings_may_name_the_run_folder(tmp_path, monkeypatch, capsys):
    """Also where it is not yet known, and, repeated from its config.yaml, the new one."""
    monkeypatch.setattr(sys, "argv", ["hvtrain"])
    log = "+callbacks.log={_target_: keras.callbacks.CSVLogger, filename: '${run.dir}/log.csv'}"
    assert compose([log, "--cfg", "job"]) == []
    assert "filename: ${run.dir}/log.csv" in capsys.readouterr().out
    config = opened(tmp_path / "run", log)
    assert build(config, "callbacks.log", keras.callbacks.Callback).filename == f"{tmp_path}/run/log.csv"
    again = from_dict(compose(["--config-dir", str(tmp_path / "run"), f"run.dir={tmp_path}/new"])[0])
    assert build(again, "callbacks.log", keras.callbacks.Callback).filename == f"{tmp_path}/new/log.csv"
    again.run.dir = None
    with pytest.raises(ConfigError, match=r"callbacks\.log names \$\{run\.dir\} but is built before the run folder is"):
        build(again, "callbacks.log", keras.callbacks.Callback)


def test_the_default_name_is_what_was_chosen(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hvtrain"])
    for words, name in (
        (["model=resnet50", "dataset=image_folder", "dataset.dir=data"], "-resnet50-image_folder"),
        (["run.name=baseline"], "-baseline"),
    ):
        assert default_run_dir(from_dict(compose(words)[0])).endswith(name)


def test_a_folder_without_anything_to_keep_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hvtrain"])
    for keeps in (False, True):
        opened(tmp_path / "run")
        (tmp_path / "run" / "logs").mkdir()
        (tmp_path / "run" / "logs" / "rank-0000.log").touch()
        if keeps:
            (tmp_path / "run" / "comm.json").touch()
        remove_if_empty(tmp_path / "run")
        assert (tmp_path / "run").exists() == keeps
