"""Damaged and changed data under real ranks: one line with the place, the rank and the host; skipped; or refused."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from launching import run, train
from pictures import pictures, png, write_images

pytestmark = pytest.mark.distributed

NUM_TRAIN = 64
SMALL = [
    "model=mlp",
    "train.batch_size=8",
    "train.epochs=2",
    "dataset.image_shape=[6,6,1]",
    "checkpoint.every_epochs=1",
]
WHERE = f"hvtrain: rank 1 on {socket.gethostname()}: "
ADVICE = "or leave out what cannot be read with data.on_error=skip"


def write_records(folder: Path, split: str, number: int, num_files: int) -> list[Path]:
    from hvtrain.data import write_tfrecords

    images = np.random.default_rng(0).integers(0, 256, (number, 6, 6, 1), np.uint8)
    return write_tfrecords(folder, split, images, np.arange(number) % 2, num_files)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def said(output: str) -> list[str]:
    return [match[1] for match in re.finditer(r"(hvtrain: .*)", output)]


def check_end(code: int, output: str, beginning: str, folder: Path) -> None:
    """Rank 1 says it in one line, the launcher repeats it, and rank 0 says no more than that it stops because of it."""
    assert code == 2, output
    ours = [line for line in said(output) if line.startswith(WHERE)]
    assert len(ours) == 1 and ours[0].startswith(WHERE + beginning), output
    assert ADVICE in ours[0]
    others = [line for line in said(output) if line not in ours and "FIRST FAILURE rank 1 " not in line]
    assert len(others) <= 1 and all("stopped because" in line for line in others), output
    assert "Traceback" not in output
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listed.splitlines() if str(folder) in line and "-m hvtrain" in line]


@pytest.mark.apart
@pytest.mark.parametrize("launcher", ["mpirun", "gloo"])
def test_an_image_that_one_rank_cannot_read_ends_all(launcher, tmp_path):
    culprit = write_images(tmp_path / "data" / "train", NUM_TRAIN)[41]
    culprit.write_bytes(culprit.read_bytes()[:40])
    words = [*SMALL, "dataset=image_folder", f"dataset.dir={tmp_path}/data", f"run.dir={tmp_path}/run"]
    code, output = train(launcher, 2, *words, cwd=tmp_path)
    check_end(code, output, f"{culprit}: cannot be decoded (", tmp_path)


@pytest.mark.apart
def test_an_image_of_the_test_data_that_one_rank_cannot_read_ends_all(tmp_path):
    write_images(tmp_path / "data" / "train", NUM_TRAIN)
    culprit = write_images(tmp_path / "data" / "test", 10)[3]
    culprit.write_bytes(b"")
    words = [*SMALL, "dataset=image_folder", f"dataset.dir={tmp_path}/data", f"run.dir={tmp_path}/run"]
    code, output = train("mpirun", 2, *words, cwd=tmp_path)
    check_end(code, output, f"{culprit}: cannot be decoded (Input is empty); mend or remove it", tmp_path)


@pytest.mark.apart
@pytest.mark.parametrize("kind", ["tfrecord", "parquet"])
def test_a_record_or_row_that_one_rank_cannot_read_ends_all(kind, tmp_path):
    folder = tmp_path / "data"
    if kind == "tfrecord":
        path = write_records(folder, "train", NUM_TRAIN, 2)[1]  # Rank 1's.
        flip(path, -20)
        beginning = f"{path}, record 31 at byte "
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder.mkdir()
        images = pictures(NUM_TRAIN)
        images[25] = b"no image"
        table = pa.table({"image": images, "label": [0, 1] * (NUM_TRAIN // 2)})
        path = folder / "train.parquet"
        pq.write_table(table, path, row_group_size=16)  # The first and third group are rank 0's.
        beginning = f"{path}, row group 1, row 9: Unknown image file format"
    words = [*SMALL, f"dataset={kind}", f"dataset.dir={folder}", "dataset.num_classes=2", f"run.dir={tmp_path}/run"]
    code, output = train("mpirun", 2, *words, cwd=tmp_path)
    check_end(code, output, beginning, tmp_path)


@pytest.mark.apart
def test_what_is_skipped_is_told_and_a_changed_data_set_is_refused_on_resume(tmp_path):
    folder, run_folder = tmp_path / "data", tmp_path / "run"
    paths = write_records(folder, "train", NUM_TRAIN, 2)
    whole = paths[0].read_bytes()
    flip(paths[1], -20)
    flip(write_records(folder, "test", 10, 1)[0], 20)
    words = [*SMALL, "dataset=tfrecord", f"dataset.dir={folder}", "dataset.num_classes=2", f"run.dir={run_folder}"]
    code, output = train("mpirun", 2, *words, "data.on_error=skip", cwd=tmp_path)
    assert code == 0, output
    assert "skipped 1 examples that could not be read; names in logs/" in output
    assert "skipped 2 examples that could not be read; names in logs/" in output
    result = json.loads((run_folder / "result.json").read_text())
    assert (result["skipped_examples"], result["num_steps"]) == (2, 8)
    logged = (run_folder / "logs" / "rank-0001.log").read_text()
    assert logged.count(f"rank 1 skips {paths[1]}, record 31 at byte ") == 1 and "corrupted record" in logged

    from hvtrain.data.formats.record_framing import scan_records

    (folder / paths[1].name).unlink()
    paths[0].write_bytes(whole[: scan_records(paths[0])[0][20]])
    shutil.copy(paths[0], folder / "train-a.tfrecord")
    code, output = train("mpirun", 2, *words, "data.on_error=skip", "train.epochs=4", cwd=tmp_path)
    assert code == 2, output
    line = said(output)[0]
    size = paths[0].stat().st_size
    assert line == (
        f"hvtrain: the data set is not the one of checkpoint step-00000008: train holds 40 examples, was 64; "
        f"train: {paths[0].name} has {size} bytes, was {len(whole)}; train: {paths[1].name} is gone; "
        f"train: train-a.tfrecord is new; bring that one back, or choose another run.dir, "
        f"or go on all the same with guard.data=false"
    )


@pytest.mark.apart
def test_a_changed_data_set_is_gone_on_with_when_told(tmp_path):
    """Another file of the same length in time: its size alone differs."""
    paths = write_images(tmp_path / "data" / "train", NUM_TRAIN)
    words = [*SMALL, "dataset=image_folder", f"dataset.dir={tmp_path}/data", f"run.dir={tmp_path}/run"]
    code, output = train("mpirun", 2, *words, cwd=tmp_path)
    assert code == 0, output
    paths[5].write_bytes(png(np.zeros([6, 6], np.uint8)))
    changed = f"train: {paths[5].relative_to(tmp_path / 'data')} has {paths[5].stat().st_size} bytes, was "
    for launcher in ("gloo", "mpirun"):
        code, output = train(launcher, 2, *words, "train.epochs=3", cwd=tmp_path)
        assert code == 2 and changed in said(output)[0], output
    code, output = train("mpirun", 2, *words, "train.epochs=3", "guard.data=false", cwd=tmp_path)
    assert code == 0 and changed in output and "guard.data=false: going on all the same" in output


def test_ranks_that_read_different_copies_are_refused(tmp_path):
    for rank in (0, 1):
        paths = write_images(tmp_path / str(rank) / "data" / "train", NUM_TRAIN)
    paths[7].unlink()
    command = " ".join(["cd $OMPI_COMM_WORLD_RANK; exec python -m hvtrain", *SMALL, "dataset=image_folder"])
    code, output = run("mpirun", 2, "bash", "-c", f"{command} dataset.dir=data run.dir={tmp_path}/run", cwd=tmp_path)
    assert code == 2, output
    host = socket.gethostname()
    line = said(output)[0]
    assert line.startswith(
        f"hvtrain: rank 0 on {host} and rank 1 on {host} read different data: train holds 63 examples, was 64; "
        f"train has 63 files, was 64; train: train/class_0/0007.png is gone; copy the same files to both hosts"
    ), line
