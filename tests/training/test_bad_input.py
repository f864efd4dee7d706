"""What bad input gets with several ranks: one line, a non-zero exit, all ranks down, nothing lost."""

import os
import re
import signal
import subprocess
import time

import pytest

from launching import ROOT, finish, start, train

pytestmark = pytest.mark.distributed

OWN = ["--config-dir", str(ROOT / "tests/support/own/conf"), "model=tiny", "dataset=leaves"]
OWN_PATH = str(ROOT / "tests/support/own")


def said(output):
    """The lines of ours, without launchers' marks and TensorFlow's notes."""
    return [match[1] for match in re.finditer(r"(hvtrain: .*)", output)]


def no_ranks_left(folder):
    listed = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    return not [
        line for line in listed.splitlines() if str(folder) in line and "-m hvtrain" in line
    ]


@pytest.mark.nightly
def test_more_than_the_shard_holds(tmp_path):
    code, output = train(
        "gloo", 2, "train.batch_size=5000", f"run.dir={tmp_path / 'run'}", cwd=tmp_path
    )
    assert code == 2, output
    assert said(output) == [
        "hvtrain: train.batch_size=5000 exceeds the 718 examples of a rank (1437 of digits over 2 ranks); "
        "lower train.batch_size to at most 718 or use fewer ranks"
    ]
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == [], "no folder of a run that never began"
    assert no_ranks_left(tmp_path)


def errors(two_ranks, name):
    """What each rank raised."""
    return [rank[name]["error"] for rank in two_ranks[1]]


@pytest.mark.nightly
def test_a_folder_that_cannot_be_written(two_ranks):
    """Refused on rank 0, and all ranks go."""
    folder = two_ranks[0]
    why = f"ConfigError: run.dir={folder}/file/run cannot be written: Not a directory; choose another run.dir"
    assert errors(two_ranks, "unwritable") == [why] * 2


@pytest.mark.nightly
def test_settings_that_differ_between_ranks(two_ranks):
    for error in errors(two_ranks, "settings"):
        assert error.startswith("ConfigError: rank 0 on ") and error.endswith(
            " have different settings: seed is 0 and 1; start all ranks with the same command"
        )


@pytest.mark.nightly
def test_a_strategy_that_reduces_nothing_is_stopped(two_ranks):
    for error in errors(two_ranks, "forgetful"):
        assert "the first step reduced no gradient over the 2 ranks" in error


@pytest.mark.nightly
def test_a_job_that_is_not_elastic_is_refused(two_ranks):
    why = "needs an elastic job, but this is not one; start it with horovodrun --gloo -np N --min-np N"
    assert all(why in error for error in errors(two_ranks, "elastic"))


@pytest.mark.parametrize(
    ("launcher", "rank", "where"),
    [("gloo", 1, "callback"), pytest.param("mpirun", 0, "graph", marks=pytest.mark.nightly)],
)
def test_an_exception_on_one_rank_comes_first_and_ends_all(launcher, rank, where, tmp_path):
    """In the user's own code, in the middle of the training. The other rank says in a line why it stopped."""
    error, fails = (
        "RuntimeError: a leaf fell off",
        f"+callbacks.a={{_target_: leaves.Fails, rank: {rank}, batch: 4}}",
    )
    if where == "graph":
        fails = f"model.fail_on_rank={rank}"
    arguments = [*OWN, fails, f"run.dir={tmp_path / 'run'}", "train.epochs=50"]
    code, output = train(launcher, 2, *arguments, cwd=tmp_path, PYTHONPATH=OWN_PATH)
    assert code == 1, output
    assert error in output
    assert output.count("Traceback (most recent call last)") == (1 if where == "callback" else 2), (
        "of the one rank alone"
    )
    lines = said(output)
    where = r"( \(\S+leaves/__init__.py, line \d+\))"
    assert re.match(
        rf"hvtrain: rank {rank} on \S+ failed: {error}{where}; see its traceback above", lines[0]
    ), output
    others = [line for line in lines if "stopped because" in line]
    assert all(
        re.search(rf"because rank {rank} on \S+ failed: {error}", line) for line in others
    ), output
    # Gloo's launcher is ours and speaks last; bare mpirun's is not, so that the other rank may.
    assert re.search(rf"rank {rank} (host|on) \S+?(:| failed:) {error}", lines[-1]), output
    assert no_ranks_left(tmp_path)


def test_settings_of_another_launcher_are_told(tmp_path):
    """A rank that mpirun started, as it sees itself."""
    gloo = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "OMPI_COMM_WORLD_SIZE": "2",
    }
    code, output = train(None, 1, *OWN, cwd=tmp_path, PYTHONPATH=OWN_PATH, **gloo)
    assert code == 2, output
    assert (
        "the launcher started 2 ranks but this one finds itself alone with HOROVOD_CONTROLLER=gloo"
        in output
    )


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [
        (None, 1),
        pytest.param("gloo", 2, marks=pytest.mark.nightly),
        pytest.param("mpi", 2, marks=pytest.mark.release),
    ],
)
def test_interrupted_by_the_user(launcher, num_ranks, tmp_path):
    """Ctrl-C in the terminal saves on all ranks, and says so; nothing of the run stays behind but its folder."""
    checkpoints = tmp_path / "run" / "checkpoints"
    arguments = [
        *OWN,
        f"run.dir={tmp_path / 'run'}",
        "train.epochs=100000",
        "checkpoint.every_epochs=20",
    ]
    process = start(
        launcher,
        num_ranks,
        "python",
        "-m",
        "hvtrain",
        *arguments,
        cwd=tmp_path,
        PYTHONPATH=OWN_PATH,
    )
    deadline = time.monotonic() + 90
    while not list(checkpoints.glob("step-*")):
        assert time.monotonic() < deadline and process.poll() is None, finish(process, 5)
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output = finish(process, timeout=60)
    assert process.returncode == 130, output
    assert output.count("hvtrain: Ctrl-C: saving and stopping; press it again to exit now") == 1
    step = re.search(r"stopped by Ctrl-C after step ([\d,]+) of", output)[1].replace(",", "")
    assert max(checkpoints.glob("step-*")).name == f"step-{int(step):08d}"
    epoch, done, whole = map(
        int, re.findall(r"Epoch (\d+)/100000: (\d+)/(\d+) steps, ", output)[-1]
    )
    assert (epoch - 1) * whole + done == int(step), (
        "the last line counts what was done of the epoch"
    )
    deadline = time.monotonic() + 10
    while not no_ranks_left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert no_ranks_left(tmp_path)


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (
            signal.SIGTERM,
            75,
            "hvtrain: SIGTERM arrived before training began, so nothing was saved\n",
        ),
        (signal.SIGINT, 130, "hvtrain: interrupted; nothing new was saved\n"),
    ],
)
def test_a_signal_before_training_says_that_nothing_was_saved(number, code, message, tmp_path):
    arguments = [
        "python",
        "-u",
        "-m",
        "hvtrain",
        f"run.dir={tmp_path / 'run'}",
        "train.epochs=100000",
    ]
    process = start(None, 1, *arguments, cwd=tmp_path)
    first = process.stdout.readline()
    assert "loading TensorFlow" in first
    os.killpg(process.pid, number)
    assert (finish(process, 60), process.returncode) == (message, code)
