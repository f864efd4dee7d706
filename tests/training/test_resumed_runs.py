"""A run that was killed and goes on ends with the bits of one that was not."""

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from launching import finish, many_runs, start
from ranks import MARK, rank_processes, send
from run_results import history

# By default a checkpoint's parts are held without ranks, and a resume in mid-epoch by tests/tasks, without a kill.
pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

# Dropout, augmentation and Adam's slots: everything that a resume could lose. 20 steps an epoch.
WORDS = [
    "model=mlp",
    "model.dropout=0.2",
    "dataset=digits",
    "train.epochs=3",
    "train.deterministic=true",
    "dataset.shift_pixels=1",
    "dataset.num_validation=100",
    "schedule=cosine",
    "checkpoint.every_steps=7",
    "checkpoint.keep=50",
    "data.uneven=trim",
]


def newest(run):
    return max((path for path in (run / "checkpoints").glob("step-*")), key=lambda path: path.name)


def state(run):
    """All arrays of the last checkpoint: weights, slots, iterations, the ranks' seeds and metrics."""
    return load_file(newest(run) / "state.safetensors")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Killed, all ranks at once, in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("interrupted")
    run = folder / "run"
    mark = f"interrupted-{os.getpid()}"
    process = start(
        "mpirun", 2, "python", "-m", "hvtrain", *WORDS, f"run.dir={run}", cwd=folder, **{MARK: mark}
    )
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "step-00000028").exists():
        assert time.monotonic() < deadline and process.poll() is None, finish(process, 5)
        time.sleep(0.005)
    for rank in rank_processes(mark).values():
        send(rank, signal.SIGKILL)
    finish(process)
    assert not (run / "result.json").exists()
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 28:
            shutil.rmtree(path)
    return run


@pytest.fixture(scope="module")
def runs(interrupted, tmp_path_factory):
    """(folder, output) of other ranks' runs: one that nothing happened to, and two that go on from the killed one."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("resumed", "damaged"):
        shutil.copytree(interrupted, folder / name)
    arrays = folder / "damaged" / "checkpoints" / "step-00000028" / "state.safetensors"
    data = bytearray(arrays.read_bytes())
    data[len(data) // 2] ^= 1
    arrays.write_bytes(data)
    results, output = many_runs(
        "mpirun", 2, dict.fromkeys(("resumed", "whole", "damaged"), WORDS), folder
    )
    assert all("record" in run for rank in results for run in rank.values()), output
    return folder, output


def test_resumed_in_mid_epoch_ends_with_the_same_bits(runs):
    folder, output = runs
    run, whole = folder / "resumed", folder / "whole"
    assert "step-00000028: 28 of 60 steps were done" in output
    ours, uninterrupted = state(run), state(whole)
    assert newest(run).name == newest(whole).name == "step-00000060"
    assert list(ours) == list(uninterrupted)
    assert any(key.startswith("rank/1/seed/") for key in ours), (
        "dropout's seeds of both ranks are compared too"
    )
    different = [key for key in ours if not np.array_equal(ours[key], uninterrupted[key])]
    assert different == []
    assert (run / "history.csv").read_text().count("\n") == 4
    keep = ("test_loss", "test_accuracy", "num_steps")
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, whole)]
    assert [results[0][name] for name in keep] == [results[1][name] for name in keep]
    assert metrics(run) == metrics(whole), (
        "the epoch that was cut in two has the same training metrics"
    )


def metrics(run):
    """The rows of history.csv without the columns of time."""
    measured = ("seconds", "examples_per_second", "flops_per_second", "share_of_peak")
    return [
        {name: cell for name, cell in row.items() if name not in measured} for row in history(run)
    ]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(runs):
    folder, output = runs
    assert "checkpoint step-00000028 is damaged: state.safetensors has SHA-256" in output
    assert "; step-00000021 is used instead (steps lost: 7)" in output
    assert "step-00000021: 21 of 60 steps were done" in output
    ours, uninterrupted = state(folder / "damaged"), state(folder / "whole")
    assert all(np.array_equal(ours[key], uninterrupted[key]) for key in uninterrupted)
