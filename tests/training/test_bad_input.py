"""What bad input gets with several ranks: one line, a non-zero exit, all ranks down, nothing lost."""

import os
import re
import signal
import subprocess
import time

import pytest

from launching import ROOT, finish, run, start, train

pytestmark = pytest.mark.distributed

OWN = ["--config-dir", str(ROOT / "tests/support/own/conf"), "model=tiny", "dataset=leaves"]
OWN_PATH = str(ROOT / "tests/support/own")


def said(output):
    """The lines of ours, without launchers' marks and TensorFlow's notes."""
    return [match[1] for match in re.finditer(r"(hvtrain: .*)", output)]


def no_ranks_left(folder):
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return not [line for line in listed.splitlines() if str(folder) in line and "-m hvtrain" in line]


@pytest.mark.parametrize("launcher", ["gloo", pytest.param("mpi", marks=pytest.mark.apart)])
def test_more_than_the_shard_holds(launcher, tmp_path):
    code, output = train(launcher, 2, "train.batch_size=5000", f"run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert code == 2, output
    assert said(output) == [
        "hvtrain: train.batch_size=5000 exceeds the 718 examples of a rank (1437 of digits over 2 ranks); "
        "lower train.batch_size to at most 718 or use fewer ranks"
    ]
    assert "Traceback" not in output
    assert no_ranks_left(tmp_path)


@pytest.mark.apart
def test_a_folder_that_cannot_be_written(tmp_path):
    """Refused on rank 0, and all ranks go."""
    (tmp_path / "file").touch()
    words = [*OWN, f"run.dir={tmp_path}/file/run"]
    code, output = train("mpirun", 3, *words, cwd=tmp_path, PYTHONPATH=OWN_PATH)
    assert code == 2, output
    assert said(output) == [
        f"hvtrain: run.dir={tmp_path}/file/run cannot be written: Not a directory; choose another run.dir"
    ]


@pytest.mark.apart
def test_settings_that_differ_between_ranks(tmp_path):
    line = f"python -m hvtrain run.dir={tmp_path / 'run'} seed=$((OMPI_COMM_WORLD_RANK / 2)) train.epochs=3"
    code, output = run("mpirun", 3, "bash", "-c", line, cwd=tmp_path)
    assert code == 2, output
    assert said(output) == [
        "hvtrain: ranks 0 and 2 were started with different settings: seed is 0 and 1; "
        "start all ranks with the same command"
    ]
    assert "Traceback" not in output


@pytest.mark.parametrize(("launcher", "rank"), [("gloo", 1), pytest.param("mpirun", 0, marks=pytest.mark.apart)])
def test_an_exception_on_one_rank_comes_first_and_ends_all(launcher, rank, tmp_path):
    """In the middle of the training, in the user's own code."""
    words = [*OWN, f"model.fail_on_rank={rank}", f"run.dir={tmp_path / 'run'}", "train.epochs=50"]
    process = start(launcher, 2, "python", "-m", "hvtrain", *words, cwd=tmp_path, PYTHONPATH=OWN_PATH)
    output = finish(process)
    assert process.returncode == 1, output
    assert "RuntimeError: a leaf fell off" in output
    assert f"hvtrain: rank {rank} on " in said(output)[0]
    assert output.count("Traceback (most recent call last)") <= 2, "of the one rank alone"
    assert no_ranks_left(tmp_path)


@pytest.mark.apart
def test_an_exception_on_one_rank_while_opening_data(tmp_path):
    words = [*OWN, "dataset.fail_on_rank=1", f"run.dir={tmp_path / 'run'}"]
    code, output = train("mpirun", 2, *words, cwd=tmp_path, PYTHONPATH=OWN_PATH)
    assert code == 1, output
    assert "RuntimeError: leaves are wet on this rank" in output
    assert "InstantiationException" not in output
    assert said(output)[0].startswith("hvtrain: rank 1 on ")


def test_a_strategy_that_reduces_nothing_is_stopped(tmp_path):
    words = [*OWN, "strategy=forgetful", f"run.dir={tmp_path / 'run'}"]
    code, output = train("mpirun", 2, *words, cwd=tmp_path, PYTHONPATH=OWN_PATH)
    assert code == 2, output
    assert "the first step reduced no gradient over the 2 ranks" in said(output)[0]


@pytest.mark.apart
def test_settings_of_another_launcher_are_told(tmp_path):
    gloo = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    code, output = train("mpirun", 2, *OWN, cwd=tmp_path, PYTHONPATH=OWN_PATH, **gloo)
    assert code == 2, output
    assert "the launcher started 2 ranks but this one finds itself alone with HOROVOD_CONTROLLER=gloo" in output


@pytest.mark.apart
def test_interrupted_by_the_user(tmp_path):
    """Ctrl-C in the terminal reaches the launcher and its ranks; nothing of the run stays behind but its folder."""
    checkpoints = tmp_path / "run" / "checkpoints"
    words = [*OWN, f"run.dir={tmp_path / 'run'}", "train.epochs=100000", "checkpoint.every_epochs=20"]
    process = start("gloo", 2, "python", "-m", "hvtrain", *words, cwd=tmp_path, PYTHONPATH=OWN_PATH)
    deadline = time.monotonic() + 90
    while not list(checkpoints.glob("step-*")):
        assert time.monotonic() < deadline and process.poll() is None, finish(process, 5)
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    output = finish(process, timeout=30)
    assert process.returncode not in (0, None), output
    assert time.monotonic() - began < 30
    deadline = time.monotonic() + 10
    while not no_ranks_left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert no_ranks_left(tmp_path)
    assert list(checkpoints.glob("step-*"))
