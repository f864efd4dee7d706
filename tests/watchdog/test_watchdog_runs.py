"""Trainings in which a rank hangs, stops, or loses its launcher: named in one line, all ranks down, no hang.

test_watchdog.py has all that needs no training; a rank that raises is in training/test_bad_input.py.
"""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from launching import ROOT, finish, start
from ranks import MARK, rank_processes, send

pytestmark = pytest.mark.distributed

OWN = ROOT / "tests/support/own_faults"
GOES_ON = "run the same command with run.dir={run} to resume from step-00000022"
HANGS = "+callbacks.acts={_target_: stuck.Acts, rank: %d, step: 30, what: %s}"


def begin(launcher, tmp_path, *overrides, size=2, options=(), **extra):
    line = [
        *options,
        "python",
        "-m",
        "hvtrain",
        "--config-dir",
        str(OWN / "conf"),
        "model=mlp",
        "run.report=false",
        f"run.dir={tmp_path / 'run'}",
        "data.uneven=trim",
        *overrides,
    ]
    # Fresh processes: ranks are found by their command lines, and signals go to single ones.
    return start(
        launcher, size, *line, cwd=tmp_path, cold=True, PYTHONPATH=f"{ROOT}:{OWN}", **extra
    )


def done(process, timeout=150):
    """Exit code, all output, and the lines of ours on the error output without the launchers' marks."""
    output = finish(process, timeout)
    return process.returncode, output, [match[1] for match in re.finditer(r"(hvtrain: .*)", output)]


def ranks_of(tmp_path):
    """The run's ranks, by their command lines."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            arguments = path.read_bytes().decode(errors="replace").split("\0")
            if arguments[1:3] == ["-m", "hvtrain"] and f"run.dir={tmp_path / 'run'}" in arguments:
                pids.append(int(path.parent.name))
    return pids


def none_left(tmp_path, seconds=10):
    deadline = time.monotonic() + seconds
    while ranks_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not ranks_of(tmp_path)


def stacks(tmp_path, rank):
    return (tmp_path / "run" / "stacks" / f"rank-{rank:04d}.txt").read_text()


@pytest.mark.nightly
def test_a_rank_that_hangs_in_its_data(tmp_path):
    """Open MPI's ranks would wait forever."""
    process = begin(
        "mpirun",
        tmp_path,
        "dataset=stuck",
        "dataset.rank=1",
        "dataset.batch=26",
        "watchdog.abort_seconds=5",
    )
    code, output, lines = done(process)
    assert code == 75, output
    pattern = r"hvtrain: no progress for [567] s \(watchdog.abort_seconds=5\): "
    pattern += r"rank 1 on \S+ hangs in data since step 27 \(\d\d:\d\d:\d\d\); "
    assert re.match(pattern, lines[-1]), output
    assert lines[-1].endswith(
        f"Python stacks are in {tmp_path}/run/stacks; {GOES_ON.format(run=tmp_path / 'run')}"
    )
    assert len(lines) == 1 and "Traceback" not in output
    assert "in wait" in stacks(tmp_path, 1) and "hvtrain/strategies/loop.py" in stacks(tmp_path, 0)
    assert none_left(tmp_path)


@pytest.mark.release
def test_gloo_gives_up_before_the_watchdog(tmp_path):
    """Gloo waits 30 s for a message; then the watchdog is asked, and knows who is stopped."""
    process = begin("gloo", tmp_path, HANGS % (1, "stop"), HOROVOD_GLOO_TIMEOUT_SECONDS="30")
    code, output, lines = done(process)
    assert code == 75, output
    naming = [
        line
        for line in lines
        if re.search(r"rank 1 on \S+ has not answered since .* and is stopped by a", line)
    ]
    assert naming and GOES_ON.format(run=tmp_path / "run") in naming[0], output
    assert "on_train_batch_end" in stacks(tmp_path, 1)
    assert none_left(tmp_path)


@pytest.mark.nightly
def test_a_rank_that_hangs_in_a_callback(tmp_path):
    process = begin("gloo", tmp_path, HANGS % (0, "hang"), "watchdog.abort_seconds=5")
    code, output, lines = done(process)
    assert code == 75, output
    assert re.search(r"rank 0 on \S+ hangs in callbacks since step 30 ", lines[0]), output
    assert "stuck/__init__.py" in stacks(tmp_path, 0)
    assert none_left(tmp_path)


@pytest.mark.nightly
def test_an_error_of_nccl_is_a_lost_connection(tmp_path):
    """All ranks are there: a restart may help."""
    code, output, lines = done(begin("gloo", tmp_path, HANGS % (1, "nccl")))
    assert code == 75, output
    cause = (
        r"NCCL lost the connection between ranks \(ncclAllReduce failed: unhandled system error\); "
    )
    assert re.search(cause + GOES_ON.format(run=tmp_path / "run"), lines[0]), output
    assert "Traceback" not in output
    assert none_left(tmp_path)


@pytest.mark.release
def test_what_takes_longer_than_the_limit_is_no_hang(tmp_path):
    """A validation of 9 batches of a second each on a rank, and the start of it all."""
    overrides = [
        "dataset=stuck",
        "dataset.evaluation_seconds=1",
        "train.evaluation_batch_size=20",
        "train.epochs=1",
    ]
    code, output, lines = done(begin("mpirun", tmp_path, *overrides, "watchdog.abort_seconds=5"))
    assert code == 0, output
    assert lines == []


@pytest.mark.nightly
def test_the_launcher_is_killed(tmp_path):
    """All ranks notice and go. Over two hosts: test_network.py."""
    mark = str(tmp_path)
    process = begin("mpirun", tmp_path, "train.epochs=100000", **{MARK: mark})
    checkpoints = tmp_path / "run" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("step-*")):
        assert time.monotonic() < deadline and process.poll() is None, finish(process, 5)
        time.sleep(0.05)
    assert set(rank_processes(mark)) == {0, 1}
    os.kill(process.pid, signal.SIGKILL)
    assert none_left(tmp_path, 60), ranks_of(tmp_path)
    process.communicate()


@pytest.mark.release
def test_of_four_ranks_only_the_one_that_was_killed_had_to_be(tmp_path):
    """The launcher's signal finds the others before or after they noticed; none waits on for another to speak."""
    mark = str(tmp_path)
    process = begin("gloo", tmp_path, "train.epochs=4000", size=4, **{MARK: mark})
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run/checkpoints").glob("step-*")):
        assert time.monotonic() < deadline and process.poll() is None, finish(process, 5)
        time.sleep(0.05)
    assert send(rank_processes(mark)[1], signal.SIGKILL)
    code, output, lines = done(process)
    assert code == 75 and lines[-1].startswith("hvtrain: FIRST FAILURE rank 1 host "), output
    assert re.findall(r"Process (\d) exit with status code 137", output) == ["1"], output
    assert none_left(tmp_path)
