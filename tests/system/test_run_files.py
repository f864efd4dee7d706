"""Records come back as they were written."""

import contextlib
import json
import math
import resource
from pathlib import Path

import pytest

from hvtrain.errors import StorageError
from hvtrain.system.files import flush, write_atomic, write_json
from hvtrain.system.run_files import (
    RESULT_FILE,
    EpochRecord,
    RunRecord,
    history_table,
    read_history,
    restore_nan,
    write_result,
)
from run_folders import record


def test_history_comes_back(tmp_path):
    records = [
        EpochRecord(1, 22, 0.1, 1.5, 900.25, {"loss": 2.25, "accuracy": 0.1}),
        EpochRecord(2, 44, 1e-7, 1.25, 1000.0, {"loss": 1 / 3, "accuracy": 0.5, "val_loss": 0.7}),
    ]
    history_table(tmp_path).save(records)
    assert read_history(tmp_path) == records
    header = (tmp_path / "history.csv").read_text().splitlines()[0]
    assert header == "epoch,step,learning_rate,seconds,examples_per_second,loss,accuracy,val_loss"
    assert [path.name for path in tmp_path.iterdir()] == ["history.csv"], "no temporary file stays"


def test_a_row_is_added_without_writing_the_file_anew(tmp_path):
    """10,000 epochs would write 10 GB."""
    records = [
        EpochRecord(epoch, 22 * epoch, 0.1, 1.5, 900.0, {"loss": 1 / epoch})
        for epoch in range(1, 5)
    ]
    path = tmp_path / "history.csv"
    table = history_table(tmp_path)
    table.save(records[:1])
    inode = path.stat().st_ino
    table.save(records[:2])
    table.save(records[:3])
    assert path.stat().st_ino == inode and read_history(tmp_path) == records[:3]
    wider = EpochRecord(4, 88, 0.1, 1.5, 900.0, {"val_loss": 2.0})
    table.save([*records[:3], wider])
    assert read_history(tmp_path) == [*records[:3], wider]


def test_a_row_that_was_not_written_comes_with_the_next(tmp_path):
    records = [
        EpochRecord(epoch, 22 * epoch, 0.1, 1.5, 900.0, {"loss": 1 / epoch}) for epoch in (1, 2, 3)
    ]
    table = history_table(tmp_path)
    table.save(records[:1])
    length = (tmp_path / "history.csv").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length + 5, limits[1]))
    try:
        with pytest.raises(StorageError, match="was not written: File too large"):
            table.save(records[:2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "history.csv").stat().st_size == length, "a part of a row"
    table.save(records)
    assert read_history(tmp_path) == records


def test_a_row_that_was_being_written_is_left_out(tmp_path):
    """0.12 of a loss of 0.1234 would be read as a number."""
    records = [EpochRecord(epoch, 22, 0.1, 1.5, 900.0, {"loss": 0.1234}) for epoch in (1, 2)]
    history_table(tmp_path).save(records)
    path = tmp_path / "history.csv"
    whole = path.read_text()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        path.write_text(whole[:-cut])
        assert read_history(tmp_path) == records[:1]


@pytest.mark.parametrize("make", ["missing", "link"])
def test_a_file_that_was_moved_away_is_written_anew(tmp_path, make):
    records = [EpochRecord(epoch, 22, 0.1, 1.5, 900.0, {}) for epoch in (1, 2)]
    (tmp_path / "precious").write_text("mine")
    table = history_table(tmp_path)
    table.save(records[:1])
    (tmp_path / "history.csv").unlink()
    if make == "link":
        (tmp_path / "history.csv").symlink_to("precious")
    table.save(records)
    assert read_history(tmp_path) == records
    assert (tmp_path / "precious").read_text() == "mine"


def test_no_history_is_empty(tmp_path):
    assert read_history(tmp_path) == []


@pytest.mark.parametrize(
    "text", ["\0", "epoch,step\n1\n", "epoch,step,learning_rate\nx,y,z\n", '"', "a\n1\n", "\xff"]
)
def test_a_damaged_history_is_named(tmp_path, text):
    (tmp_path / "history.csv").write_bytes(text.encode("latin-1"))
    with contextlib.suppress(StorageError):
        assert read_history(tmp_path) == []
    (tmp_path / "history.csv").write_text(
        "epoch,step,learning_rate,seconds,examples_per_second\n1,22,0.1,1.5\n"
    )
    with pytest.raises(
        StorageError, match=r"history.csv is damaged .*; fix it or move it away, then start again"
    ):
        read_history(tmp_path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "result.json"
    write_atomic(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(
            StorageError,
            match=r"was not written: File too large \(3 bytes needed, .* free at .*\); make",
        ):
            write_atomic(path, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert [result.name for result in tmp_path.iterdir()] == ["result.json"]


def test_folders_that_their_file_system_cannot_flush():
    """As on AFS and in /proc: every checkpoint failed there, with "Invalid argument ...; make room there"."""
    flush(Path("/proc/self"))


def test_result_comes_back(tmp_path):
    written = record(sample="a text")
    write_result(tmp_path, written)
    assert RunRecord(**json.loads((tmp_path / RESULT_FILE).read_text())) == written


def test_a_result_is_strict_json_whatever_its_numbers(tmp_path):
    metrics = {"test_loss": math.nan, "test_accuracy": 0.5}
    best = {"step": 30, "metric": "val_loss", "value": 0.4, "metrics": {"test_loss": math.inf}}
    write_result(tmp_path, record(test_loss=math.nan, metrics=metrics, best=best))
    text = (tmp_path / RESULT_FILE).read_text()
    result = json.loads(text, parse_constant=pytest.fail)
    assert (result["test_loss"], result["metrics"]["test_loss"]) == (None, None)
    restored = restore_nan(result)
    assert math.isnan(restored["metrics"]["test_loss"])
    assert math.isnan(restored["best"]["metrics"]["test_loss"])
    assert restored["metrics"]["test_accuracy"] == 0.5


def test_json_files_have_no_numbers_that_json_lacks(tmp_path):
    write_json(tmp_path / "file.json", {"metrics": [math.nan, (1.5, -math.inf)], "step": 3})
    text = (tmp_path / "file.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "metrics": [None, [1.5, None]],
        "step": 3,
    }
