"""A run that was killed and goes on ends with the bits of one that was not."""

import json
import shutil
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from launching import finish, kill, start, train

pytestmark = pytest.mark.distributed

# Dropout, augmentation and Adam's slots: everything that a resume could lose. 20 steps an epoch.
WORDS = [
    "train.epochs=6",
    "train.deterministic=true",
    "dataset.shift_pixels=1",
    "dataset.num_validation=100",
    "schedule=cosine",
    "checkpoint.every_steps=7",
    "checkpoint.keep=50",
]


def newest(run):
    return max((path for path in (run / "checkpoints").glob("step-*")), key=lambda path: path.name)


def state(run):
    """All arrays of the last checkpoint: weights, slots, iterations, the ranks' seeds and metrics."""
    return load_file(newest(run) / "state.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    code, output = train("mpirun", 2, *WORDS, f"run.dir={folder / 'run'}", cwd=folder)
    assert code == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Killed, all ranks at once, in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("interrupted")
    run = folder / "run"
    process = start("mpirun", 2, "python", "-m", "hvtrain", *WORDS, f"run.dir={run}", cwd=folder)
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "step-00000028").exists():
        assert time.monotonic() < deadline and process.poll() is None, finish(process, 5)
        time.sleep(0.005)
    kill(process)
    process.communicate()
    time.sleep(1)
    assert not (run / "result.json").exists()
    return run


def resume(interrupted, tmp_path, step=None, *words):
    """Goes on from the given step, or the newest, in a copy of the interrupted run."""
    run = tmp_path / "run"
    shutil.copytree(interrupted, run)
    for path in (run / "checkpoints").glob("step-*"):
        if step is not None and int(path.name[5:]) > step:
            shutil.rmtree(path)
    code, output = train("mpirun", 2, *(words or WORDS), f"run.dir={run}", cwd=tmp_path)
    return run, code, output


def test_resumed_in_mid_epoch_ends_with_the_same_bits(uninterrupted, interrupted, tmp_path):
    run, code, output = resume(interrupted, tmp_path, 28)
    assert code == 0, output
    assert "step-00000028: 28 of 120 steps were done" in output
    ours, theirs = state(run), state(uninterrupted)
    assert newest(run).name == newest(uninterrupted).name == "step-00000120"
    assert list(ours) == list(theirs)
    assert any(key.startswith("rank/1/seed/") for key in ours), "dropout's seeds of both ranks are compared too"
    different = [key for key in ours if not np.array_equal(ours[key], theirs[key])]
    assert different == []
    assert (run / "history.csv").read_text().count("\n") == 7
    keep = ("test_loss", "test_accuracy", "num_steps")
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, uninterrupted)]
    assert [results[0][name] for name in keep] == [results[1][name] for name in keep]
    assert metrics(run) == metrics(uninterrupted), "the epoch that was cut in two has the same training metrics"


def metrics(run):
    """history.csv without the columns of time."""
    rows = [line.split(",") for line in (run / "history.csv").read_text().splitlines()]
    return [[*row[:3], *row[5:]] for row in rows]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(uninterrupted, interrupted, tmp_path):
    damaged = tmp_path / "source"
    shutil.copytree(interrupted, damaged)
    for path in (damaged / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 28:
            shutil.rmtree(path)
    arrays = damaged / "checkpoints" / "step-00000028" / "state.safetensors"
    data = bytearray(arrays.read_bytes())
    data[len(data) // 2] ^= 1
    arrays.write_bytes(data)
    run, code, output = resume(damaged, tmp_path)
    assert code == 0, output
    assert "checkpoint step-00000028 is damaged: state.safetensors has SHA-256" in output
    assert "; step-00000021 is taken, 7 steps are lost" in output
    assert "step-00000021: 21 of 120 steps were done" in output
    ours, theirs = state(run), state(uninterrupted)
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
