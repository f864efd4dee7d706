"""Real sweeps on two ranks: a trial that fails, one that is pruned, and what goes on after an end."""

import csv
import json
import os
import shlex
import signal
import sqlite3
import time
from contextlib import suppress

import psutil
import pytest

from hvtrain.report.run_files import read_run
from launching import finish, run, start

optuna = pytest.importorskip(
    "optuna", reason="optuna is not installed; ./scripts/run pytest does it"
)
pytestmark = pytest.mark.distributed

SWEEP = ["python", "-m", "hvtrain", "sweep", "sweep=own.yaml", "-np", "2", "--output", "out"]
RUN = [
    "model=mlp",
    "model.hidden=[16]",
    "dataset.num_validation=100",
    "schedule.warmup_epochs=0",
    "run.report=false",
]


def searches(folder, name, values):
    """Writes a space of these choices, and gives the seed with which they are drawn in this order."""
    (folder / "own.yaml").write_text(f"{name}: {{choices: {values}}}\n")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distribution = {name: optuna.distributions.CategoricalDistribution(range(len(values)))}
    for seed in range(100):
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        if [study.ask(distribution).params[name] for _ in values] == [*range(len(values))]:
            return ["--seed", str(seed)]
    raise AssertionError("no seed draws that")


@pytest.mark.nightly  # By default test_study.py, test_one_trial.py and test_search_space.py hold the parts of a sweep.
def test_a_trial_that_fails_does_not_end_the_sweep(tmp_path):
    seed = searches(tmp_path, "train.batch_size", [4096, 32])
    command = [*SWEEP, *seed, "trials=2", *RUN, "train.epochs=2"]
    code, output = run(None, 1, *command, cwd=tmp_path, timeout=580)
    assert code == 0, output
    out = tmp_path / "out"
    assert {"sweep.csv", "sweep.json", "sweep.png", "trial-0.txt", "trial-1"} <= {
        path.name for path in out.iterdir()
    }
    results = json.loads((out / "sweep.json").read_text())
    failed, best = results["trials"]
    assert (
        failed["state"] == "failed"
        and "train.batch_size=4096 exceeds the 668 examples of a rank" in failed["error"]
    )
    assert (
        f"trial 0 failed: {failed['error']}" in output
        and "2 of 2: trial 1 finished, val_accuracy 0." in output
    )
    history = {
        str(row.epoch): row.metrics["val_accuracy"] for row in read_run(out / "trial-1").history
    }
    assert (
        best["epochs"] == history and len(history) == 2 and best["value"] == max(history.values())
    )
    assert (results["metric"], results["direction"], results["best"]["number"]) == (
        "val_accuracy",
        "max",
        1,
    )
    line = shlex.join(
        [
            "python",
            "-m",
            "hvtrain",
            "launch",
            "-np",
            "2",
            "--",
            *command[-6:],
            "train.batch_size=32",
        ]
    )
    assert results["best"]["line"] == line and line in output
    rows = list(csv.DictReader((out / "sweep.csv").open()))
    assert [row["state"] for row in rows] == ["failed", "finished"] and rows[1][
        "train.batch_size"
    ] == "32"
    code, again = run(None, 1, *command, cwd=tmp_path)
    assert code == 0 and "2 trials of 2 ranks, 2 done already" in again, again
    assert results["best"]["line"] in again and not (out / "trial-2").exists(), (
        "nothing is left to do"
    )


@pytest.mark.nightly
def test_a_trial_that_lags_behind_is_pruned(tmp_path):
    seed = searches(tmp_path, "optimizer.learning_rate", [0.01, 1.0e-9])
    command = [*SWEEP, *seed, "--prune-after", "1", "trials=2", *RUN, "train.epochs=100"]
    code, output = run(None, 1, *command, cwd=tmp_path, timeout=580)
    assert code == 0, output
    good, pruned = json.loads((tmp_path / "out/sweep.json").read_text())["trials"]
    assert (good["state"], pruned["state"]) == ("finished", "pruned") and len(good["epochs"]) == 100
    assert 2 <= len(pruned["epochs"]) < 100 and pruned["value"] < good["value"]
    assert read_run(tmp_path / "out/trial-1").state == "stopped", "its ranks have saved, and ended"
    assert children_of(tmp_path) == []


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.release),
        pytest.param(signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_the_same_command_goes_on_after_an_end(number, tmp_path):
    seed = searches(tmp_path, "optimizer.learning_rate", [0.01, 0.02])
    command = [*SWEEP, *seed, "trials=2", *RUN, "train.epochs=40"]
    process = start(None, 1, *command, cwd=tmp_path)
    lines = iter(process.stdout.readline, "")
    seen = [next(line for line in lines if line.startswith("1 of 2: trial 0 finished"))]
    while not (tmp_path / "out/trial-1/history.csv").exists():
        time.sleep(0.1)
    os.kill(process.pid, number)
    output = "".join([*seen, finish(process)])
    if number == signal.SIGINT:
        assert process.returncode == 130 and "interrupted; all trials so far are kept" in output, (
            output
        )
        assert "best: trial 0 with val_accuracy" in output
    until_ended(tmp_path)
    code, output = run(None, 1, *command, cwd=tmp_path, timeout=580)
    assert code == 0, output
    assert "2 trials of 2 ranks, 1 done already" in output and "2 of 2: trial 2 finished" in output
    results = json.loads((tmp_path / "out/sweep.json").read_text())
    assert [trial["number"] for trial in results["trials"]] == [0, 2]
    assert [trial["settings"]["optimizer.learning_rate"] for trial in results["trials"]] == [
        0.01,
        0.02,
    ], "it is tried again"
    with sqlite3.connect(tmp_path / "out/sweep.db") as study:
        states = study.execute("select number, state from trials order by number").fetchall()
    assert states == [(0, "COMPLETE"), (1, "FAIL"), (2, "COMPLETE")]


def children_of(folder):
    """Processes that work in the folder."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            pids += [process.pid] if process.cwd() == str(folder) else []
    return pids


def until_ended(folder):
    """Waits for the end of the ranks: with the sweep's, by whatever it ended, comes that of its trial."""
    deadline = time.monotonic() + 60
    while left := children_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
