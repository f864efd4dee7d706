"""The list of runs: states, scores, order, width."""

import json
import os
import sys

import pytest

from hvtrain.errors import ConfigError
from hvtrain.report import commands
from run_folders import START, write_run


def listed(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["runs", *map(str, arguments)])
    assert commands.list_runs() == 0
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path):
    runs = tmp_path / "runs"
    write_run(
        runs / "b_good", metrics={"test_accuracy": 0.9, "test_loss": 0.2}, examples_per_second=100.0
    )
    write_run(
        runs / "sweep/a_better",
        metrics={"test_accuracy": 0.95},
        num_ranks=4,
        examples_per_second=9000.5,
    )
    begun = write_run(
        runs / "2026-11-24_10-00-00-a_name_that_is_longer_than_there_is_room",
        finished=False,
        num_epochs=2,
    )
    (begun / "starts.json").write_text(
        json.dumps([{**START, "began": "2026-11-23T09:00:00+01:00"}])
    )
    error = write_run(runs / "regression", metrics={"test_mean_absolute_error": 3.0})
    (error / "starts.json").write_text(
        json.dumps([{**START, "best": "val_mean_absolute_error", "sign": -1}])
    )
    (write_run(runs / "damaged") / "result.json").write_text("{")
    (runs / "no_run").mkdir()
    return runs


def test_all_runs_below_the_folder_are_listed_by_date(folder, monkeypatch, capsys):
    text = listed(monkeypatch, capsys, folder)
    head, first, *_ = text.splitlines()
    assert head.split() == ["began", "state", "ranks", "ex/s", "score", "metric", "run"]
    assert first.startswith("2026-11-23 09:00  failed 50%*")
    assert first.endswith("  2026-11-24_10-00-00-a_name_that_is_longer_than_there_is_room")
    assert "0.9500  test_" in text and "a_better" in text and "no_run" not in text
    assert "9,000" in text and "damaged" in text
    assert "* to resume such a run, repeat its command with run.dir=RUN" in text


def test_scores_are_sorted_from_the_best_on_within_their_metric(folder, monkeypatch, capsys):
    better = write_run(folder / "less_error", metrics={"test_mean_absolute_error": 2.0})
    (better / "starts.json").write_text((folder / "regression/starts.json").read_text())
    rows = json.loads(listed(monkeypatch, capsys, folder, "--sort", "score", "--json"))
    names = [row["run"].rpartition("/")[2] for row in rows]
    assert names[:4] == ["a_better", "b_good", "less_error", "regression"]
    assert [row["score"] for row in rows][-1] is None
    rows = json.loads(listed(monkeypatch, capsys, folder, "--sort", "speed", "--json"))
    assert rows[0]["examples_per_second"] == 9000.5 and rows[0]["num_ranks"] == 4


def test_replicas_and_workers_count_like_ranks(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "mirrored", num_ranks=1, num_replicas=8)
    write_run(tmp_path / "older", num_ranks=3)
    begun = write_run(tmp_path / "servers", finished=False)
    (begun / "starts.json").write_text(json.dumps([{**START, "num_ranks": 1, "num_replicas": 5}]))
    rows = json.loads(listed(monkeypatch, capsys, tmp_path, "--json"))
    assert {row["run"]: row["num_ranks"] for row in rows} == {
        "mirrored": 8,
        "older": 3,
        "servers": 5,
    }


def test_hidden_and_deep_folders_and_scores_that_are_no_number(folder, monkeypatch, capsys):
    for name in (".hidden", "a/b/c/too_deep", "b_good/in_a_run"):
        write_run(folder / name)
    write_run(folder / "diverged", metrics={"test_accuracy": float("nan")})
    text = listed(monkeypatch, capsys, folder, "--sort", "score", "--json")
    rows = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [row["score"] for row in rows if row["run"] == "diverged"] == [None]
    assert [row["score"] for row in rows][:2] == [0.95, 0.9]
    assert not {"hidden", "deep", "in_a_run"} & {row["run"].rpartition("_")[2] for row in rows}


def test_a_damaged_run_is_listed_with_its_error(folder, monkeypatch, capsys):
    rows = {row["run"]: row for row in json.loads(listed(monkeypatch, capsys, folder, "--json"))}
    assert (
        rows["damaged"]["state"] == "damaged"
        and "result.json is damaged" in rows["damaged"]["error"]
    )
    assert rows["b_good"]["error"] is None


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "result.json",
        "history.csv",
        "ranks.csv",
        "starts.json",
        "config.yaml",
        "review.json",
        "logs/rank-0000.log",
    ],
)
@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_holds_up_nobody(folder, monkeypatch, capsys, name):
    """Its reader would wait for a writer that never comes."""
    path = folder / "b_good" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    rows = json.loads(listed(monkeypatch, capsys, folder, "--json"))
    assert {"a_better", "regression"} < {row["run"].rpartition("/")[2] for row in rows}


def test_the_default_folder_and_a_run_itself(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    assert listed(monkeypatch, capsys) == listed(monkeypatch, capsys, folder)
    assert len(listed(monkeypatch, capsys, folder / "b_good").splitlines()) == 2


def test_a_folder_without_runs(tmp_path, monkeypatch, capsys):
    assert listed(monkeypatch, capsys, tmp_path) == f"no runs in {tmp_path}\n"
    with pytest.raises(
        ConfigError, match="gone is not a folder; give the folder that holds the runs"
    ):
        listed(monkeypatch, capsys, tmp_path / "gone")
