"""No room, or no permission, while a run saves: told with the bytes needed and free, and what was saved stays."""

import json
import time

import pytest

from disks import remounted, small_disk
from hvtrain.checkpoint import store
from launching import finish, start, train
from newest_checkpoint import newest

pytestmark = pytest.mark.distributed

# A checkpoint of the default model has 640 kB; the second one kept does not fit beside the one being written.
OVERRIDES = [
    "train.epochs=3",
    "checkpoint.every_steps=7",
    "data.uneven=trim",
    "checkpoint.keep=9",
]


def messages(output):
    """What stands on the error output, once: other ranks repeat an error where the launcher is slow to end them."""
    lines = [line[line.index("hvtrain: ") :] for line in output.splitlines() if "hvtrain: " in line]
    return list(dict.fromkeys(line.replace("hvtrain: rank 1: ", "hvtrain: ") for line in lines))


def steps(run):
    return [store.read(path).step for path in store.list_checkpoints(run / "checkpoints")]


def strays(run):
    return list(run.rglob(".tmp-*"))


def wait_for(process, condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, finish(process, 5)
        time.sleep(0.02)


@pytest.mark.nightly
def test_a_full_disk_stops_all_ranks(tmp_path):
    """Soon after the write failed in the background, and not when the next one is due."""
    run = tmp_path / "run"
    overrides = [
        "train.epochs=60",
        "checkpoint.every_epochs=null",
        "checkpoint.every_steps=242",
        "checkpoint.keep=9",
    ]
    with small_disk(run, "size=1600k"):
        code, output = train("mpirun", 2, *overrides, f"run.dir={run}", cwd=tmp_path)
        assert code == 2, output
        (line,) = messages(output)
        assert line.startswith(
            "hvtrain: checkpoint step-00000726 was not written: No space left on device (6"
        ), line
        assert " bytes needed, " in line and f" free at {run / 'checkpoints'})" in line
        assert line.endswith("make room there, then start again with the same run.dir to continue")
        assert "Traceback" not in output
        condition, damaged = newest(run / "checkpoints")
        assert steps(run) == [242, 484] and condition.step == 484 and damaged == []
        assert json.loads((condition.path / "meta.json").read_text())["metrics"]["accuracy"] > 0
        epochs = [
            int(row.split(",")[1]) for row in (run / "history.csv").read_text().splitlines()[1:]
        ]
        assert 726 <= epochs[-1] < 946, (
            "the next write was due after 968 steps, at the end of an epoch"
        )
        assert strays(run) == []


# Going on without saving is rank 0's own affair, so that one process shows it.
@pytest.mark.nightly
def test_training_goes_on_without_checkpoints_where_that_is_wished(tmp_path):
    """And saves again as soon as there is room."""
    run, log = tmp_path / "run", tmp_path / "run/logs/rank-0000.log"
    with small_disk(run / "checkpoints", "size=1600k") as disk:
        filler = disk / "filler"
        filler.write_bytes(b"x" * 1_400_000)
        overrides = [
            *OVERRIDES[:3],
            "checkpoint.keep=1",
            "checkpoint.on_error=warn",
            f"run.dir={run}",
        ]
        process = start(None, 1, "python", "-m", "hvtrain", *overrides, cwd=tmp_path)
        wait_for(process, lambda: log.exists() and "training continues" in log.read_text())
        filler.unlink()
        output = finish(process)
        assert process.returncode == 0, output
        assert "checkpoint step-00000007 was not written: No space left on device (6" in output
        assert "the last state is not saved" not in output
        assert steps(run) == [132]
    assert (run / "result.json").exists()


@pytest.mark.parametrize(
    ("ranks", "on_error", "code"),
    [
        pytest.param(("gloo", 2), "stop", 2, marks=pytest.mark.release),
        pytest.param((None, 1), "warn", 0, marks=pytest.mark.release),
    ],
)
def test_a_disk_that_becomes_read_only(ranks, on_error, code, tmp_path):
    run = tmp_path / "run"
    overrides = [
        "train.epochs=12",
        *OVERRIDES[1:],
        f"checkpoint.on_error={on_error}",
        f"run.dir={run}",
    ]
    with small_disk(run / "checkpoints", "size=40m") as disk:
        process = start(*ranks, "python", "-m", "hvtrain", *overrides, cwd=tmp_path)
        wait_for(process, lambda: len(list(disk.glob("step-*"))) > 1)
        # Refused while a file is open for writing.
        wait_for(process, lambda: remounted(disk, "ro"))
        output = finish(process)
        assert process.returncode == code, output
        assert "was not written: Read-only file system (" in output
        last = 264 if ranks[1] == 2 else 528
        assert (
            f"the last state is not saved: checkpoint step-{last:08d} was not written" in output
        ) == (code == 0)
        assert len(messages(output)) == (code != 0), output
        assert steps(run)[:2] == [7, 14]
        assert len(strays(run)) <= 1, (
            "what was being written as the disk changed; the next run removes it"
        )

        saved = steps(run)[-1]
        assert remounted(disk, "rw")
        code, output = train(*ranks, *overrides, cwd=tmp_path)
        assert code == 0, output
        assert f"step-{saved:08d}: {saved} of {last} steps were done" in output
        assert steps(run)[-1] == last
        assert strays(run) == []


@pytest.mark.nightly
def test_a_quota_on_the_size_of_files(tmp_path):
    """The state alone is too large."""
    line = f"ulimit -f 500; exec python -m hvtrain run.dir={tmp_path / 'run'} train.epochs=2 data.uneven=trim"
    process = start(None, 1, "bash", "-c", line, cwd=tmp_path)
    output = finish(process)
    code = process.returncode
    assert code == 2, output
    assert messages(output)[0].startswith(
        "hvtrain: checkpoint step-00000044 was not written: File too large (6"
    ), output


@pytest.mark.parametrize(
    ("ranks", "on_error"),
    [
        pytest.param(("mpirun", 2), "stop", marks=pytest.mark.nightly),
        pytest.param((None, 1), "warn", marks=pytest.mark.release),
    ],
)
def test_no_room_for_logs_and_results(ranks, on_error, tmp_path):
    """The rows of epochs, and at last the model, cannot be written: one line, and the other rank ends too."""
    run = tmp_path / "run"
    with small_disk(run, "size=400k"), small_disk(run / "checkpoints", "size=10m"):
        # Rows are added to the last page of a file until it is full. With on_error=warn each failure is logged.
        overrides = ["train.epochs=150", f"checkpoint.on_error={on_error}", f"run.dir={run}"]
        process = start(*ranks, "python", "-m", "hvtrain", *overrides, cwd=tmp_path)
        wait_for(process, lambda: list(run.glob("checkpoints/step-*")))
        with pytest.raises(OSError), (run / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        output = finish(process)
        assert process.returncode == 2, output
        assert "Traceback" not in output and "Logging error" not in output
        file = "history.csv" if on_error == "stop" else "model.keras"
        (line,) = messages(output)
        assert line.startswith(
            f"hvtrain: {run / file} was not written: No space left on device ("
        ), line
        assert strays(run) == []
