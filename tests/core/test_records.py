"""Records come back as they were written."""

import contextlib
import json
import resource

import pytest

from hvtrain.core.records import (
    EpochRecord,
    RunRecord,
    read_history,
    write_atomic,
    write_history,
    write_result,
)
from hvtrain.errors import StorageError


def test_history_comes_back(tmp_path):
    records = [
        EpochRecord(1, 22, 0.1, 1.5, 900.25, {"loss": 2.25, "accuracy": 0.1}),
        EpochRecord(2, 44, 1e-7, 1.25, 1000.0, {"loss": 1 / 3, "accuracy": 0.5, "val_loss": 0.7}),
    ]
    write_history(tmp_path, records)
    assert read_history(tmp_path) == records
    header = (tmp_path / "history.csv").read_text().splitlines()[0]
    assert header == "epoch,step,learning_rate,seconds,examples_per_second,loss,accuracy,val_loss"
    assert [path.name for path in tmp_path.iterdir()] == ["history.csv"], "no temporary file stays"
    older = (tmp_path / "history.csv").read_text().replace("examples_per_second", "images_per_second")
    (tmp_path / "history.csv").write_text(older)
    assert read_history(tmp_path) == records


def test_no_history_is_empty(tmp_path):
    assert read_history(tmp_path) == []


@pytest.mark.parametrize("text", ["\0", "epoch,step\n1\n", "epoch,step,learning_rate\nx,y,z\n", '"', "a\n1\n", "\xff"])
def test_a_damaged_history_is_named(tmp_path, text):
    (tmp_path / "history.csv").write_bytes(text.encode("latin-1"))
    with contextlib.suppress(StorageError):
        assert read_history(tmp_path) == []
    (tmp_path / "history.csv").write_text("epoch,step,learning_rate,seconds,examples_per_second\n1,22,0.1,1.5")
    with pytest.raises(StorageError, match=r"history.csv is damaged .*; fix it or move it away, then start again"):
        read_history(tmp_path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "result.json"
    write_atomic(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(
            StorageError, match=r"was not written: File too large \(3 bytes needed, .* free at .*\); make"
        ):
            write_atomic(path, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def test_result_comes_back(tmp_path):
    record = RunRecord(
        0.98, 0.06, 2567.0, 0.025, 2, 53_002, 264, 64, 33.0, 264, 0, {"ranks": 2}, {"test_loss": 0.06}, {}, {"seed": 1}
    )
    write_result(tmp_path, record)
    assert RunRecord(**json.loads((tmp_path / "result.json").read_text())) == record
