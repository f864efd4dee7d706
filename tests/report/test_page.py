"""The page of a run and the comparison of several, from stored numbers."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from hvtrain.errors import ConfigError, StorageError
from hvtrain.report import commands, page
from hvtrain.report.charts import INK, LINE, MUTED, SERIES, comparison_charts, run_charts
from hvtrain.report.run_files import read_run
from hvtrain.system.run_files import ranks_table
from hvtrain.system.run_lock import RunLock
from run_folders import CONFIG, SPLIT, START, write_run


def called(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
    return commands.report_runs()


def test_a_page_has_what_was_run_and_what_came_of_it(tmp_path):
    log = "2026-11-24 10:00:01,000 WARNING hvtrain.x: the disk is slow\n"
    text = page.html(read_run(write_run(tmp_path / "run", log=log)))
    for expected in (
        *("0.97", "1 min 15 s", "1,234", "70%", "val_<wbr>accuracy", "finished"),
        *(
            "Reductions 40 of 40 steps",
            "Weights equal on 2/2 ranks (5 checks)",
            "640 of 650 samples seen once",
        ),
        *(
            "6.00 ms",
            "rank 1 on s2",
            "horovodrun -np 2 python -m hvtrain model=mlp",
            f"horovodrun -np 2 -H s1:1,s2:1 python -m hvtrain --config-dir {tmp_path}/run",
        ),
        *("s1 (1 rank), s2 (1 rank)", "0" * 40, " M train.py", "some processor", "keras 3.15.1"),
        *(
            "train.epochs",
            "rank 0 warning: the disk is slow",
            "2026-11-24 10:00",
            "Once upon a time",
            "8, taken for 1",
        ),
        *(
            ">loss<",
            ">accuracy<",
            ">learning rate<",
            ">work of a step by rank, ms<",
            ">validation<",
            ">rank 1<",
        ),
    ):
        assert expected in text, expected


def test_a_page_is_one_file_that_asks_for_no_other(tmp_path):
    text = page.html(read_run(write_run(tmp_path / "run")))
    assert not re.findall(r"(?:src|href)=[\"'](?!data:|#)", text.replace('xlink:href="#', ""))
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}  # Names of formats.
    charts = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert charts and not [
        color for color in (*SERIES, INK, MUTED, LINE) if any(color in chart for chart in charts)
    ]
    assert all("var(--series-1)" in chart and "var(--muted)" in chart for chart in charts), (
        "they follow the page"
    )


def test_names_and_messages_are_no_markup(tmp_path):
    log = "2026-11-24 10:00:01,000 ERROR hvtrain.x: <script>alert(1)</script>\n"
    metrics = {"<b>loss": 1.0}
    text = page.html(read_run(write_run(tmp_path / "<i>run", log=log, metrics=metrics)))
    assert "<script>" not in text and "<b>loss" not in text and "<i>run" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_an_unfinished_run_has_a_page_of_what_is_there(tmp_path):
    log = "2026-11-24 10:00:01,000 ERROR hvtrain: rank 1 is gone\n"
    run = read_run(write_run(tmp_path / "run", finished=False, num_epochs=2, log=log))
    assert (run.state, run.is_resumable, run.progress, run.score) == (
        "failed",
        True,
        0.5,
        ("val_accuracy", 0.2),
    )
    text = page.html(run)
    assert "failed at 50%, resumable" in text and "rank 1 is gone" in text and ">loss<" in text
    assert "What was proved" not in text
    assert "8, taken for 1" not in text, "predictions of a shorter run"


def test_a_run_of_an_earlier_version_has_a_page(tmp_path):
    folder = write_run(tmp_path / "run")
    for name in ("starts.json", "review.json", "ranks.csv"):
        (folder / name).unlink()
    text = page.html(read_run(folder))
    assert "0.97" in text and "work of a step by rank" not in text and "Confusion" not in text
    assert "keras 3.15.1" in text


def test_a_run_without_an_epoch_has_a_page(tmp_path):
    folder = write_run(tmp_path / "run", finished=False)
    for name in ("starts.json", "review.json", "ranks.csv", "history.csv"):
        (folder / name).unlink()
    assert "failed" in page.html(read_run(folder))


def test_states(tmp_path):
    stopped = "2026-11-24 10:00:01,000 INFO hvtrain.runner: stopped by SIGTERM after step 20 of 40; run the same\n"
    folder = write_run(tmp_path / "stopped", finished=False, log=stopped)
    assert (read_run(folder).state, read_run(folder).is_resumable) == ("stopped", True)
    with RunLock() as lock:
        lock.take(folder)
        assert (read_run(folder).state, read_run(folder).is_resumable) == ("running", False)
    assert read_run(folder).state == "stopped"
    more = write_run(tmp_path / "more")
    assert read_run(more).state == "finished"
    (more / "checkpoints/step-00000060").mkdir()
    assert read_run(more).state == "failed", "it went on with more epochs, and was killed"
    assert read_run(more).score == ("val_accuracy", 0.4), "not that of the test before"
    (more / "checkpoints/step-00000060").rmdir()
    (more / "starts.json").write_text(json.dumps([{**START, "first_step": 40, "num_ranks": 4}]))
    assert (read_run(more).state, read_run(more).num_ranks) == ("failed", 4)


def test_the_curves_of_many_ranks_are_three(tmp_path):
    folder = write_run(tmp_path / "run")
    rows = {1: [0.001 * (rank + 1) for rank in range(9)], 2: [0.002] * 4}
    ranks_table(folder).save(list(rows.items()))
    chart = run_charts(read_run(folder))[-1]
    points = {series.label: series.points for series in chart.series}
    assert points == {
        "slowest": [(1.0, 9.0), (2.0, 2.0)],
        "median": [(1.0, 5.0), (2.0, 2.0)],
        "fastest": [(1.0, 1.0), (2.0, 2.0)],
    }


def test_training_and_validation_are_in_one_chart(tmp_path):
    charts = run_charts(read_run(write_run(tmp_path / "run")))
    assert [chart.title for chart in charts][:3] == ["loss", "accuracy", "learning rate"]
    assert [series.label for series in charts[1].series] == ["training", "validation"]


def test_runs_are_compared(tmp_path):
    first = write_run(tmp_path / "a" / "run", config={**CONFIG, "seed": 1})
    second = write_run(
        tmp_path / "b" / "run", config={**CONFIG, "seed": 22, "augment": {"x": True}}, num_epochs=3
    )
    runs = [read_run(first), read_run(second)]
    text = commands.comparison_html(runs)
    assert [name for name, _ in commands.differing_settings([run.config for run in runs])] == [
        "seed",
        "augment.x",
    ]
    assert "a/run" in text and "b/run" in text and "<td>22</td>" in text and "val_accuracy" in text
    charts = comparison_charts(runs)
    assert [chart.title for chart in charts] == [
        "val_loss",
        "loss",
        "val_accuracy",
        "accuracy",
        "examples per second",
    ]
    assert [len(series.points) for series in charts[0].series] == [4, 3]


def test_the_command_writes_the_files(tmp_path, monkeypatch, capsys):
    runs = [write_run(tmp_path / name) for name in "ab"]
    assert called(monkeypatch, runs[0]) == 0
    assert {path.name for path in runs[0].iterdir()} >= {"report.html", "curves.png"}
    assert str(runs[0] / "report.html") in capsys.readouterr().out
    assert called(monkeypatch, *runs, "--output", tmp_path / "both.html") == 0
    assert "2 runs" in (tmp_path / "both.html").read_text()


def test_what_is_no_run_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"is not a run folder, .*; give the run.dir of a run"):
        called(monkeypatch, tmp_path)
    folder = write_run(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"there is no folder .*gone; make it, or choose another file"
    ):
        called(monkeypatch, folder, "--output", tmp_path / "gone" / "x.html")
    # As a run in a bucket has begun, before its first checkpoint.
    shutil.rmtree(folder / "checkpoints")
    assert called(monkeypatch, folder) == 0
    (folder / "history.csv").write_text("epoch,step\n1\n")
    with pytest.raises(StorageError, match="damaged"):
        called(monkeypatch, folder)
    (folder / "result.json").write_text("{")
    with pytest.raises(ConfigError, match=r"result.json is damaged; move it away"):
        called(monkeypatch, folder)


def test_a_finished_run_does_not_fail_for_its_report(tmp_path, caplog):
    folder = write_run(tmp_path / "run")
    (folder / "history.csv").write_text("epoch,step\n1\n")
    page.write_report(folder)
    (message,) = caplog.messages
    assert message.startswith("report.html is not written: StorageError") and "\n" not in message
    assert not (folder / "report.html").exists()


def test_it_needs_neither_tensorflow_nor_horovod(tmp_path):
    folder = write_run(tmp_path / "run")
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['report', {str(folder)!r}]\n"
        "from hvtrain.report import commands\n"
        "commands.report_runs()\n"
        "sys.exit(str({'tensorflow', 'keras', 'horovod', 'pyplot'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "", done.stderr


def test_restarts_stand_in_a_table(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "starts.json").write_text(
        json.dumps([START, {**START, "first_step": 17, "num_ranks": 5}])
    )
    assert "<td>5</td><td>17</td>" in page.html(read_run(folder))


def test_what_was_not_proved_has_no_check_mark(tmp_path):
    proof = {
        "reductions": 40,
        "steps": 40,
        "ranks": 2,
        "weight_checks": 0,
        "examples_each_epoch": [],
        "examples": 650,
    }
    text = page.html(read_run(write_run(tmp_path / "run", proof=proof)))
    assert '<li>Reductions 40 of 40 steps</li><li class="none">Weights not compared</li>' in text
    for seen, mark in ((640, ' class="none"'), (645, "")):
        proof["examples_each_epoch"] = [seen]
        text = page.html(read_run(write_run(tmp_path / str(seen), proof=proof)))
        assert f"<li{mark}>{seen} of 650 samples seen once per epoch</li>" in text


def test_an_efficiency_of_few_steps_says_so(tmp_path):
    text = page.html(
        read_run(write_run(tmp_path / "run", split={**SPLIT, "caution": "3 steps are too few"}))
    )
    assert "<small>3 steps are too few</small>" in text


def test_the_time_in_all_is_that_of_all_starts(tmp_path):
    folder = write_run(tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    result["goodput"] = {"share": 0.9, "all": 7400.0, "restarts": 200.0}
    (folder / "result.json").write_text(json.dumps(result))
    assert "2 h 0 min" in page.html(read_run(folder))
