"""Checkpoints: whole or damaged and named, never half; of this model or refused."""

import functools
import json
import os
import resource
import subprocess
import sys

import keras
import numpy as np
import pytest

from hvtrain import checkpoint
from hvtrain.errors import CheckpointError


def model(units=3, seed=0, dtype="float32"):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(units, name="d", dtype=dtype), keras.layers.Dropout(0.5, name="drop")]
    net = keras.Sequential([keras.Input((4,)), *layers], name="m")
    net.compile(keras.optimizers.Adam(0.01, name="adam"), "mse", jit_compile=False)
    net.fit(np.ones((8, 4)), np.ones((8, units)), verbose=0)
    return net


@functools.cache
def trained():
    """One model for the tests that do not change it."""
    return model()


def written(folder, *steps, net=None):
    net = net or trained()
    for step in steps:
        checkpoint.write(folder, step, net, {"epoch": step // 10}, [checkpoint.rank_state(net)])
    return net


def values(net):
    return [v.numpy() for v in [*net.weights, *net.optimizer.variables]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_written_comes_back(tmp_path, dtype):
    net = written(tmp_path, 17, net=model(dtype=dtype))
    other = model(seed=1, dtype=dtype)
    newest, damaged = checkpoint.read_newest(tmp_path)
    checkpoint.restore(newest, other)
    assert (newest.step, newest.meta["epoch"], damaged) == (17, 1, [])
    assert all(np.array_equal(a, b) for a, b in zip(values(net), values(other), strict=True))
    assert int(other.optimizer.iterations.numpy()) == 1


def test_seeds_of_dropout_come_back(tmp_path):
    net = written(tmp_path, 1)
    expected = net(np.ones((1, 4)), training=True).numpy()
    other = model(seed=5)
    newest, _ = checkpoint.read_newest(tmp_path)
    checkpoint.restore(newest, other)
    checkpoint.restore_rank(newest.rank_state(0), other)
    assert np.array_equal(other(np.ones((1, 4)), training=True).numpy(), expected)


def test_sums_are_those_of_sha256sum(tmp_path):
    written(tmp_path, 3)
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "step-00000003", check=True)


@pytest.mark.parametrize("name", ["state.safetensors", "meta.json", "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_any_damage_is_noticed(tmp_path, name, damage):
    written(tmp_path, 10, 20)
    path = tmp_path / "step-00000020" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes({"flip": data, "truncate": data[: len(data) // 2], "empty": b"", "remove": b""}[damage])
    if damage == "remove":
        path.unlink()
    newest, damaged = checkpoint.read_newest(tmp_path)
    assert newest.step == 10
    assert len(damaged) == 1
    assert damaged[0].startswith("checkpoint step-00000020 is damaged")


def test_all_damaged_is_an_error_and_not_a_new_start(tmp_path):
    written(tmp_path, 10)
    (tmp_path / "step-00000010" / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no other checkpoint in .* is whole; choose another run.dir"):
        checkpoint.read_newest(tmp_path)


def test_another_model_is_refused_with_the_first_difference(tmp_path):
    written(tmp_path, 10)
    newest, _ = checkpoint.read_newest(tmp_path)
    wider = model(units=5)
    before = values(wider)
    with pytest.raises(
        CheckpointError, match=r"holds model/0000/m/d/kernel of shape \(4, 3\) where .*/kernel of shape \(4, 5\)"
    ):
        checkpoint.restore(newest, wider)
    assert all(np.array_equal(a, b) for a, b in zip(values(wider), before, strict=True)), "nothing was set"


def test_keep_and_best(tmp_path):
    net = written(tmp_path, 10)
    checkpoint.mark_best(tmp_path, 10, "val_accuracy", 0.9)
    for step in (20, 30, 40):
        written(tmp_path, step, net=net)
        checkpoint.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000010", "step-00000030", "step-00000040"]
    assert checkpoint.read_best(tmp_path) == {"step": 10, "metric": "val_accuracy", "value": 0.9}


def test_a_write_over_an_old_checkpoint_of_the_same_step(tmp_path):
    net = written(tmp_path, 10)
    (tmp_path / "step-00000010" / "meta.json").write_text("{")
    written(tmp_path, 10, net=net)
    assert checkpoint.read_newest(tmp_path)[0].step == 10
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_what_an_interrupted_write_left_is_passed_over_and_removed(tmp_path):
    written(tmp_path, 10)
    (tmp_path / ".tmp-step-00000020").mkdir()
    (tmp_path / ".tmp-step-00000020" / "state.safetensors").write_bytes(b"half")
    assert checkpoint.read_newest(tmp_path)[0].step == 10
    checkpoint.prune(tmp_path, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_no_room_leaves_the_old_one_and_says_how_much_is_needed(tmp_path):
    """The file system refuses the new file in the middle of the write."""
    net = written(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step-00000020 was not written: .* bytes needed, .* free"):
            written(tmp_path, 20, net=net)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert checkpoint.read_newest(tmp_path)[0].step == 10


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=False).returncode:
        pytest.skip("a disk that fills up needs root and mount")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_a_run_whose_disk_fills_up(small_disk, tmp_path):
    words = ["run.dir=disk/run", "train.epochs=4", "checkpoint.keep=9"]
    done = subprocess.run(
        [sys.executable, "-m", "hvtrain", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "was not written: No space left on device (" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    newest, damaged = checkpoint.read_newest(small_disk / "run" / "checkpoints")
    assert newest.step == 44 and damaged == []
    assert json.loads((newest.path / "meta.json").read_text())["metrics"]["accuracy"] > 0
