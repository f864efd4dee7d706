"""Checkpoints: whole or damaged and named, never half; of this model or refused."""

import functools
import os
import resource
import subprocess
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors import SafetensorError
from safetensors.numpy import load_file

from disks import small_disk
from hvtrain.checkpoint import model_state, store, writer
from hvtrain.checkpoint.store import ShardedTable
from hvtrain.config.schema import CheckpointConfig
from hvtrain.errors import CheckpointError, StorageError
from hvtrain.keras.table_rows import Rows
from newest_checkpoint import META, newest


@pytest.fixture
def tmp_path(tmp_path):
    """The folder of a run's checkpoints."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def model(units=3, seed=0, dtype="float32"):
    keras.utils.set_random_seed(seed)
    layers = [
        keras.layers.Dense(units, name="d", dtype=dtype),
        keras.layers.Dropout(0.5, name="drop"),
    ]
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
        arrays = model_state.snapshot(net, [model_state.rank_state(net)], {}, {})
        writer.write(folder, step, arrays, {**META, "epoch": step // 10})
    return net


def values(net):
    return [v.numpy() for v in [*net.weights, *net.optimizer.variables]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_written_comes_back(tmp_path, dtype):
    net = written(tmp_path, 17, net=model(dtype=dtype))
    other = model(seed=1, dtype=dtype)
    checkpoint, damaged = newest(tmp_path)
    model_state.restore(checkpoint, other)
    assert (checkpoint.step, checkpoint.meta["epoch"], damaged) == (17, 1, [])
    assert all(np.array_equal(a, b) for a, b in zip(values(net), values(other), strict=True))
    assert int(other.optimizer.iterations.numpy()) == 1


def test_seeds_of_dropout_come_back(tmp_path):
    net = written(tmp_path, 1)
    expected = net(np.ones((1, 4)), training=True).numpy()
    other = model(seed=5)
    checkpoint, _ = newest(tmp_path)
    model_state.restore(checkpoint, other)
    model_state.restore_rank(checkpoint.rank_state(0), other)
    assert np.array_equal(other(np.ones((1, 4)), training=True).numpy(), expected)


def test_sums_are_those_of_sha256sum(tmp_path):
    written(tmp_path, 3)
    subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"],
        cwd=tmp_path / "step-00000003",
        check=True,
    )


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A kill does not show what is still in memory alone; a power cut does. The name itself is flushed last."""
    calls = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(handle):
        calls.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    def note_rename(before, after):
        rename(before, after)
        calls.append(f"{Path(before).name} -> {Path(after).name}")

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    writer.write(tmp_path, 3, {"model/0000/kernel": np.zeros(3, np.float32)}, META)
    files = ["state.safetensors", "meta.json", "SHA256SUMS"]
    temporary = ".tmp-step-00000003"
    assert calls == [*files, temporary, f"{temporary} -> step-00000003", "checkpoints"]


def test_a_replaced_checkpoint_that_cannot_be_deleted_is_no_failure(tmp_path):
    """As on NFS while somebody reads it: the new one was complete, and a preempted run ended in an error."""
    arrays = {"model/0000/kernel": np.zeros(3, np.float32)}
    path = writer.write(tmp_path, 3, arrays, META)
    with small_disk(path / "busy", "size=4k"):
        try:
            assert writer.write(tmp_path, 3, arrays, META) == path
        finally:
            # Back to where the disk was mounted.
            path.rename(tmp_path / "new")
            (tmp_path / ".tmp-gone-step-00000003").rename(path)


def test_checkpoints_are_ordered_by_step(tmp_path):
    """Not by name, in which 100,000,000 comes before 99,999,999."""
    arrays = {"model/0000/kernel": np.zeros(3, np.float32)}
    for step in (99_999_999, 100_000_000):
        writer.write(tmp_path, step, arrays, META)
    assert newest(tmp_path)[0].step == 100_000_000
    writer.prune(tmp_path, CheckpointConfig(keep=1), 100_000_000)
    assert [path.name for path in store.list_checkpoints(tmp_path)] == ["step-100000000"]


@pytest.mark.parametrize("name", ["state.safetensors", "meta.json", "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_any_damage_is_noticed(tmp_path, name, damage):
    written(tmp_path, 10, 20)
    path = tmp_path / "step-00000020" / name
    data = bytearray(path.read_bytes())
    data[-9] ^= 4  # Of the arrays it is a number, which looks as good as another one.
    path.write_bytes(
        {"flip": data, "truncate": data[: len(data) // 2], "empty": b"", "remove": b""}[damage]
    )
    if damage == "remove":
        path.unlink()
    checkpoint, damaged = newest(tmp_path)
    assert checkpoint.step == 10
    assert len(damaged) == 1
    assert damaged[0].startswith("checkpoint step-00000020 is damaged")
    assert damaged[0].endswith(
        "(kept as damaged-step-00000020); step-00000010 is used instead (steps lost: 10)"
    )
    assert newest(tmp_path)[1] == [], "it is not in the way any more"


def test_a_damaged_checkpoint_takes_no_place_among_those_kept(tmp_path):
    net = written(tmp_path, 10, 20)
    (tmp_path / "step-00000020" / "meta.json").write_bytes(b"")
    assert newest(tmp_path)[0].step == 10
    written(tmp_path, 15, net=net)
    writer.prune(tmp_path, CheckpointConfig(keep=1), 15)
    assert newest(tmp_path)[0].step == 15


def test_all_damaged_is_an_error_and_not_a_new_start(tmp_path):
    written(tmp_path, 10)
    (tmp_path / "step-00000010" / "state.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"no other checkpoint in .* is intact; choose another run.dir"
    ):
        newest(tmp_path)


def test_another_model_is_refused_with_the_first_difference(tmp_path):
    written(tmp_path, 10)
    checkpoint, _ = newest(tmp_path)
    wider = model(units=5)
    before = values(wider)
    with pytest.raises(
        CheckpointError,
        match=r"holds model/0000/m/d/kernel of shape \(4, 3\) where .*/kernel of shape \(4, 5\)",
    ):
        model_state.restore(checkpoint, wider)
    assert all(np.array_equal(a, b) for a, b in zip(values(wider), before, strict=True)), (
        "nothing was set"
    )


def test_another_number_of_rows_of_a_sharded_table_is_refused(tmp_path):
    """A rank's own part does not show it: 4 of 7 rows, or of 8."""
    net = model()
    kernel = net.weights[0]
    kernel.rank_part = Rows("d", 7, rank=0, num_ranks=2)
    table = ShardedTable([np.zeros((4, 3), np.float32), np.ones((3, 3), np.float32)])
    parts = {"model/0000/m/d/kernel": table}
    arrays = model_state.snapshot(net, [model_state.rank_state(net)], {}, parts)
    writer.write(tmp_path, 10, arrays, META)
    checkpoint, _ = newest(tmp_path)
    model_state.restore(checkpoint, net)
    assert np.array_equal(kernel.whole[:], table[:])
    kernel.rank_part = Rows("d", 8, rank=0, num_ranks=2)
    with pytest.raises(
        CheckpointError, match=r"holds \S+/kernel of shape \(7, 3\) where .* of shape \(8, 3\)"
    ):
        model_state.restore(checkpoint, net)


def test_a_snapshot_does_not_follow_the_training():
    """TensorFlow's own arrays may share their memory."""
    net = model()
    arrays = model_state.snapshot(
        net, [model_state.rank_state(net)], {"callback/x/0000": (mine := np.zeros(3))}, {}
    )
    before = {key: array.copy() for key, array in arrays.items()}
    mine += 1
    for variable in [*net.variables, *net.optimizer.variables]:
        variable.value.assign_add(tf.ones_like(variable.value))
    assert all(np.array_equal(arrays[key], before[key]) for key in before)


def test_arrays_of_any_layout_come_back(tmp_path):
    arrays = {
        "é": np.arange(6, dtype=np.float16).reshape(2, 3).T,
        "nothing": np.zeros((0, 3), np.float32),
        "one": np.array(7, np.uint8),
        "flags": np.array([True, False, True]),
        **{
            kind: np.arange(3).astype(kind)
            for kind in ("int8", "int64", "uint32", "float64", ">f4")
        },
    }
    path = writer.write(tmp_path, 1, arrays, META)
    modes = {file.stat().st_mode for file in path.iterdir()}
    assert len(modes) == 1, "readable by the same people"
    read = load_file(path / store.ARRAYS)
    assert read.keys() == arrays.keys()
    assert all(np.array_equal(read[key], array) for key, array in arrays.items())
    assert all(read[key].dtype.name == array.dtype.name for key, array in arrays.items())


MEASURED = {**META, "metrics": {"val_accuracy": 0.5}}


def test_what_was_begun_is_finished_also_when_training_fails(tmp_path):
    arrays = {"model/0000/kernel": np.zeros(3_000_000, np.float32)}
    with pytest.raises(ArithmeticError), writer.Writer(tmp_path, CheckpointConfig()) as writing:
        writing.submit(10, arrays, MEASURED)
        raise ArithmeticError
    assert newest(tmp_path)[0].step == 10


def test_writes_come_one_after_the_other_each_pruned(tmp_path):
    writing = writer.Writer(tmp_path, CheckpointConfig(keep=1))
    for step in range(1, 9):
        writing.submit(step, {"model/0000/kernel": np.zeros(step * 100_000, np.float32)}, MEASURED)
    writing.finish()
    assert [path.name for path in store.list_checkpoints(tmp_path)] == [
        "step-00000001",
        "step-00000008",
    ], "the first is best"


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_an_error_in_the_background(on_error, tmp_path, caplog):
    (tmp_path / "checkpoints").touch()
    writing = writer.Writer(tmp_path / "checkpoints", CheckpointConfig(on_error=on_error))
    writing.submit(10, {"model/0000/kernel": np.zeros(3, np.float32)}, MEASURED)
    if on_error == "stop":
        with pytest.raises(
            CheckpointError,
            match=r"step-00000010 was not written: .*, then start again with the same",
        ):
            writing.finish()
        assert writing.failed
        return
    writing.finish()
    assert not writing.failed
    assert (
        "; training continues (checkpoint.on_error=warn), and the next save tries again"
        in caplog.messages[0]
    )
    assert caplog.messages[1].startswith(
        "the last state is not saved: checkpoint step-00000010 was not written: "
    )


def test_a_defect_in_the_background_is_raised(tmp_path):
    writing = writer.Writer(tmp_path, CheckpointConfig(on_error="warn"))
    writing.submit(10, {"model/0000/kernel": np.zeros(3, "datetime64[s]")}, MEASURED)
    with pytest.raises(SafetensorError, match="datetime64"):
        writing.finish()


NOTES = ["", "{", "[]", '{"step": "1"}', '{"step": 10, "metric": 1, "value": 1}', "[" * 99999]
HUGE = f'{{"step": 10, "metric": "val_loss", "value": {10**400}}}'  # Too large for a float.


@pytest.mark.parametrize("text", [*NOTES, HUGE, '{"step": 10, "metric": "val_loss", "value": NaN}'])
def test_a_damaged_note_of_the_best_is_told_and_written_anew(text, tmp_path, caplog):
    written(tmp_path, 10)
    (tmp_path / "best.json").write_text(text)
    assert writer.read_best(tmp_path) is None
    assert (
        "best.json is damaged" in caplog.text
        and "the next checkpoint becomes the best" in caplog.text
    )
    assert not (tmp_path / "best.json").exists()


def test_a_note_of_the_best_that_cannot_be_read_is_not_called_damaged(tmp_path, caplog):
    """Until it can be read no checkpoint is deleted, which might be the best, and none becomes the best."""
    written(tmp_path, 10, 20, 30)
    (tmp_path / "best.json").mkdir()
    with pytest.raises(StorageError, match=r"best.json cannot be read: Is a directory; fix"):
        writer.read_best(tmp_path)
    writing = writer.Writer(tmp_path, CheckpointConfig(keep=1))
    writing.submit(40, {"model/0000/kernel": np.zeros(3, np.float32)}, MEASURED)
    assert writing.finish() == 40
    assert len(store.list_checkpoints(tmp_path)) == 4 and (tmp_path / "best.json").is_dir()
    assert "this checkpoint is not compared with the best" in caplog.text
    assert "no checkpoint is deleted this time" in caplog.text


def test_a_best_checkpoint_that_is_gone_is_none(tmp_path):
    writer.mark_best(tmp_path, 10, "val_accuracy", 0.9)
    assert writer.read_best(tmp_path) is None


@pytest.mark.skipif(
    os.geteuid() != 0, reason="root alone can become a user who may not read a file"
)
def test_what_cannot_be_read_is_not_called_damaged():
    """A file server that fails for a moment would otherwise cost the newest checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        written(folder, 10, 20)
        folder.chmod(0o777)
        folder.parent.chmod(0o755)
        (folder / "step-00000020" / "state.safetensors").chmod(0o600)
        os.seteuid(12345)
        try:
            with pytest.raises(
                StorageError,
                match=r"step-00000020 cannot be read: Permission denied .*; fix that, and",
            ):
                newest(folder)
        finally:
            os.seteuid(0)
        assert newest(folder)[0].step == 20, "it has its name still"


def test_keep_and_best(tmp_path):
    net = written(tmp_path, 10)
    writer.mark_best(tmp_path, 10, "val_accuracy", 0.9)
    for step in (20, 30, 40):
        written(tmp_path, step, net=net)
        writer.prune(tmp_path, CheckpointConfig(keep=2), step)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000010",
        "step-00000030",
        "step-00000040",
    ]
    assert writer.read_best(tmp_path) == {"step": 10, "metric": "val_accuracy", "value": 0.9}


EMPTY = {"model/0000/kernel": np.zeros(3, np.float32)}


def kept_steps(folder):
    return [store.step_of(path) for path in store.list_checkpoints(folder)]


def test_the_last_checkpoint_of_each_span_of_epochs_is_kept_for_good(tmp_path):
    """Each write is one of a new writer, as after a restart: only what is on the disk says what is kept."""
    for step in range(5, 81, 5):
        # Epochs of 10 steps, each with a checkpoint in its middle.
        meta = {**MEASURED, "epoch": step // 10, "step_in_epoch": step % 10, "metrics": {}}
        with writer.Writer(tmp_path, CheckpointConfig(keep=1, keep_every_epochs=3)) as writing:
            writing.submit(step, EMPTY, meta)
            writing.finish()
    assert kept_steps(tmp_path) == [30, 60, 80], "after epochs 3 and 6, and the newest"


def test_the_last_checkpoint_of_each_day_is_kept_for_good(tmp_path):
    hours = [1, 9, 23, 26, 30, 73, 74]
    for step, hour in enumerate(hours, 1):
        writer.write(tmp_path, step, EMPTY, {**META, "unix_seconds": hour * 3600})
        writer.prune(tmp_path, CheckpointConfig(keep=1, keep_every_hours=24), step)
    assert [hours[step - 1] for step in kept_steps(tmp_path)] == [23, 30, 74], (
        "none on the third day"
    )


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"epoch": "1", "step_in_epoch": 0, "unix_seconds": 0}', "{}"]
)
def test_a_checkpoint_that_does_not_tell_its_span_is_not_kept_for_good(text, tmp_path):
    for step in (10, 20, 30):
        writer.write(tmp_path, step, EMPTY, {**META, "epoch": step // 10})
    (tmp_path / "step-00000020" / "meta.json").write_text(text)
    writer.prune(tmp_path, CheckpointConfig(keep=1, keep_every_epochs=1), 30)
    assert kept_steps(tmp_path) == [10, 30]


def test_a_damaged_newer_checkpoint_does_not_cost_the_new_one(tmp_path):
    """It could not be set aside, on a disk that refuses renames for example."""
    net = written(tmp_path, 10, 99)
    (tmp_path / "step-00000099" / "meta.json").write_text("{")
    written(tmp_path, 20, net=net)
    writer.prune(tmp_path, CheckpointConfig(keep=1), 20)
    assert [path.name for path in store.list_checkpoints(tmp_path)] == [
        "step-00000020",
        "step-00000099",
    ]


def test_a_write_over_an_old_checkpoint_of_the_same_step(tmp_path):
    net = written(tmp_path, 10)
    (tmp_path / "step-00000010" / "meta.json").write_text("{")
    written(tmp_path, 10, net=net)
    assert newest(tmp_path)[0].step == 10
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_what_an_interrupted_write_left_is_set_aside_and_removed(tmp_path):
    written(tmp_path, 10)
    (tmp_path / ".tmp-step-00000020").mkdir()
    (tmp_path / ".tmp-step-00000020" / "state.safetensors").write_bytes(b"half")
    assert newest(tmp_path)[0].step == 10
    writer.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_no_room_leaves_the_old_one_and_says_how_much_is_needed(tmp_path):
    """The file system refuses the new file in the middle of the write."""
    net = written(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"step-00000020 was not written: .* bytes needed, .* free"
        ):
            written(tmp_path, 20, net=net)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert newest(tmp_path)[0].step == 10


def test_a_copy_of_the_best_checkpoint_of_another_host_is_here(tmp_path):
    writer.mark_best(tmp_path, 10, "val_loss", 0.5, host="s2")
    assert writer.read_best(tmp_path)["host"] == "s2"
    written(tmp_path, 10)
    assert "host" not in writer.read_best(tmp_path)
