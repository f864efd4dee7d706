"""Damaged and changed data under real ranks: one line with the place, the rank and the host; skipped; or refused."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from launching import many_runs, train
from pictures import png, write_images

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
ADVICE = "or set data.on_error=skip to leave out what cannot be read"


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
    others = [
        line for line in said(output) if line not in ours and "FIRST FAILURE rank 1 " not in line
    ]
    assert len(others) <= 1 and all("stopped because" in line for line in others), output
    assert "Traceback" not in output
    listed = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert not [
        line for line in listed.splitlines() if str(folder) in line and "-m hvtrain" in line
    ]


@pytest.mark.nightly
def test_an_image_that_one_rank_cannot_read_ends_all(tmp_path):
    culprit = write_images(tmp_path / "data" / "train", NUM_TRAIN)[41]
    culprit.write_bytes(culprit.read_bytes()[:40])
    words = [
        *SMALL,
        "dataset=image_folder",
        f"dataset.dir={tmp_path}/data",
        f"run.dir={tmp_path}/run",
    ]
    code, output = train("gloo", 2, *words, cwd=tmp_path)
    check_end(code, output, f"{culprit}: ", tmp_path)


@pytest.mark.release
def test_an_image_of_the_test_data_that_one_rank_cannot_read_ends_all(tmp_path):
    write_images(tmp_path / "data" / "train", NUM_TRAIN)
    culprit = write_images(tmp_path / "data" / "test", 10)[3]
    culprit.write_bytes(b"")
    words = [
        *SMALL,
        "dataset=image_folder",
        f"dataset.dir={tmp_path}/data",
        f"run.dir={tmp_path}/run",
    ]
    code, output = train("mpirun", 2, *words, cwd=tmp_path)
    check_end(code, output, f"{culprit}: Input is empty; fix or remove it", tmp_path)


def write_skipped(folder: Path) -> list[Path]:
    """Records of which one cannot be read, and one of the test data."""
    paths = write_records(folder, "train", NUM_TRAIN, 2)
    flip(paths[1], -20)
    flip(write_records(folder, "test", 10, 1)[0], 20)
    return paths


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list, str]:
    """(folder, what each rank saw, all output) of runs on data that is damaged, or changed before they go on."""
    from hvtrain.data.formats.record_files import scan_records

    folder = tmp_path_factory.mktemp("damaged")
    write_skipped(folder / "records")
    first, second = write_skipped(folder / "other-records")
    second.unlink()
    first.write_bytes(first.read_bytes()[: scan_records(first)[0][20]])
    shutil.copy(first, first.with_name("train-a.tfrecord"))
    write_images(folder / "images" / "train", NUM_TRAIN)
    # Another file of the same length in time: its size alone differs.
    write_images(folder / "other-images" / "train", NUM_TRAIN)[5].write_bytes(
        png(np.zeros([6, 6], np.uint8))
    )
    for rank in (0, 1):
        paths = write_images(folder / str(rank) / "data" / "train", NUM_TRAIN)
    paths[7].unlink()
    records = [*SMALL, "dataset=tfrecord", "dataset.num_classes=2", "data.on_error=skip"]
    images = [*SMALL, "dataset=image_folder"]
    return (
        folder,
        *many_runs(
            "mpirun",
            2,
            {
                "skipped": [*records, f"dataset.dir={folder}/records"],
                "skipped/again": [
                    *records,
                    f"dataset.dir={folder}/other-records",
                    "train.epochs=4",
                ],
                "changed": [*images, f"dataset.dir={folder}/images"],
                "changed/again": [*images, f"dataset.dir={folder}/other-images", "train.epochs=3"],
                "changed/told": [
                    *images,
                    f"dataset.dir={folder}/other-images",
                    "train.epochs=3",
                    "guard.data=false",
                ],
                "copies": [*images, "dataset.dir=data"],
            },
            folder,
            through=[
                "bash",
                "-c",
                'cd $OMPI_COMM_WORLD_RANK && exec "$@"',
                "cd",
            ],  # Where its copy is.
        ),
    )


def error(ranks, name: str) -> str:
    """The same on both ranks."""
    found = {rank[name].get("error") for rank in ranks[1]}
    assert len(found) == 1 and None not in found, found
    return found.pop()


@pytest.mark.nightly
def test_what_is_skipped_is_told(ranks):
    folder, found, output = ranks
    assert "skipped 1 example(s) that could not be read; their names are in logs/" in output
    assert "skipped 2 example(s) that could not be read; their names are in logs/" in output
    record = found[0]["skipped"]["record"]
    assert (record["skipped_examples"], record["num_steps"]) == (2, 8)
    logged = (folder / "skipped" / "logs" / "rank-0001.log").read_text()
    damaged = folder / "records" / "train-00001-of-00002.tfrecord"
    assert (
        logged.count(f"rank 1 skips {damaged}, record 31 at byte ") == 1
        and "corrupted record" in logged
    )


@pytest.mark.nightly
def test_a_changed_data_set_is_refused_on_resume(ranks):
    first, second = sorted((ranks[0] / "records").glob("train-*"))
    size = (ranks[0] / "other-records" / first.name).stat().st_size
    assert error(ranks, "skipped/again").endswith(
        f"the data set is not the one that checkpoint step-00000008 was trained on: train holds 40 examples, was 64; "
        f"train: {first.name} has {size} bytes, was {first.stat().st_size}; train: {second.name} is gone; "
        f"train: train-a.tfrecord is new; restore that data set, or choose another run.dir, "
        f"or continue anyway with guard.data=false"
    )


@pytest.mark.nightly
def test_a_changed_data_set_is_gone_on_with_when_told(ranks):
    folder, found, output = ranks
    (path,) = (folder / "other-images").rglob("0005.png")
    changed = (
        f"train: {path.relative_to(folder / 'other-images')} has {path.stat().st_size} bytes, was "
    )
    assert changed in error(ranks, "changed/again")
    assert found[0]["changed/told"]["record"]["num_steps"] == 12
    assert changed in output and "continuing because of guard.data=false" in output


@pytest.mark.nightly
def test_ranks_that_read_different_copies_are_refused(ranks):
    host = socket.gethostname()
    assert error(ranks, "copies").startswith(
        f"RankError: rank 0 on {host} and rank 1 on {host} read different data: train holds 63 examples, was 64; "
        f"train has 63 files, was 64; train: train/class_0/0007.png is gone; copy the same files to both hosts"
    )
